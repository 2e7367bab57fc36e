"""Suite `load`: the latency that clients see while requests come faster and faster, at times of their own.

One policy after the other: warm-up, one request alone, the capacity, then rates as shares of the capacity.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from neo_desktop.app.bench.options import BenchOptions
from neo_desktop.app.bench.section import Section, Table
from neo_desktop.app.bench.words import say
from neo_desktop.app.bench.workload import Record, Workload, run
from neo_desktop.app.words import number
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.loading import LoadedModel, choose_device, load
from neo_desktop.engine.progress import Progress, part
from neo_desktop.engine.setup import set_up, take_memory
from neo_desktop.engine.simulation.metrics import percentile
from neo_desktop.engine.simulation.workload import WorkloadRequest, synthetic, with_rate
from neo_desktop.engine.unused_memory import return_memory

ENOUGH_REQUESTS = 8  # of one rate: fewer say little about it
GOOD_SHARE = 0.9  # of the requests that have to keep the limits for a rate to count as sustained
FIRST_BURST, MOST_BURST = 4, 512
BURST_GAIN = 1.1  # least gain of a burst twice as large
WARM_UP = 2  # requests sent first, and not counted
MOST_STALLS = 2  # bursts in a row that bring less: one may be a disturbance
_CAPACITY_SHARE = 0.2  # of a policy's progress


class Usual(NamedTuple):
    tokens: tuple[int, int]  # in and out of a synthetic request
    seconds: float  # in which the requests of a rate come


USUAL = {  # a CPU alone takes a second for a hundred tokens of a prompt
    "cuda": Usual((256, 64), 3.0),
    "cpu": Usual((96, 32), 8.0),
}
LOAD_SHARES = (0.5, 0.75, 1.0)  # rates, as shares of the capacity


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a request must keep to count for goodput."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 200.0

    def are_kept(self, record: Record) -> bool:
        """An answer of one token has no TPOT to be too long."""
        return not record.error and record.ttft_ms <= self.ttft_ms and (record.tpot_ms or 0.0) <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of a time over requests, or over chunks."""

    p50_ms: float
    p90_ms: float
    p99_ms: float

    @classmethod
    def of(cls, values_ms: Iterable[float]) -> "Latency | None":
        """Return None where there are no values."""
        ordered = sorted(values_ms)
        return cls(*(percentile(ordered, percent) for percent in (50, 90, 99))) if ordered else None

    def __str__(self) -> str:
        return " / ".join(map(number, (self.p50_ms, self.p90_ms, self.p99_ms)))


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Results of a number of requests. Latencies and tokens are those of finished requests.

    Rates are over `duration_s`, from the first arrival to the last token: a short run shows lower rates than
    a server would keep up for long, since it fills at the beginning and empties at the end.
    """

    duration_s: float
    requests: int
    finished: int
    failures: dict[str, int]  # reason for missing answers -> their number
    output_tokens: int
    finished_per_s: float  # requests
    output_tokens_per_s: float
    good_share: float  # finished within both limits, 0 to 1
    good_per_s: float  # requests finished within both limits: the goodput
    ttft: Latency | None  # per request; see `Record` for this and the following
    tpot: Latency | None  # per request
    itl: Latency | None  # over the gaps of every request


def summarise(records: Sequence[Record], limits: Limits) -> LoadMetrics:
    """Return the figures of some requests of one clock; `records` may be empty."""
    finished = [record for record in records if not record.error]
    tokens = sum(len(record.answer) for record in finished)
    num_good = sum(map(limits.are_kept, records))
    start_ms = min((record.arrival_ms for record in records), default=0.0)
    last_ms = max((ms for record in records for ms in record.chunks_ms), default=start_ms)
    duration_s = (last_ms - start_ms) / 1e3

    def per_s(count: int) -> float:
        return count / duration_s if duration_s else 0.0

    return LoadMetrics(
        duration_s=duration_s,
        requests=len(records),
        finished=len(finished),
        failures=dict(Counter(record.error for record in records if record.error).most_common()),
        output_tokens=tokens,
        finished_per_s=per_s(len(finished)),
        output_tokens_per_s=per_s(tokens),
        good_share=num_good / len(records) if records else 0.0,
        good_per_s=per_s(num_good),
        ttft=Latency.of(record.ttft_ms for record in finished),
        tpot=Latency.of(tpot for record in finished if (tpot := record.tpot_ms) is not None),
        itl=Latency.of(gap for record in finished for gap in record.itl_ms),
    )


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One rate; in tables also what is no point of the curve."""

    title: str
    rate_per_s: float  # requests, as asked for
    metrics: LoadMetrics

    @property
    def says_enough(self) -> bool:
        return self.metrics.requests >= ENOUGH_REQUESTS


