"""Figures of the engine for Prometheus."""

import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from neo_desktop.app.engines.generation import Generation
from neo_desktop.engine.request import RequestOutput
from neo_desktop.engine.stats import EngineStats

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ServiceMetrics:
    """Results of one model's requests. Belongs to the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"neo_desktop_{name}", text, buckets=buckets, registry=self.registry)

        # By output: a prompt with n answers counts n times.
        self._first_token_s = histogram(
            "time_to_first_token_seconds", "From a request's arrival to the first token of an output", TTFT_S
        )
        self._per_token_s = histogram(
            "time_per_output_token_seconds", "Of an output, without its first token", TPOT_S
        )
        self.iteration_s = histogram(
            "iteration_seconds", "Of the engine, from one iteration's results to the next one's", TPOT_S
        )
        self._finished = Counter(
            "neo_desktop_outputs",
            "Outputs that ended, by reason",
            ["finish_reason"],
            registry=self.registry,
        )

    def gained(self, generation: Generation, output: RequestOutput) -> None:
        now_s = time.monotonic()
        key = (output.request_id, output.choice)
        if key not in generation.first_s and output.num_output_tokens:
            self._first_token_s.observe(now_s - generation.arrived_s)
        first_s = generation.first_s.setdefault(key, now_s)
        if output.finish_reason is not None:
            self._finished.labels(output.finish_reason.value).inc()
            if output.num_output_tokens > 1:
                self._per_token_s.observe((now_s - first_s) / (output.num_output_tokens - 1))


class EngineCollector(Collector):
    def __init__(self, stats: EngineStats, num_queued: int) -> None:
        self._stats = stats
        self._num_queued = num_queued

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        names = ("model", "backend", "policy", "device", "dtype")
        value = {name: getattr(stats, name) for name in names}
        yield InfoMetricFamily("neo_desktop_model", "What is loaded", value=value)
        for name, text, gauge in self._gauges():
            yield GaugeMetricFamily(f"neo_desktop_{name}", text, value=gauge)
        families = [
            GaugeMetricFamily(f"neo_desktop_{name}", text, labels=["tier"])
            for name, text in (
                ("running_requests", "Requests by tier of KV"),
                ("cache_used_tokens", "KV in use, by tier"),
                ("cache_size_tokens", "KV that fits, by tier"),
                ("cache_given_back_tokens", "KV whose memory other programs have for now, by tier"),
            )
        ]
        running, *sizes = families
        for tier, count in stats.num_running_at.items():
            running.add_metric([tier.label], count)
        for tier, pool in stats.pools.items():
            blocks = (pool.num_used_blocks, pool.num_blocks, pool.num_given_back_blocks)
            for family, num_blocks in zip(sizes, blocks, strict=True):
                family.add_metric([tier.label], num_blocks * stats.block_size)
        yield from families
        for name, text, count in self._counters():
            yield CounterMetricFamily(f"neo_desktop_{name}", text, value=count)

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        yield "queued_outputs", "Outputs without a first token", self._num_queued
        yield "waiting_requests", "Requests that wait for KV", self._stats.num_waiting
        if (speculative := self._stats.speculative) is not None:
            yield "draft_width", "Tokens per verified draft", speculative.mean_width
            yield "speculation_gain", "Speed of iterations with drafts; 1: as without", speculative.gain
            yield "draft_model_seconds", "Time in which a model drafted", speculative.model_s

    def _counters(self) -> Iterator[tuple[str, str, int]]:
        stats = self._stats
        yield "prompt_tokens", "Prompt tokens, computed or reused", stats.num_prompt_tokens
        yield "cached_prompt_tokens", "Prompt tokens whose KV was reused", stats.num_cached_tokens
        yield "output_tokens", "Output tokens", stats.num_output_tokens
        yield "cpu_decodes", "Output tokens whose attention the CPU computed", stats.num_cpu_decodes
        yield "iterations", "Iterations of the engine", stats.num_iterations
        yield "async_decodes", "Output tokens computed asynchronously", stats.num_async_decodes
        yield "double_iterations", "Iterations with two sub-batches", stats.num_double_iterations
        yield "preemptions", "Requests whose KV had to be given up", stats.num_preemptions
        yield "moves", "Requests whose KV was moved to another tier", stats.num_moves
        yield "disk_read_bytes", "KV read from disk", stats.disk.read_bytes
        yield "disk_written_bytes", "KV written to disk", stats.disk.written_bytes
        yield "disk_dropped_bytes", "KV deleted, or not written in time", stats.disk.dropped_bytes
        yield "disk_hit_tokens", "Prompt tokens whose KV came from disk", stats.disk.num_hit_tokens
        if (speculative := stats.speculative) is not None:
            yield "drafted_tokens", "Tokens of verified drafts", speculative.num_drafted_tokens
            yield "accepted_draft_tokens", "Drafted tokens that were right", speculative.num_accepted_tokens
