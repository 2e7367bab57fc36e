"""One policy after the other: warm-up, one request alone, capacity, then rate by rate."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple

from neo_desktop.app.bench.load.metrics import Limits, LoadCurve, LoadMetrics, LoadPoint, summarise
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.options import BenchOptions
from neo_desktop.app.bench.workload import run
from neo_desktop.app.words import number
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.loading import LoadedModel, choose_device, load
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.setup import set_up, take_memory
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace, synthetic, with_rate
from neo_desktop.engine.unused_memory import return_memory

FIRST_BURST, MOST_BURST = 4, 512
BURST_GAIN = 1.1  # what a burst twice as large has to bring
WARM_UP = 2  # requests sent first, and not counted
MOST_STALLS = 2  # bursts in a row that bring less: one may be a disturbance
_CAPACITY_SHARE = 0.2  # of a policy's progress

Load = tuple[float, float | None]  # requests per second, and their share of the capacity


class _Usual(NamedTuple):
    """Settings where none are given."""

    input_tokens: int  # without a trace: lengths uniform in 0.9 to 1.1 of these
    output_tokens: int
    seconds: float  # in which the requests of a rate come
    load_shares: tuple[float, ...]  # rates, as shares of the capacity


_USUAL = _Usual(256, 64, 6.0, (0.25, 0.5, 0.75, 0.9, 1.1))
_QUICK = {  # a CPU alone takes a second for a hundred tokens of a prompt
    "cuda": _Usual(256, 64, 3.0, (0.5, 0.75, 1.0)),
    "cpu": _Usual(96, 32, 8.0, (0.5, 0.75, 1.0)),
}


class Workload:
    """The lengths of requests, as many as are wanted, always the same ones; and the time for each rate."""

    def __init__(self, options: BenchOptions) -> None:
        usual = _QUICK[choose_device(options.device).type] if options.is_quick else _USUAL
        self._seed = options.seed
        self._trace = None if options.trace is None else load_trace(options.trace)
        self._tokens = (
            options.input_tokens or usual.input_tokens,
            options.output_tokens or usual.output_tokens,
        )
        self.seconds = options.seconds or usual.seconds
        self.load_shares = options.load_shares or usual.load_shares
        self.description = "{} tokens in and {} out, within 10 %".format(*self._tokens)
        if options.trace is not None:
            self.description = f"the lengths of {options.trace.name}, but not its arrival times"

    def take(self, count: int) -> list[WorkloadRequest]:
        """Return the first requests, again from the beginning where a trace is too short, all at once."""
        if self._trace is None:
            return synthetic(count, *self._tokens, self._seed)
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


def run_load(options: BenchOptions, progress: Progress) -> Iterator[LoadReport]:
    """Measure, and yield what is known after every run.

    Raises:
        WorkloadError, OSError: the trace cannot be used.
        RuntimeError: not a single request is answered.
        ModelError, ValueError, MemoryError: as from `Engine.from_pretrained`.
    """
    workload, limits = Workload(options), Limits(options.ttft_limit_ms, options.tpot_limit_ms)
    names = policies(options)
    progress(0.0, "loading the model")
    model = None if options.tensor_parallel > 1 else load(options)  # divided: each engine loads by itself
    done: tuple[LoadCurve, ...] = ()
    for index, name in enumerate(names):

        def within(share: float, what: str, index: int = index, name: str = name) -> None:
            progress((index + share) / len(names), f"{name}: {what}")

        engine = _open(options, model, name, within)
        try:
            stats = engine.stats()
            report = LoadReport(f"{stats.device}, {stats.dtype}", workload.description, limits, done)
            # Rates follow the first policy's capacity: all see the same requests at the same times.
            loads: list[Load] = [(p.rate_per_s, p.load_share) for curve in done[:1] for p in curve.points]
            for curve in _Measurement(engine, name, options, workload, limits, within).curves(loads):
                yield replace(report, curves=(*done, curve))
            done = (*done, curve)
        finally:
            engine.close()
        del engine  # its caches, before the next one takes its own
    progress(1.0, "done")


def policies(options: BenchOptions) -> tuple[str, ...]:
    """Return those to compare: with and without the CPU-cache, where there are two tiers to choose from.

    Without a GPU its cache is imitated; it counts as a place of its own if its size was asked for.
    """
    if options.policies is not None:
        return tuple(options.policies)
    on_gpu = choose_device(options.device).type == "cuda"
    has_device = options.gpu_cache_tokens != 0 if on_gpu else bool(options.gpu_cache_tokens)
    return ("auto", "gpu-only") if options.cpu_cache_tokens != 0 and has_device else ("auto",)


def _open(options: BenchOptions, model: LoadedModel | None, name: str, progress: Progress) -> Engine:
    """Return the engine to measure; `model` is None where it is not loaded yet."""
    return_memory()  # the engine before this one is gone, and counts as free
    own = replace(options, policy=name)
    return Engine.from_parts(
        set_up(own) if model is None else take_memory(model, own),
        name,
        progress=lambda _, what: progress(0.0, f"measuring this computer: {what}"),
    )


class _Measurement:
    """Return the curve of one policy."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        options: BenchOptions,
        workload: Workload,
        limits: Limits,
        progress: Progress,
    ) -> None:
        self.engine, self.name, self.options = engine, name, options
        self.workload, self.limits, self.progress = workload, limits, progress
        self._random = random.Random(options.seed)

    def curves(self, loads: Sequence[Load]) -> Iterator[LoadCurve]:
        """Yield the curve as it grows; without `loads`, they are chosen."""
        options, typical = self.options, self.workload.typical()
        self.progress(0.0, "warming up")
        self._send([typical] * WARM_UP)
        alone = LoadPoint(0.0, None, self._answered([typical]), "one alone")
        drain_s = options.drain_seconds or max(self.workload.seconds, 5 * alone.metrics.duration_s)
        curve = LoadCurve(self.name, self.engine.model_name, alone, None, (), drain_s)
        yield curve
        if options.rates is None:
            curve = replace(curve, capacity=self._capacity())
            yield curve
        loads = loads or self._loads(curve.capacity)
        for done, (rate, share) in enumerate(loads):
            start = _CAPACITY_SHARE + (1 - _CAPACITY_SHARE) * done / len(loads)
            count = options.num_requests or math.ceil(rate * self.workload.seconds)
            requests = poisson(self.workload.take(count), rate, options.seed)
            metrics = self._send(requests, f"{number(rate)} requests/s", start, drain_s)
            curve = replace(curve, points=(*curve.points, LoadPoint(rate, share, metrics)))
            yield curve

    def _loads(self, capacity: LoadPoint | None) -> Sequence[Load]:
        if capacity is None:
            return [(rate, None) for rate in sorted(self.options.rates or ())]
        per_s = capacity.metrics.finished_per_s
        return [(share * per_s, share) for share in sorted(self.workload.load_shares)]

    def _capacity(self) -> LoadPoint:
        """Send more and more requests at once, until more requests bring no gain, or take too long."""
        found: list[LoadMetrics] = []
        burst, stalls = FIRST_BURST, 0
        while True:
            metrics = self._answered(self.workload.take(burst))
            best_per_s = max((each.finished_per_s for each in found), default=0.0)
            stalls = 0 if metrics.finished_per_s > BURST_GAIN * best_per_s else stalls + 1
            found.append(metrics)
            took_long = metrics.duration_s > self.workload.seconds / 2
            if stalls == MOST_STALLS or took_long or metrics.failures or 2 * burst > MOST_BURST:
                break
            burst *= 2
        best = max(found, key=lambda each: each.finished_per_s)
        # Once more: the first burst of its size also pays for what is done once for each size.
        again = self._answered(self.workload.take(best.requests))
        best = max(best, again, key=lambda each: each.finished_per_s)
        return LoadPoint(0.0, None, best, f"{best.requests} at once")

    def _answered(self, requests: Sequence[WorkloadRequest]) -> LoadMetrics:
        """Send requests for which there must be answers."""
        metrics = self._send(requests, f"{len(requests)} requests at once", _CAPACITY_SHARE / 2)
        if not metrics.finished:
            raise RuntimeError(f"no request was answered: {next(iter(metrics.failures))}")
        return metrics

    def _send(
        self,
        requests: Sequence[WorkloadRequest],
        what: str = "warming up",
        share: float = 0.0,
        drain_s: float = math.inf,
    ) -> LoadMetrics:
        vocabulary = range(self.engine.config.vocab_size)
        found = run(
            self.engine,
            [self._random.choices(vocabulary, k=each.prompt_tokens) for each in requests],
            [SamplingParams(max_tokens=r.output_tokens, temperature=0.0, ignore_eos=True) for r in requests],
            lambda _: self.progress(share, what),
            [each.arrival_ms for each in requests],
            drain_s,
        )
        return summarise(found.records, self.limits)
