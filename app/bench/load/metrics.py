"""From the records of requests to figures: of one rate, and of one policy from rate to rate."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from neo_desktop.app.bench.workload import Record
from neo_desktop.app.words import number
from neo_desktop.engine.simulation.metrics import percentile

ENOUGH_REQUESTS = 8  # of one rate: fewer say little about it
GOOD_SHARE = 0.9  # of the requests that have to keep the limits for a rate to count as sustained


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a request must keep to count for goodput."""

    ttft_ms: float
    tpot_ms: float

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
        if not ordered:
            return None
        p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(p50, p90, p99)

    def __str__(self) -> str:
        """Its percentiles."""
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
    failures: dict[str, int]  # why requests have no answer -> how many
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

    rate_per_s: float  # requests, as asked for
    load_share: float | None  # of the capacity; None: the rate was given
    metrics: LoadMetrics
    name: str = ""  # empty: the rate

    @property
    def says_enough(self) -> bool:
        """True if there were enough requests."""
        return self.metrics.requests >= ENOUGH_REQUESTS

    @property
    def title(self) -> str:
        """Its rate, for people."""
        rate = number(self.rate_per_s)
        if self.name:
            return self.name
        return rate if self.load_share is None else f"{rate} ({self.load_share:.0%})"


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """One policy of the engine."""

    name: str  # of the policy
    model: str
    alone: LoadPoint  # one request by itself
    capacity: LoadPoint | None  # enough requests at once; None: not measured, since the rates were given
    points: tuple[LoadPoint, ...]  # by rising rate
    drain_s: float  # how long after the last arrival requests were waited for

    @property
    def sustained_per_s(self) -> float | None:
        """The highest measured rate at which, as at all lower ones, enough requests kept the limits."""
        sustained = None
        for point in self.points:
            if point.metrics.good_share < GOOD_SHARE:
                break
            sustained = point.rate_per_s
        return sustained

    @property
    def pace_ms(self) -> float | None:
        """At what pace each chat gets its tokens at that rate."""
        points = [point for point in self.points if point.rate_per_s == self.sustained_per_s]
        return points[0].metrics.tpot.p50_ms if points and points[0].metrics.tpot is not None else None

    @property
    def says_enough(self) -> bool:
        """True if enough requests kept the highest sustained rate."""
        return any(point.says_enough for point in self.points if point.rate_per_s == self.sustained_per_s)

    def rows(self) -> list[LoadPoint]:
        """Return all that was measured, what is no point of the curve included."""
        return [self.alone, *self.points, *([] if self.capacity is None else [self.capacity])]
