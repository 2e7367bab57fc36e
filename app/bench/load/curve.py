"""The figures of one subject, from rate to rate."""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from statistics import median

from neo_desktop.app.bench.load.metrics import Latency, LoadMetrics
from neo_desktop.app.bench.spread import number

ENOUGH_REQUESTS = 8  # of one rate: fewer say little about it
GOOD_SHARE = 0.9  # of the requests that have to keep the limits for a rate to count as sustained


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

    def median(self, figure: str | Callable[[LoadMetrics], float]) -> float:
        """Of a figure of the metrics, over the runs."""
        return median(
            getattr(run.metrics, figure) if isinstance(figure, str) else figure(run.metrics)
            for run in self.runs
        )

    def median_latency(self, name: str) -> Latency | None:
        """Each percentile's median over those runs in which a request finished; None: in none."""
        found = [one for run in self.runs if (one := getattr(run.metrics, name)) is not None]
        return Latency(*map(median, zip(*map(astuple, found), strict=True))) if found else None

    @property
    def engine_figures(self) -> list[EngineFigures]:
        """Of each run; none of a server."""
        return [run.engine for run in self.runs if run.engine is not None]

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
            if point.median("good_share") < GOOD_SHARE:
                break
            sustained = point.rate_per_s
        return sustained

    @property
    def says_enough(self) -> bool:
        """Whether the highest rate that was kept was kept by enough requests to call it so."""
        highest = [point for point in self.points if point.rate_per_s == self.sustained_per_s]
        return any(min(run.metrics.requests for run in p.runs) >= ENOUGH_REQUESTS for p in highest)

    def rows(self) -> list[tuple[str, LoadPoint]]:
        """Return all that was measured with its name, what is no point of the curve included."""
        rows = [(point.title, point) for point in self.points]
        if self.alone is not None:
            rows.insert(0, ("one alone", _as_point(self.alone)))
        if self.capacity is not None:
            rows.append((f"{self.capacity.burst} at once", _as_point(self.capacity.metrics)))
        return rows


def _as_point(metrics: LoadMetrics) -> LoadPoint:
    return LoadPoint(0.0, None, (LoadRun(metrics, None),))
