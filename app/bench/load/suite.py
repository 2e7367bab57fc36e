"""One subject after the other: warm-up, one request alone, capacity, then rate by rate."""

import asyncio
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from neo_desktop.app.bench.checks import above_zero, at_least, each_once
from neo_desktop.app.bench.computer import give_back_memory
from neo_desktop.app.bench.load.engine_target import EngineTarget
from neo_desktop.app.bench.load.metrics import (
    Capacity,
    EngineFigures,
    LoadCurve,
    LoadMetrics,
    LoadPoint,
    LoadRun,
    summarise,
)
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.load.target import ClientRequest, Limits, Target, TargetError, send_all
from neo_desktop.app.bench.section import number
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.loading import LoadedModel, choose_device, load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.parts import set_up, take_memory
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace, synthetic, with_rate
from neo_desktop.engine.stats import EngineStats

_ENOUGH_FOR_A_MEDIAN = 9


@dataclass(frozen=True, slots=True)
class LoadOptions(EngineOptions):
    """Settings; with `url` a running server is measured and no engine is loaded.

    A run takes about `seconds` and a drain per rate, repeat and policy, and as much as two more of them per
    policy to find the capacity. For a quick run: `seconds=3, load_shares=(0.5, 0.75, 1.0)`.

    Raises:
        ValueError: a value is out of range, or two contradict each other.
    """

    trace: Path | None = None  # lengths from a file, see engine/simulation/workload.py
    input_tokens: int = 256  # without a trace: lengths uniform in 0.9 to 1.1 of these
    output_tokens: int = 64
    num_requests: int | None = None  # per rate; None: as many as come in `seconds`
    rates: tuple[float, ...] | None = None  # requests per second; None: `load_shares` of the capacity
    load_shares: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.1)
    seconds: float = 6.0  # in which the requests of a rate come
    drain_seconds: float | None = None  # for open requests at the end; None: see `suite.drain_seconds`
    repeats: int = 1  # each with other arrival times
    warm_up: int = 2  # requests sent first, and not counted
    seed: int = 0
    ttft_limit_ms: float = 2000.0  # what a request must keep to count for goodput
    tpot_limit_ms: float = 200.0
    policies: tuple[str, ...] | None = None  # None: see `suite.policies`
    url: str | None = None
    api_key: str | None = None
    url_model: str | None = None  # None: the first that the server lists

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        at_least(self, 1, "input_tokens", "output_tokens", "repeats", "num_requests")
        at_least(self, 0, "warm_up")
        above_zero(self, "seconds", "ttft_limit_ms", "tpot_limit_ms", "drain_seconds", "rates", "load_shares")
        each_once(self, "rates", "load_shares", "policies")
        for policy in self.policies or ():
            get_policy(policy)
        if self.url is not None and self.policies is not None:
            raise ValueError("a server has its own policy: give either policies or url")
        if self.url is None and (self.api_key or self.url_model):
            raise ValueError("api_key and url_model belong to a running server: give its url, too")


