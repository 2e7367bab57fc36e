"""One policy after the other: warm-up, one request alone, capacity, then rate by rate."""

import asyncio
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from neo_desktop.app.bench.computer import give_back_memory
from neo_desktop.app.bench.load.client import ClientRequest, EngineTarget, Limits, TargetError, send_all
from neo_desktop.app.bench.load.metrics import (
    Capacity,
    EngineFigures,
    LoadCurve,
    LoadMetrics,
    LoadPoint,
    summarise,
)
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.section import number
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.loading import LoadedModel, choose_device, load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.parts import set_up, take_memory
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace, synthetic, with_rate
from neo_desktop.engine.stats import EngineStats

FIRST_BURST, MOST_BURST = 4, 512
BURST_GAIN = 1.1  # what a burst twice as large has to bring
MOST_STALLS = 2  # bursts in a row that bring less: one may be a disturbance
CAPACITY_RUNS = 5  # of the best burst, at most
SHORT_PROMPT, SHORT_OUTPUT = 16, 2  # of the request that separates one run from the next
_CAPACITY_SHARE = 0.2  # of a policy's progress

Load = tuple[float, float | None]  # requests per second, and their share of the capacity


@dataclass(frozen=True, slots=True)
class LoadOptions(EngineOptions):
    """Settings. A run takes about `seconds` and a drain per rate and policy, and as much again before."""

    trace: Path | None = None  # lengths from a file, see engine/simulation/workload.py
    input_tokens: int = 256  # without a trace: lengths uniform in 0.9 to 1.1 of these
    output_tokens: int = 64
    num_requests: int | None = None  # per rate; None: as many as come in `seconds`
    rates: tuple[float, ...] | None = None  # requests per second; None: `load_shares` of the capacity
    load_shares: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.1)
    seconds: float = 6.0  # in which the requests of a rate come
    drain_seconds: float | None = None  # for open requests at the end; None: enough for five in a row
    warm_up: int = 2  # requests sent first, and not counted
    seed: int = 0
    ttft_limit_ms: float = 2000.0  # what a request must keep to count for goodput
    tpot_limit_ms: float = 200.0
    policies: tuple[str, ...] | None = None  # None: see `policies`


