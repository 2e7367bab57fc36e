"""Figures of the engine for Prometheus."""

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from neo_desktop.engine.request import RequestOutput
from neo_desktop.engine.stats import EngineStats, SpeculationStats

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ServiceMetrics:
    """Results of one model's requests; all methods but `iteration` belong to the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # By output: a prompt with n answers counts n times.
        self._first_token_s = Histogram(
            "neo_desktop_time_to_first_token_seconds",
            "From a request's arrival to the first token of an output",
            buckets=TTFT_S,
            registry=self.registry,
        )
        self._per_token_s = Histogram(
            "neo_desktop_time_per_output_token_seconds",
            "Of an output, without its first token",
            buckets=TPOT_S,
            registry=self.registry,
        )
        self._iteration_s = Histogram(
            "neo_desktop_iteration_seconds",
            "Of the engine, from one iteration's results to the next one's",
            buckets=TPOT_S,
            registry=self.registry,
        )
        self._finished = Counter(
            "neo_desktop_outputs",
            "Outputs that ended, by reason",
            ["finish_reason"],
            registry=self.registry,
        )
        self._arrived_s: dict[str, float] = {}  # request_id -> when
        self._first_s: dict[tuple[str, int], float] = {}  # (request_id, choice) -> when its first token came

    def arrived(self, request_ids: Sequence[str]) -> None:
        """Requests were submitted."""
        self._arrived_s |= dict.fromkeys(request_ids, time.monotonic())

    def gained(self, output: RequestOutput) -> None:
        """A request got tokens, or ended."""
        now_s = time.monotonic()
        key = (output.request_id, output.choice)
        if output.num_output_tokens and key not in self._first_s:
            self._first_s[key] = now_s
            self._first_token_s.observe(now_s - self._arrived_s[output.request_id])
        if output.finish_reason is not None:
            self._finished.labels(output.finish_reason.value).inc()
            if output.num_output_tokens > 1:
                self._per_token_s.observe((now_s - self._first_s[key]) / (output.num_output_tokens - 1))

    def left(self, request_id: str, n: int) -> None:
        """Forget a request whose client is served or gone."""
        self._arrived_s.pop(request_id, None)
        for choice in range(n):
            self._first_s.pop((request_id, choice), None)

    def iteration(self, seconds: float) -> None:
        """Note the time of an iteration, from the engine's thread."""
        self._iteration_s.observe(seconds)


class EngineCollector(Collector):
    """A snapshot of the engine as metrics."""

    def __init__(self, stats: EngineStats, num_queued: int) -> None:
        self._stats = stats
        self._num_queued = num_queued

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        yield InfoMetricFamily(
            "neo_desktop_model",
            "What is loaded",
            value={
                "model": stats.model,
                "backend": stats.backend,
                "policy": stats.policy,
                "device": stats.device,
                "dtype": stats.dtype,
            },
        )
        for name, help_text, value in (
            ("queued_outputs", "Outputs without a first token", self._num_queued),
            ("waiting_requests", "Requests that wait for KV", stats.num_waiting),
        ):
            yield GaugeMetricFamily(f"neo_desktop_{name}", help_text, value=value)
        running = GaugeMetricFamily("neo_desktop_running_requests", "Requests by tier of KV", labels=["tier"])
        for tier, count in stats.num_running_at.items():
            running.add_metric([tier.label], count)
        used = GaugeMetricFamily("neo_desktop_cache_used_tokens", "KV in use, by tier", labels=["tier"])
        size = GaugeMetricFamily("neo_desktop_cache_size_tokens", "KV that fits, by tier", labels=["tier"])
        given_back = GaugeMetricFamily(
            "neo_desktop_cache_given_back_tokens",
            "KV whose memory other programs have for now, by tier",
            labels=["tier"],
        )
        for tier, pool in stats.pools.items():
            given_back.add_metric([tier.label], pool.num_given_back_blocks * stats.block_size)
            used.add_metric([tier.label], pool.num_used_blocks * stats.block_size)
            size.add_metric([tier.label], pool.num_blocks * stats.block_size)
        yield from (running, used, size, given_back)
        for name, help_text, count in (
            ("prompt_tokens", "Prompt tokens, computed or reused", stats.num_prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens whose KV was reused", stats.num_cached_tokens),
            ("output_tokens", "Output tokens", stats.num_output_tokens),
            ("cpu_decodes", "Output tokens whose attention the CPU computed", stats.num_cpu_decodes),
            ("iterations", "Iterations of the engine", stats.num_iterations),
            ("async_decodes", "Output tokens computed asynchronously", stats.num_async_decodes),
            ("double_iterations", "Iterations with two sub-batches", stats.num_double_iterations),
            ("preemptions", "Requests whose KV had to be given up", stats.num_preemptions),
            ("moves", "Requests whose KV was moved to another tier", stats.num_moves),
            ("disk_read_bytes", "KV read from disk", stats.disk.read_bytes),
            ("disk_written_bytes", "KV written to disk", stats.disk.written_bytes),
            (
                "disk_dropped_bytes",
                "KV deleted, or not written in time",
                stats.disk.dropped_bytes,
            ),
            ("disk_hit_tokens", "Prompt tokens whose KV came from disk", stats.disk.num_hit_tokens),
            *_speculative_counters(stats.speculative),
        ):
            yield CounterMetricFamily(f"neo_desktop_{name}", help_text, value=count)
        if (speculative := stats.speculative) is not None:
            name, help_text = "neo_desktop_draft_width", "Tokens per verified draft"
            yield GaugeMetricFamily(name, help_text, value=speculative.mean_width)
            name, help_text = "neo_desktop_speculation_gain", "Speed of iterations with drafts; 1: as without"
            yield GaugeMetricFamily(name, help_text, value=speculative.gain)


def _speculative_counters(stats: SpeculationStats | None) -> Sequence[tuple[str, str, int]]:
    if stats is None:
        return ()
    return (
        ("drafted_tokens", "Tokens of verified drafts", stats.num_drafted_tokens),
        ("accepted_draft_tokens", "Drafted tokens that were right", stats.num_accepted_tokens),
    )
