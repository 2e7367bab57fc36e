"""From the records of requests to figures: of one run, and of one subject from rate to rate."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from statistics import median
from typing import Any, NamedTuple, TypeVar, cast

from neo_desktop.app.bench.load.target import Limits, Outcome, RequestRecord
from neo_desktop.app.bench.section import number
from neo_desktop.engine.simulation.metrics import percentile

T = TypeVar("T")

ENOUGH_REQUESTS = 8  # of one rate: fewer say little about it
GOOD_SHARE = 0.9  # of the requests that have to keep the limits for a rate to count as sustained


@dataclass(frozen=True, slots=True)
class Latency:
    """How a time is spread over requests, or over chunks."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float

    @classmethod
    def of(cls, values_ms: Iterable[float]) -> "Latency | None":
        """Return None where there are no values."""
        ordered = sorted(values_ms)
        if not ordered:
            return None
        p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(p50, p90, p99, sum(ordered) / len(ordered))

    def __str__(self) -> str:
        """Its percentiles."""
        return " / ".join(map(number, (self.p50_ms, self.p90_ms, self.p99_ms)))


@dataclass(frozen=True, slots=True)
class Failure:
    """Requests that ended for the same reason without an answer."""

    outcome: str  # refused, failed or unfinished
    reason: str
    count: int
    example: str  # the first one's message in full


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """What a number of requests saw. Latencies and tokens are those of finished requests.

    Rates are over `duration_s`, from the first arrival to the last end: a short run shows less of them than
    a server would keep up for long, since it fills at the beginning and empties at the end.
    """

    duration_s: float
    requests: int
    finished: int
    refused: int
    failed: int
    unfinished: int
    failures: tuple[Failure, ...]
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were not computed but reused
    output_tokens: int
    sent_per_s: float | None  # requests, as really sent; None for fewer than two, or all at once
    finished_per_s: float  # requests
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts and outputs
    good_share: float  # of all requests: finished within both limits, 0 to 1
    good_per_s: float  # requests finished within both limits: the goodput
    ttft: Latency | None  # per request; see `RequestRecord` for this and the following
    tpot: Latency | None  # per request
    itl: Latency | None  # over all gaps of all requests
    end_to_end: Latency | None  # per request
    per_token: Latency | None  # per request
    client_lag: Latency | None  # per request, whatever became of it

    @property
    def end_to_end_s(self) -> Latency | None:
        """In seconds."""
        return self.end_to_end and Latency(*(ms / 1e3 for ms in astuple(self.end_to_end)))

    @property
    def lost(self) -> int:
        """Requests without an answer."""
        return self.requests - self.finished


def summarise(records: Sequence[RequestRecord], limits: Limits) -> LoadMetrics:
    """Return the figures of some requests of one clock; `records` may be empty."""
    finished = [record for record in records if record.is_finished]
    counts = Counter(record.outcome for record in records)
    tokens = {
        name: sum(getattr(record, name) for record in finished)
        for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    }
    num_good = sum(record.is_good(limits) for record in records)
    duration_s = 0.0
    if records:
        start_ms = min(record.arrival_ms for record in records)
        duration_s = (max(record.end_ms for record in records) - start_ms) / 1e3

    def per_s(count: int) -> float:
        return count / duration_s if duration_s else 0.0

    return LoadMetrics(
        duration_s=duration_s,
        requests=len(records),
        finished=len(finished),
        refused=counts[Outcome.REFUSED],
        failed=counts[Outcome.FAILED],
        unfinished=counts[Outcome.UNFINISHED],
        failures=_failures(records),
        **tokens,
        sent_per_s=_sent_per_s(records),
        finished_per_s=per_s(len(finished)),
        output_tokens_per_s=per_s(tokens["output_tokens"]),
        total_tokens_per_s=per_s(tokens["prompt_tokens"] + tokens["output_tokens"]),
        good_share=num_good / len(records) if records else 0.0,
        good_per_s=per_s(num_good),
        ttft=Latency.of(record.ttft_ms for record in finished),
        tpot=Latency.of(tpot for record in finished if (tpot := record.tpot_ms) is not None),
        itl=Latency.of(gap for record in finished for gap in record.itl_ms),
        end_to_end=Latency.of(record.end_to_end_ms for record in finished),
        per_token=Latency.of(record.per_token_ms for record in finished),
        client_lag=Latency.of(record.client_lag_ms for record in records),
    )


def _sent_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Gaps over the time between the first and the last; requests that are due at once have no rate."""
    if len({record.arrival_ms for record in records}) < 2:
        return None
    sent_ms = [record.sent_ms for record in records]
    span_ms = max(sent_ms) - min(sent_ms)
    return (len(sent_ms) - 1) / span_ms * 1e3 if span_ms else None


def _failures(records: Sequence[RequestRecord]) -> tuple[Failure, ...]:
    """Group by outcome and reason; the most frequent comes first."""
    lost = [record for record in records if not record.is_finished]
    groups = Counter((record.outcome, record.reason) for record in lost)
    first = {(record.outcome, record.reason): record.message for record in reversed(lost)}
    return tuple(
        Failure(outcome.value, reason, count, first[outcome, reason])
        for (outcome, reason), count in groups.most_common()
    )


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What the engine did while the requests of one run were there."""

    iterations: int
    mean_batch: float  # output tokens per iteration
    cpu_share: float  # of the output tokens: the CPU computed the attention for them, 0 to 1
    double_share: float  # of the iterations: two sub-batches, 0 to 1
    preemptions: int  # requests whose KV was given up and computed again
    moves: int  # requests whose KV was brought to another place