class Workload:
    """The lengths of requests, as many as are wanted: always the same ones, the first ones first."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._trace = None if options.trace is None else load_trace(options.trace)
        self.description = f"{options.input_tokens} tokens in and {options.output_tokens} out, within 10 %"
        if options.trace is not None:
            self.description = f"the lengths of {options.trace.name}, but not its arrival times"

    def take(self, count: int) -> list[WorkloadRequest]:
        """Return the first requests, again from the beginning where a trace is too short, all at once."""
        options = self._options
        if self._trace is None:
            return synthetic(count, options.input_tokens, options.output_tokens, options.seed)
        return [replace(request, arrival_ms=0.0) for request in islice(cycle(self._trace), count)]

    def typical(self) -> WorkloadRequest:
        """Return the request of median length."""
        requests = self.take(len(self._trace or range(9)))
        return sorted(requests, key=lambda request: request.total_tokens)[len(requests) // 2]


def poisson(requests: Sequence[WorkloadRequest], rate_per_s: float, seed: int) -> list[WorkloadRequest]:
    """Return the requests arriving as a Poisson process, stretched so that the mean rate is exactly this.

    A few dozen requests would else come 10 or 20 % faster or slower, and near the capacity that is all the
    difference.
    """
    arriving = with_rate(requests, rate_per_s, seed)
    span_ms = arriving[-1].arrival_ms
    stretch = (len(arriving) - 1) / rate_per_s * 1e3 / span_ms if span_ms else 1.0
    return [replace(request, arrival_ms=stretch * request.arrival_ms) for request in arriving]


def run_load(options: LoadOptions, progress: Progress) -> Iterator[LoadReport]:
    """Measure, and yield what is known after every run.

    Raises:
        WorkloadError, OSError: the trace cannot be used.
        TargetError: not a single request is answered.
        ModelError, ValueError, MemoryError: as from `Engine.from_pretrained`.
    """
    workload, limits = Workload(options), Limits(options.ttft_limit_ms, options.tpot_limit_ms)
    names = policies(options)
    progress(0.0, "loading the model")
    model = None if options.tensor_parallel > 1 else load(options)  # divided: each engine loads by itself
    done: tuple[LoadCurve, ...] = ()
    with asyncio.Runner() as runner:
        for index, name in enumerate(names):

            def within(share: float, what: str, index: int = index, name: str = name) -> None:
                progress((index + share) / len(names), f"{name}: {what}")

            target, subject = _open(options, model, name, within)
            report = LoadReport(subject, workload.description, limits, done)
            # Rates follow the first policy's capacity: all see the same requests at the same times.
            loads: list[Load] = [(p.rate_per_s, p.load_share) for curve in done[:1] for p in curve.points]
            try:
                runner.run(target.start())
                measurement = _Measurement(runner, target, name, options, workload, limits, within)
                with _brief_collections():
                    for curve in measurement.curves(loads):
                        yield replace(report, curves=(*done, curve))
            finally:
                runner.run(target.close())
            done = (*done, curve)
            del target, measurement  # an engine's caches, before the next one takes its own
    progress(1.0, "done")


def policies(options: LoadOptions) -> tuple[str, ...]:
    """Return those to compare: with and without the CPU-cache, where there are two places to choose from.

    Without a GPU its cache is imitated; it counts as a place of its own if its size was asked for.
    """
    if options.policies is not None:
        return options.policies
    on_gpu = choose_device(options.device).type == "cuda"
    has_device = options.gpu_cache_tokens != 0 if on_gpu else bool(options.gpu_cache_tokens)
    return ("auto", "gpu-only") if options.cpu_cache_tokens != 0 and has_device else ("auto",)


@contextmanager
def _brief_collections() -> Iterator[None]:
    """Keep what is there now out of garbage collections: with torch loaded, each would stop all for 0.3 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _open(
    options: LoadOptions, model: LoadedModel | None, name: str, progress: Progress
) -> tuple[EngineTarget, str]:
    """Return what to measure, and what to call it; `model` is None where it is not loaded yet."""
    give_back_memory()  # the engine before this one is gone, and counts as free
    own = replace(options, policy=name)
    engine = Engine.from_parts(
        set_up(own) if model is None else take_memory(model, own),
        name,
        progress=lambda _, what: progress(0.0, f"measuring this computer: {what}"),
    )
    stats = engine.stats()
    return EngineTarget(engine, options.seed), f"neo-desktop on {stats.device}, {stats.dtype}"