class Workload:
    """The lengths of requests, as many as are wanted: always the same ones, the first ones first."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._trace = None if options.trace is None else load_trace(options.trace)

    @property
    def description(self) -> str:
        """The lengths, for people."""
        options, trace = self._options, self._trace
        if options.trace is None or trace is None:
            lengths = f"about {options.input_tokens} tokens in and {options.output_tokens} out"
            return f"{lengths}, uniform within 10 % to either side"
        prompt = sum(request.prompt_tokens for request in trace) / len(trace)
        output = sum(request.output_tokens for request in trace) / len(trace)
        return (
            f"the lengths of {options.trace.name} in its order ({len(trace):,} requests, on average "
            f"{prompt:.0f} tokens in and {output:.0f} out), but not its arrival times"
        )

    def take(self, count: int) -> list[WorkloadRequest]:
        """Return the first requests, again from the beginning where a trace is too short, all at once."""
        options = self._options
        if self._trace is None:
            return synthetic(count, options.input_tokens, options.output_tokens, options.seed)
        return [replace(request, arrival_ms=0.0) for request in islice(cycle(self._trace), count)]

    def typical(self) -> WorkloadRequest:
        """Return the request of median length."""
        requests = self._trace or self.take(_ENOUGH_FOR_A_MEDIAN)
        by_length = sorted(requests, key=lambda request: request.total_tokens)
        return replace(by_length[len(by_length) // 2], arrival_ms=0.0)


def poisson(requests: Sequence[WorkloadRequest], rate_per_s: float, seed: int) -> list[WorkloadRequest]:
    """Return the requests arriving as a Poisson process, stretched so that the mean rate is exactly this.

    A few dozen requests would else come 10 or 20 % faster or slower, and near the capacity that is all the
    difference.
    """
    arriving = with_rate(requests, rate_per_s, seed)
    span_ms = arriving[-1].arrival_ms
    stretch = (len(arriving) - 1) / rate_per_s * 1e3 / span_ms if span_ms else 1.0
    return [replace(request, arrival_ms=stretch * request.arrival_ms) for request in arriving]


FIRST_BURST, MOST_BURST = 4, 512
BURST_GAIN = 1.1  # what a burst twice as large has to bring
MOST_STALLS = 2  # bursts in a row that bring less: one may be a disturbance
CAPACITY_RUNS = 5  # of the best burst, at most
SHORT_PROMPT, SHORT_OUTPUT = 16, 2  # of the request that separates one run from the next
_CAPACITY_SHARE = 0.2  # of a subject's progress

Load = tuple[float, float | None]  # requests per second, and their share of the capacity


def run_load(options: LoadOptions, progress: Progress) -> Iterator[LoadReport]:
    """Measure, and yield what is known after every run.

    Raises:
        WorkloadError, OSError: the trace cannot be used.
        TargetError: the server cannot be used, or not a single request is answered.
        ModelError, ValueError, MemoryError: as from `Engine.from_pretrained`.
    """
    workload, limits = Workload(options), Limits(options.ttft_limit_ms, options.tpot_limit_ms)
    names = ("server",) if options.url is not None else policies(options)
    progress(0.0, "connecting" if options.url is not None else "loading the model")
    is_divided = options.tensor_parallel > 1  # then each engine loads, with processes of its own
    model = None if options.url is not None or is_divided else load(options)
    done: tuple[LoadCurve, ...] = ()
    with asyncio.Runner() as runner:
        for index, name in enumerate(names):

            def within(share: float, what: str, index: int = index, name: str = name) -> None:
                progress((index + share) / len(names), f"{name}: {what}")

            target, subject = _open(options, model, name, within)
            report = LoadReport(subject, workload.description, limits, options.repeats, done)
            # Rates follow the first subject's capacity: all see the same requests at the same times.
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


def drain_seconds(options: LoadOptions, alone: LoadMetrics) -> float:
    """Return what was asked for, else enough for five requests in a row, and `seconds` at least."""
    return options.drain_seconds or max(options.seconds, 5 * alone.duration_s)


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
) -> tuple[Target, str]:
    """Return what to measure, and what to call it; `model` is None where it is not loaded yet."""
    if options.url is not None:
        # Its client is slow to load, and not installed where there is torch alone.
        from neo_desktop.app.bench.load.url_target import UrlTarget  # noqa: PLC0415

        server = UrlTarget(options.url, options.api_key, options.url_model)
        return server, server.url
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
    """Of one subject."""

    runner: asyncio.Runner
    target: Target
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
        curve = LoadCurve(
            name=self.name,
            model=self.target.model,
            alone=alone,
            capacity=None,
            points=(),
            drain_s=drain_seconds(options, alone),
            notes=tuple(self.target.notes),
        )
        yield curve
        if options.rates is None:
            curve = replace(curve, capacity=self._capacity())
            yield curve
        loads = loads or self._loads(curve.capacity)
        for number_of, (repeat, index) in enumerate(
            (repeat, index) for repeat in range(options.repeats) for index in range(len(loads))
        ):
            rate, share = loads[index]

            def ended(share_ended: float, done: int = number_of, rate: float = rate) -> None:
                share = (done + share_ended) / len(loads) / options.repeats
                self.progress(_CAPACITY_SHARE + (1 - _CAPACITY_SHARE) * share, f"{number(rate)} requests/s")

            run = self._run(rate, repeat, curve.drain_s, ended)
            points = list(curve.points)
            if repeat:
                points[index] = replace(points[index], runs=(*points[index].runs, run))
            else:
                points.append(LoadPoint(rate, share, (run,)))
            curve = replace(curve, points=tuple(points))
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
        burst, runs = self._best_burst()
        while len(runs) < CAPACITY_RUNS and time.perf_counter() - start < self.options.seconds:
            runs.append(self._burst(burst))
        # Of an even number the better one: where there are two, the first was not warm yet.
        by_rate = sorted(runs, key=lambda metrics: metrics.finished_per_s)
        return Capacity(burst, by_rate[len(runs) // 2])

    def _best_burst(self) -> tuple[int, list[LoadMetrics]]:
        """Send more and more requests at once, until more of them bring no more, or it takes too long."""
        best: tuple[int, LoadMetrics] | None = None
        burst, stalls = FIRST_BURST, 0
        while True:
            metrics = self._burst(burst)
            best_per_s = 0.0 if best is None else best[1].finished_per_s
            stalls = 0 if metrics.finished_per_s > BURST_GAIN * best_per_s else stalls + 1
            if best is None or metrics.finished_per_s > best_per_s:
                best = burst, metrics
            took_long = metrics.duration_s > self.options.seconds / 2
            lost_some = metrics.finished < metrics.requests
            if stalls == MOST_STALLS or took_long or lost_some or 2 * burst > MOST_BURST:
                return best[0], [best[1]]
            burst *= 2

    def _burst(self, count: int) -> LoadMetrics:
        self.progress(_CAPACITY_SHARE / 2, f"{count} requests at once")
        return self._answered(self.workload.take(count))

    def _run(self, rate: float, repeat: int, drain_s: float, on_end: Callable[[float], None]) -> LoadRun:
        options = self.options
        count = options.num_requests or math.ceil(rate * options.seconds)
        requests = poisson(self.workload.take(count), rate, options.seed + repeat)
        # An iteration with requests that the run before has given up ends before this answer.
        self._send([WorkloadRequest(0.0, SHORT_PROMPT, SHORT_OUTPUT)], drain_s)
        before = self.target.stats()
        metrics = self._send(requests, drain_s, lambda num_ended: on_end(num_ended / count))
        after = self.target.stats()
        return LoadRun(metrics, engine_figures(before, after) if before and after else None)

    def _answered(self, requests: Sequence[WorkloadRequest]) -> LoadMetrics:
        """Send requests for which there must be answers."""
        metrics = self._send(requests)
        if not metrics.finished:
            raise TargetError(f"no request was answered: {metrics.failures[0].example}")
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