_LATENCIES = {
    "requests/s": "title",
    "TTFT ms": "metrics.ttft",
    "TPOT ms": "metrics.tpot",
    "ITL ms": "metrics.itl",
}
_COUNTS = {
    "requests/s": "title",
    "sent": "metrics.requests",
    "finished": "metrics.finished",
    "good": "metrics.good_share:.0%",
    "good/s": "metrics.good_per_s",
    "finished/s": "metrics.finished_per_s",
    "output tok/s": "metrics.output_tokens_per_s",
}


@dataclass(frozen=True, slots=True)
class LoadCurve:
    name: str  # of the policy
    model: str
    alone: LoadPoint  # one request by itself
    capacity: LoadPoint | None  # enough requests at once; None: not measured yet
    points: tuple[LoadPoint, ...]  # by rising rate
    drain_s: float  # wait after the last arrival

    @property
    def sustained(self) -> LoadPoint | None:
        """The highest measured rate at which, as at all lower ones, enough requests kept the limits."""
        sustained = None
        for point in self.points:
            if point.metrics.good_share < GOOD_SHARE:
                break
            sustained = point
        return sustained

    def rows(self) -> list[LoadPoint]:
        """Return all that was measured, what is no point of the curve included."""
        return [self.alone, *self.points, *([] if self.capacity is None else [self.capacity])]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load-latency curves, side by side where there are several policies: same requests, same times."""

    subject: str  # the engine's device and number format
    workload: str
    limits: Limits
    curves: tuple[LoadCurve, ...]
    suite: Literal["load"] = "load"

    def section(self) -> Section:
        title, summary, *notes = say("load", report=self, good_share=GOOD_SHARE)
        tables = []
        for curve in self.curves:
            head = f"{curve.name}, {curve.model}: p50 / p90 / p99"
            tables.append(Table.of(head, curve.rows(), _LATENCIES, missing="-"))
            tables.append(Table.of(f"{curve.name}: requests and tokens", curve.rows(), _COUNTS))
        return Section(title, summary, tuple(tables), tuple(notes))


def poisson(requests: Sequence[WorkloadRequest], rate_per_s: float) -> list[WorkloadRequest]:
    """Return the requests arriving as a Poisson process, stretched so that the mean rate is exactly this.

    A few dozen requests would else come 10 or 20 % faster or slower, and near the capacity that is all the
    difference.
    """
    arriving = with_rate(requests, rate_per_s)
    span_ms = arriving[-1].arrival_ms
    stretch = (len(arriving) - 1) / rate_per_s * 1e3 / span_ms if span_ms else 1.0
    return [replace(request, arrival_ms=stretch * request.arrival_ms) for request in arriving]


def usual(options: BenchOptions) -> Usual:
    found = USUAL[choose_device(options.device).type]
    tokens = options.input_tokens or found.tokens[0], options.output_tokens or found.tokens[1]
    return Usual(tokens, options.seconds or found.seconds)


def run_load(options: BenchOptions, progress: Progress) -> Iterator[LoadReport]:
    """Measure, and yield what is known after every run.

    Raises RuntimeError: no request is answered; and what the engine raises.
    """
    settings, limits = usual(options), Limits()
    workload = "{} tokens in and {} out, within 10 %".format(*settings.tokens)
    names = policies(options)
    progress(0.0, "loading the model")
    model = None if options.tensor_parallel > 1 else load(options)  # divided: each engine loads by itself
    done: tuple[LoadCurve, ...] = ()
    for index, name in enumerate(names):
        within = part(progress, index / len(names), (index + 1) / len(names), f"{name}: ")
        engine = _open(options, model, name, within)
        try:
            stats = engine.stats()
            report = LoadReport(f"{stats.device}, {stats.dtype}", workload, limits, done)
            measurement = _Measurement(engine, options, settings, limits, within)
            # Rates follow the first policy's capacity: all see the same requests at the same times.
            for curve in measurement.curves(name, done[0].points if done else ()):
                yield replace(report, curves=(*done, curve))
            done = (*done, curve)
        finally:
            engine.close()
        del engine, measurement  # its caches, before the next one takes its own
    progress(1.0, "done")


def policies(options: BenchOptions) -> list[str]:
    """Return those to compare: with and without the CPU-cache, where there are two tiers to choose from.

    Without a GPU its cache is imitated; it counts as a place of its own if its size was asked for.
    """
    if options.policies is not None:
        return options.policies
    on_gpu = choose_device(options.device).type == "cuda"
    has_device = options.gpu_cache_tokens != 0 if on_gpu else bool(options.gpu_cache_tokens)
    return ["auto", "gpu-only"] if options.cpu_cache_tokens != 0 and has_device else ["auto"]


def _open(options: BenchOptions, model: LoadedModel | None, name: str, progress: Progress) -> Engine:
    """Return the engine to measure; `model` is None where it is not loaded yet."""
    return_memory()  # the engine before this one is gone, and counts as free
    own = replace(options, policy=name)
    parts = set_up(own) if model is None else take_memory(model, own)
    return Engine.from_parts(parts, name, progress=part(progress, 0.0, 0.0, "measuring this computer: "))


@dataclass
class _Measurement:
    engine: Engine
    options: BenchOptions
    settings: Usual
    limits: Limits
    progress: Progress
    turn: int = 0

    def curves(self, name: str, points: Sequence[LoadPoint]) -> Iterator[LoadCurve]:
        """Yield the curve as it grows; `points` have the rates, or they are shares of the capacity."""
        typical = sorted(self._requests(9), key=lambda request: request.total_tokens)[4]
        self.progress(0.0, "warming up")
        self._send([typical] * WARM_UP)
        alone = LoadPoint("one alone", 0.0, self._answered([typical]))
        drain_s = self.options.drain_seconds or max(self.settings.seconds, 5 * alone.metrics.duration_s)
        curve = LoadCurve(name, self.engine.model_name, alone, None, (), drain_s)
        yield curve
        capacity = self._capacity()
        curve = replace(curve, capacity=capacity)
        yield curve
        per_s = capacity.metrics.finished_per_s
        rates = [(point.title, point.rate_per_s) for point in points] or [
            (f"{number(share * per_s)} ({share:.0%})", share * per_s) for share in LOAD_SHARES
        ]
        for done, (title, rate) in enumerate(rates):
            start = _CAPACITY_SHARE + (1 - _CAPACITY_SHARE) * done / len(rates)
            count = self.options.num_requests or math.ceil(rate * self.settings.seconds)
            requests = poisson(self._requests(count), rate)
            metrics = self._send(requests, f"{number(rate)} requests/s", start, drain_s)
            curve = replace(curve, points=(*curve.points, LoadPoint(title, rate, metrics)))
            yield curve

    def _requests(self, count: int) -> list[WorkloadRequest]:
        return synthetic(count, *self.settings.tokens)

    def _capacity(self) -> LoadPoint:
        """Send more and more requests at once, until more requests bring no gain, or take too long."""
        best = self._answered(self._requests(FIRST_BURST))
        last, stalls = best, 0
        while not (
            stalls == MOST_STALLS
            or last.duration_s > self.settings.seconds / 2
            or last.failures
            or 2 * last.requests > MOST_BURST
        ):
            last = self._answered(self._requests(2 * last.requests))
            stalls = 0 if last.finished_per_s > BURST_GAIN * best.finished_per_s else stalls + 1
            best = max(best, last, key=lambda each: each.finished_per_s)
        # Once more: the first burst of its size also pays for what is done once for each size.
        again = self._answered(self._requests(best.requests))
        best = max(best, again, key=lambda each: each.finished_per_s)
        return LoadPoint(f"{best.requests} at once", 0.0, best)

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
        self.turn += 1
        workload = Workload(tuple(requests))
        found = run(
            self.engine,
            workload.prompts(self.turn, self.engine.config.vocab_size),
            workload.params(),
            lambda _: self.progress(share, what),
            [each.arrival_ms for each in requests],
            drain_s,
        )
        return summarise(found.records, self.limits)