@dataclass(slots=True)
class _Measurement:
    """Of one policy."""

    runner: asyncio.Runner
    target: EngineTarget
    name: str
    options: LoadOptions
    workload: Workload
    limits: Limits
    progress: Progress

    def curves(self, loads: Sequence[Load]) -> Iterator[LoadCurve]:
        """Yield the curve as it grows; without `loads`, they are chosen."""
        options, typical = self.options, self.workload.typical()
        self.progress(0.0, "warming up")
        if options.warm_up:
            self._answered([typical] * options.warm_up)
        alone = self._answered([typical])
        drain_s = options.drain_seconds or max(options.seconds, 5 * alone.duration_s)
        curve = LoadCurve(self.name, self.target.model, alone, None, (), drain_s)
        yield curve
        if options.rates is None:
            curve = replace(curve, capacity=self._capacity())
            yield curve
        loads = loads or self._loads(curve.capacity)
        for done, (rate, share) in enumerate(loads):

            def ended(share_ended: float, done: int = done, rate: float = rate) -> None:
                share = (done + share_ended) / len(loads)
                self.progress(_CAPACITY_SHARE + (1 - _CAPACITY_SHARE) * share, f"{number(rate)} requests/s")

            curve = replace(curve, points=(*curve.points, self._point(rate, share, drain_s, ended)))
            yield curve

    def _loads(self, capacity: Capacity | None) -> Sequence[Load]:
        if capacity is None:
            return [(rate, None) for rate in sorted(self.options.rates or ())]
        per_s = capacity.metrics.finished_per_s
        return [(share * per_s, share) for share in sorted(self.options.load_shares)]

    def _capacity(self) -> Capacity:
        """Find out how many requests at once bring most, and what they bring: in the middle of several times.

        The first burst of its size also pays for what is done once for each size, and all the rates that
        follow are shares of this figure.
        """
        start = time.perf_counter()
        burst, best = self._best_burst()
        runs = [best]
        while len(runs) < CAPACITY_RUNS and time.perf_counter() - start < self.options.seconds:
            runs.append(self._burst(burst))
        # Of an even number the better one: where there are two, the first was not warm yet.
        by_rate = sorted(runs, key=lambda metrics: metrics.finished_per_s)
        return Capacity(burst, by_rate[len(runs) // 2])

    def _best_burst(self) -> tuple[int, LoadMetrics]:
        """Send more and more requests at once, until more of them bring no more, or it takes too long."""
        found: dict[int, LoadMetrics] = {}
        burst, stalls = FIRST_BURST, 0
        while True:
            metrics = self._burst(burst)
            best_per_s = max((each.finished_per_s for each in found.values()), default=0.0)
            stalls = 0 if metrics.finished_per_s > BURST_GAIN * best_per_s else stalls + 1
            found[burst] = metrics
            took_long = metrics.duration_s > self.options.seconds / 2
            lost_some = metrics.finished < metrics.requests
            if stalls == MOST_STALLS or took_long or lost_some or 2 * burst > MOST_BURST:
                return max(found.items(), key=lambda each: each[1].finished_per_s)
            burst *= 2

    def _burst(self, count: int) -> LoadMetrics:
        self.progress(_CAPACITY_SHARE / 2, f"{count} requests at once")
        return self._answered(self.workload.take(count))

    def _point(
        self, rate: float, share: float | None, drain_s: float, on_end: Callable[[float], None]
    ) -> LoadPoint:
        options = self.options
        count = options.num_requests or math.ceil(rate * options.seconds)
        requests = poisson(self.workload.take(count), rate, options.seed)
        # An iteration with requests that the run before has given up ends before this answer.
        self._send([WorkloadRequest(0.0, SHORT_PROMPT, SHORT_OUTPUT)], drain_s)
        before = self.target.stats()
        metrics = self._send(requests, drain_s, lambda num_ended: on_end(num_ended / count))
        return LoadPoint(rate, share, metrics, engine_figures(before, self.target.stats()))

    def _answered(self, requests: Sequence[WorkloadRequest]) -> LoadMetrics:
        """Send requests for which there must be answers."""
        metrics = self._send(requests)
        if not metrics.finished:
            raise TargetError(f"no request was answered: {metrics.failures[0].reason}")
        return metrics

    def _send(
        self,
        requests: Sequence[WorkloadRequest],
        drain_s: float | None = None,
        on_end: Callable[[int], None] = lambda num_ended: None,
    ) -> LoadMetrics:
        make = self.target.make_prompt
        sent = [ClientRequest(r.arrival_ms, make(r.prompt_tokens), r.output_tokens) for r in requests]
        return summarise(self.runner.run(send_all(self.target, sent, drain_s, on_end)), self.limits)


def engine_figures(before: EngineStats, after: EngineStats) -> EngineFigures:
    """Return what happened between two snapshots of one engine."""
    iterations = after.num_iterations - before.num_iterations
    tokens = after.num_output_tokens - before.num_output_tokens
    doubles = after.num_double_iterations - before.num_double_iterations
    return EngineFigures(
        iterations=iterations,
        mean_batch=tokens / max(iterations, 1),
        cpu_share=(after.num_cpu_decodes - before.num_cpu_decodes) / max(tokens, 1),
        double_share=doubles / max(iterations, 1),
        preemptions=after.num_preemptions - before.num_preemptions,
        moves=after.num_moves - before.num_moves,
    )
