"""From the records of requests to figures: of one rate, and of one policy from rate to rate."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from neo_desktop.app.bench.load.client import Limits, RequestRecord
from neo_desktop.app.bench.section import number
from neo_desktop.engine.simulation.metrics import percentile

ENOUGH_REQUESTS = 8  # of one rate: fewer say little about it
GOOD_SHARE = 0.9  # of the requests that have to keep the limits for a rate to count as sustained


@dataclass(frozen=True, slots=True)
class Latency:
    """How a time is spread over requests, or over chunks."""

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
class Failure:
    """Requests that ended for the same reason without an answer."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """What a number of requests saw. Latencies and tokens are those of finished requests.

    Rates are over `duration_s`, from the first arrival to the last end: a short run shows less of them than
    a server would keep up for long, since it fills at the beginning and empties at the end.
    """

    duration_s: float
    requests: int
    finished: int
    failures: tuple[Failure, ...]
    prompt_tokens: int
    output_tokens: int
    finished_per_s: float  # requests
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts and outputs
    good_share: float  # of all requests: finished within both limits, 0 to 1
    good_per_s: float  # requests finished within both limits: the goodput
    ttft: Latency | None  # per request; see `RequestRecord` for this and the following
    tpot: Latency | None  # per request
    itl: Latency | None  # over all gaps of all requests
    end_to_end: Latency | None  # per request
    lag_ms: float  # how late the client was, p99: it is part of what it measures

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
    lost = Counter(record.error for record in records if record.error)
    tokens = {
        name: sum(getattr(record, name) for record in finished) for name in ("prompt_tokens", "output_tokens")
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
        failures=tuple(Failure(*each) for each in lost.most_common()),
        **tokens,
        finished_per_s=per_s(len(finished)),
        output_tokens_per_s=per_s(tokens["output_tokens"]),
        total_tokens_per_s=per_s(tokens["prompt_tokens"] + tokens["output_tokens"]),
        good_share=num_good / len(records) if records else 0.0,
        good_per_s=per_s(num_good),
        ttft=Latency.of(record.ttft_ms for record in finished),
        tpot=Latency.of(tpot for record in finished if (tpot := record.tpot_ms) is not None),
        itl=Latency.of(gap for record in finished for gap in record.itl_ms),
        end_to_end=Latency.of(record.end_to_end_ms for record in finished),
        lag_ms=percentile(sorted(record.sent_ms - record.arrival_ms for record in records), 99)
        if records
        else 0.0,
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


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One rate; in tables also what is no point of the curve."""

    rate_per_s: float  # requests, as asked for
    load_share: float | None  # of the capacity; None: the rate was given
    metrics: LoadMetrics
    engine: EngineFigures | None = None  # None: not a point of the curve
    name: str = ""  # empty: the rate

    @property
    def says_enough(self) -> bool:
        """Whether there were enough requests."""
        return self.metrics.requests >= ENOUGH_REQUESTS

    @property
    def title(self) -> str:
        """Its rate, for people."""
        rate = number(self.rate_per_s)
        if self.name:
            return self.name
        return rate if self.load_share is None else f"{rate} ({self.load_share:.0%})"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What comes out when enough requests are there at once."""

    burst: int  # that many
    metrics: LoadMetrics


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """One policy of the engine."""

    name: str  # of the policy
    model: str
    alone: LoadMetrics | None  # one request, nobody else there
    capacity: Capacity | None  # None: not measured, since the rates were given
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
        """Whether the highest rate that was kept was kept by enough requests to call it so."""
        return any(point.says_enough for point in self.points if point.rate_per_s == self.sustained_per_s)

    def rows(self) -> list[LoadPoint]:
        """Return all that was measured, what is no point of the curve included."""
        rows = list(self.points)
        if self.alone is not None:
            rows.insert(0, LoadPoint(0.0, None, self.alone, name="one alone"))
        if self.capacity is not None:
            rows.append(LoadPoint(0.0, None, self.capacity.metrics, name=f"{self.capacity.burst} at once"))
        return rows