def medians(found: Sequence[T]) -> T:
    """Return the median of each figure, and in dataclasses of each field; None counts as nothing."""
    values: list[Any] = [value for value in found if value is not None]
    kind: Any = type(values[0]) if values else None
    middle: Any = None
    if hasattr(kind, "__dataclass_fields__"):
        names = [field.name for field in fields(kind)]
        middle = kind(*(medians([getattr(value, name) for value in values]) for name in names))
    elif values:
        middle = median(values) if kind in (int, float) else values[0]
    return cast("T", middle)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One repeat of a point."""

    metrics: LoadMetrics
    engine: EngineFigures | None  # None: a server


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One rate."""

    rate_per_s: float  # requests, as asked for
    load_share: float | None  # of the capacity; None: the rate was given
    runs: tuple[LoadRun, ...]

    @property
    def typical(self) -> LoadMetrics:
        """The median of each figure over the runs; of latencies, over those in which a request finished."""
        return medians([run.metrics for run in self.runs])

    @property
    def engine(self) -> EngineFigures | None:
        """Likewise; None: a server."""
        return medians([run.engine for run in self.runs])

    @property
    def losses(self) -> list[Failure]:
        """Those of all runs; the most frequent come first."""
        found: dict[tuple[str, str], Failure] = {}
        for failure in (failure for run in self.runs for failure in run.metrics.failures):
            key = failure.outcome, failure.reason
            before = found.get(key, replace(failure, count=0))
            found[key] = replace(before, count=before.count + failure.count)
        return sorted(found.values(), key=lambda failure: -failure.count)

    @property
    def lag_ms(self) -> float:
        """How late the client was: p99 of the worst run. What is late is part of what it measures."""
        return max((lag.p99_ms for run in self.runs if (lag := run.metrics.client_lag)), default=0.0)

    @property
    def cached_share(self) -> float:
        """Of the prompts' tokens, reused: many of them make prompts look cheap."""
        prompt_tokens = sum(run.metrics.prompt_tokens for run in self.runs)
        return sum(run.metrics.cached_tokens for run in self.runs) / max(prompt_tokens, 1)

    @property
    def says_enough(self) -> bool:
        """Whether there were enough requests in every run."""
        return min(run.metrics.requests for run in self.runs) >= ENOUGH_REQUESTS

    @property
    def title(self) -> str:
        """Its rate, for people."""
        rate = number(self.rate_per_s)
        return rate if self.load_share is None else f"{rate} ({self.load_share:.0%})"

    @property
    def label(self) -> str:
        """Its part of a metric's name: the same on every machine where rates follow the capacity."""
        if self.load_share is None:
            return f"at_{self.rate_per_s:g}_per_s"
        return f"at_{100 * self.load_share:g}_percent"


class Row(NamedTuple):
    """A line of a table."""

    name: str
    point: LoadPoint


@dataclass(frozen=True, slots=True)
class Capacity:
    """What comes out when enough requests are there at once."""

    burst: int  # that many
    metrics: LoadMetrics


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """One policy of the engine, or one server."""

    name: str  # the policy, or "server"
    model: str
    alone: LoadMetrics | None  # one request, nobody else there
    capacity: Capacity | None  # None: not measured, since the rates were given
    points: tuple[LoadPoint, ...]  # by rising rate
    drain_s: float  # how long after the last arrival requests were waited for
    notes: tuple[str, ...]

    @property
    def sustained_per_s(self) -> float | None:
        """The highest measured rate at which, as at all lower ones, enough requests kept the limits."""
        sustained = None
        for point in self.points:
            if point.typical.good_share < GOOD_SHARE:
                break
            sustained = point.rate_per_s
        return sustained

    @property
    def pace_ms(self) -> float | None:
        """At what pace each chat gets its tokens at that rate."""
        points = [point for point in self.points if point.rate_per_s == self.sustained_per_s]
        return points[0].typical.tpot.p50_ms if points and points[0].typical.tpot is not None else None

    @property
    def says_enough(self) -> bool:
        """Whether the highest rate that was kept was kept by enough requests to call it so."""
        return any(point.says_enough for point in self.points if point.rate_per_s == self.sustained_per_s)

    def rows(self) -> list[Row]:
        """Return all that was measured with its name, what is no point of the curve included."""
        rows = [Row(point.title, point) for point in self.points]
        if self.alone is not None:
            rows.insert(0, Row("one alone", _as_point(self.alone)))
        if self.capacity is not None:
            rows.append(Row(f"{self.capacity.burst} at once", _as_point(self.capacity.metrics)))
        return rows


def _as_point(metrics: LoadMetrics) -> LoadPoint:
    return LoadPoint(0.0, None, (LoadRun(metrics, None),))
