"""What the load suite found, as plain data and as a part of the page."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from neo_desktop.app.bench.charts import BLUE, GREEN, ORANGE, RED, legend, round_logs, tidy
from neo_desktop.app.bench.load.metrics import (
    ENOUGH_REQUESTS,
    GOOD_SHARE,
    Latency,
    LoadCurve,
    LoadMetrics,
    LoadPoint,
)
from neo_desktop.app.bench.load.target import Limits, Outcome
from neo_desktop.app.bench.section import Column, Metric, Plot, Section, Table, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = ((GREEN, "o"), (RED, "s"), (BLUE, "^"), (ORANGE, "D"))  # colour and marker per curve
_LOG_FROM = 10.0  # times that differ by more than this factor are drawn on a logarithmic axis


MOST_CLIENT_LAG_MS = 10.0  # at p99; a client that is later is part of what it measures
KEPT_UP = 0.9  # of the rate: fewer finished requests per second may mean that a queue grows
CACHED_SHARE = 0.01  # of the prompts' tokens; more of them reused make prompts look cheap


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load-latency curves, side by side where there are several policies: same requests, same times."""

    subject: str  # the engine's device and number format, or the server's address
    workload: str
    limits: Limits
    repeats: int  # asked for; fewer runs are there if the suite was ended early
    curves: tuple[LoadCurve, ...]
    suite: Literal["load"] = "load"

    def section(self) -> Section:
        """Return tables, curves and what they mean."""
        limits, found = self.limits, [text for curve in self.curves if (text := _findings(curve))]
        summary = (
            f"Limits: TTFT within {limits.ttft_ms:g} ms and TPOT within {limits.tpot_ms:g} ms for "
            f"{GOOD_SHARE:.0%} of the requests. {' '.join(found)}"
        )
        rates = "against the rate of requests"
        both = f"Time to first token and time per output token {rates}"
        plots = (
            Plot("load-latency", f"Latency per output token {rates}", self._draw_per_token),
            Plot("load-ttft-tpot", both, self._draw_ttft_tpot, (5.4, 6.0)),
        )
        answered = any(run.metrics.finished for curve in self.curves for p in curve.points for run in p.runs)
        return Section(
            title=f"Load: {self.subject}",
            summary=summary if found else "Nothing was measured.",
            tables=tuple(table for curve in self.curves for table in _tables(curve)),
            plots=plots if answered else (),  # else there would be nothing to see
            notes=tuple(notes(self.workload, self.curves, self.repeats)),
        )

    def metrics(self) -> tuple[Metric, ...]:
        """Return headline figures; a rate's are there only if a request finished."""
        found: list[Metric] = []
        for curve in self.curves:
            head = f"load.{curve.name}"

            def add(name: str, value: float, unit: str, higher: bool = True, head: str = head) -> None:
                found.append(Metric(f"{head}.{name}", value, unit, higher))

            if curve.capacity is not None:
                metrics = curve.capacity.metrics
                add("capacity_requests_per_s", metrics.finished_per_s, "requests/s")
                add("capacity_output_tokens_per_s", metrics.output_tokens_per_s, "tokens/s")
            if curve.points:
                add("sustained_requests_per_s", curve.sustained_per_s or 0.0, "requests/s")
            for point in curve.points:
                for name in ("ttft", "tpot"):
                    if (latency := point.median_latency(name)) is not None:
                        add(f"{point.label}.{name}_p50_ms", latency.p50_ms, "ms", False)
                if point.load_share is None:  # else it repeats the capacity
                    add(f"{point.label}.output_tokens_per_s", point.median("output_tokens_per_s"), "tokens/s")
        return tuple(found)

    def _draw_per_token(self, figure: "Figure") -> None:
        """The normalised latency, as in NEO's figure 6."""
        axes = figure.subplots()
        _draw(axes, self.curves, "per_token")
        axes.set(title="End-to-end time per output token", ylabel="ms per output token")
        legend(figure, axes, columns=3)

    def _draw_ttft_tpot(self, figure: "Figure") -> None:
        """The two that have limits, and the limits where they are not far above."""
        first, second = figure.subplots(2, 1)
        _draw(first, self.curves, "ttft", self.limits.ttft_ms)
        first.set(title="Time to first token", ylabel="ms")
        _draw(second, self.curves, "tpot", self.limits.tpot_ms)
        second.set(title="Time per output token after the first", ylabel="ms")
        legend(figure, first, second, columns=3)


def _draw(axes: "Axes", curves: Sequence[LoadCurve], name: str, limit_ms: float | None = None) -> None:
    drawn: list[float] = []
    for curve, (colour, marker) in zip(curves, _STYLES * len(curves), strict=False):
        found = [(point.rate_per_s, point.median_latency(name)) for point in curve.points]
        for percentile, line in (("p50", "-"), ("p90", "--")):
            values = [(rate, getattr(one, f"{percentile}_ms")) for rate, one in found if one is not None]
            if values:
                rates, times = zip(*values, strict=True)
                label = f"{curve.name} {percentile}"
                axes.plot(rates, times, line, color=colour, marker=marker, label=label)
                drawn += times
    if drawn and max(drawn) > _LOG_FROM * min(drawn) > 0:
        axes.set_yscale("log", subs=range(2, 10))
        round_logs(axes.yaxis)
    elif drawn:
        axes.set_ylim(0, 1.08 * max(drawn))
    if limit_ms is not None and drawn and limit_ms < 2 * max(drawn):
        axes.axhline(limit_ms, color="black", linewidth=0.9, linestyle=":", label="limit")
        axes.set_ylim(top=max(1.08 * max(drawn), 1.2 * limit_ms))
    axes.set_xlim(left=0)
    axes.set_xlabel("requests per second")
    tidy(axes)


def _findings(curve: LoadCurve) -> str:
    """What a curve says about the limits, and its capacity."""
    parts = []
    if curve.points:
        sustained, highest = curve.sustained_per_s, curve.points[-1].rate_per_s
        if sustained is None:
            lowest = number(curve.points[0].rate_per_s)
            parts.append(f"keeps them at no measured rate (the lowest was {lowest} requests/s)")
        else:
            where = "the highest measured rate, " if sustained == highest else ""
            parts.append(f"keeps them up to {where}{number(sustained)} requests/s")
    if curve.capacity is not None:
        metrics = curve.capacity.metrics
        parts.append(
            f"delivers {number(metrics.finished_per_s)} requests/s, {number(metrics.output_tokens_per_s)} "
            f"output tokens/s, when {curve.capacity.burst} come at once"
        )
    return f"{curve.name} {', and '.join(parts)}." if parts else ""


def _tables(curve: LoadCurve) -> Iterator[Table]:
    """Yield latencies, counts and, of an engine, what it did."""
    rows = curve.rows()  # (name, point)
    name: dict[str, Column] = {"requests/s": lambda row: row[0]}

    def latency(figure: str, scale: float = 1.0) -> Column:
        return lambda row: _latency(row[1].median_latency(figure), scale)

    def of(figure: str | Callable[[LoadMetrics], float], how: str = "") -> Column:
        return lambda row: format(row[1].median(figure), how) if how else row[1].median(figure)

    def did(figure: str, how: str) -> Column:
        return lambda row: format(median(getattr(one, figure) for one in row[1].engine_figures), how)

    if not rows:
        return
    yield Table.of(
        f"{curve.name}, {curve.model}: p50 / p90 / p99",
        rows,
        name
        | {"TTFT ms": latency("ttft"), "TPOT ms": latency("tpot"), "ITL ms": latency("itl")}
        | {"end to end s": latency("end_to_end", 1e-3)},
    )
    yield Table.of(
        f"{curve.name}: requests and tokens",
        rows,
        name
        | {"sent": of("requests", ".0f"), "finished": of("finished", ".0f")}
        | {"lost": of(lambda metrics: metrics.requests - metrics.finished, ".0f")}
        | {"good": of("good_share", ".0%"), "good/s": of("good_per_s"), "finished/s": of("finished_per_s")}
        | {"output tok/s": of("output_tokens_per_s"), "tok/s": of("total_tokens_per_s")},
    )
    worked = [(point.title, point) for point in curve.points if point.engine_figures]
    if worked:
        yield Table.of(
            f"{curve.name}: what the engine did",
            worked,
            name
            | {"mean batch": did("mean_batch", ".1f"), "on the CPU": did("cpu_share", ".0%")}
            | {"two sub-batches": did("double_share", ".0%"), "preempted": did("preemptions", ".0f")}
            | {"moved": did("moves", ".0f")},
        )


def _latency(latency: Latency | None, scale: float) -> str:
    if latency is None:
        return "-"
    return " / ".join(number(scale * ms) for ms in (latency.p50_ms, latency.p90_ms, latency.p99_ms))


DEFINITIONS = (
    "Requests come as a Poisson process and do not wait for each other, as from many people who know nothing "
    "of each other.",
    "TTFT: from the moment a request is due to its first chunk, waiting included.",
    "TPOT: from a request's first chunk to its end, divided by its output tokens less one.",
    "ITL: the gap between two chunks of an answer, over all gaps of all answers.",
    "End to end: from the moment a request is due to the end of its answer; per output token: divided by "
    "their number.",
    "p50, p90 and p99: half, 90 % and 99 % took that long at most; of few requests p99 is the worst one.",
    "Good: finished within both limits; good/s is the goodput. Lost: refused, failed or unfinished.",
    "Latencies and tokens are those of finished requests. Rates are over the time from the first arrival to "
    "the last end, so that filling and emptying are in them.",
)
ENGINE_DEFINITIONS = (
    "Mean batch: output tokens per iteration. On the CPU: the share of output tokens whose attention the CPU "
    "computed; the first token of a request comes from its prompt and is never among them."
)


def notes(workload: str, curves: Sequence[LoadCurve], repeats: int) -> Iterator[str]:
    """Yield what was found out, then what the words mean."""
    yield f"Workload: {workload}."
    shared = set[str].intersection(*(set(curve.notes) for curve in curves)) if curves else set()
    yield from (note for curve in curves[:1] for note in curve.notes if note in shared)
    for curve in curves:
        yield from (f"{curve.name}: {note}" for note in curve.notes if note not in shared)
        for name, point in curve.rows():
            yield from (f"{curve.name}, {name}: {note}" for note in _of_point(curve, point))
    points = [point for curve in curves for point in curve.points]
    if any(point.load_share is not None for point in points):
        first = curves[0].name
        yield f"Rates were chosen as shares of what {first} delivers when many requests come at once."
    if repeats > 1:
        yield f"Figures are medians of {repeats} repeats with different arrival times. {_spread(points)}"
    yield from DEFINITIONS
    if any(point.engine_figures for point in points):
        yield ENGINE_DEFINITIONS


def _of_point(curve: LoadCurve, point: LoadPoint) -> Iterator[str]:
    yield from _losses(point, curve.drain_s)
    lags = [lag.p99_ms for run in point.runs if (lag := run.metrics.client_lag) is not None]
    if max(lags, default=0.0) > MOST_CLIENT_LAG_MS:
        yield f"the client itself sent up to {max(lags):.0f} ms late (p99); that is in TTFT and end to end."
    if point in curve.points and min(run.metrics.requests for run in point.runs) < ENOUGH_REQUESTS:
        yield "too few requests to say much; measure for longer, or with shorter requests."
    is_highest = point in curve.points and point.rate_per_s == curve.sustained_per_s
    finished_per_s = point.median("finished_per_s")
    if is_highest and finished_per_s < KEPT_UP * point.rate_per_s:
        yield (
            f"kept the limits, but {number(finished_per_s)} requests/s were finished. Either the queue "
            "grows, which a longer run would show, or the run is short beside the latency."
        )
    prompt_tokens = sum(run.metrics.prompt_tokens for run in point.runs)
    cached = sum(run.metrics.cached_tokens for run in point.runs) / max(prompt_tokens, 1)
    if cached > CACHED_SHARE:
        yield f"{cached:.0%} of the prompts' tokens were not computed but came from a cache."


def _losses(point: LoadPoint, drain_s: float) -> Iterator[str]:
    """Yield a note for every reason for which requests were lost."""
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for failure in (failure for run in point.runs for failure in run.metrics.failures):
        counts[failure.outcome, failure.reason] += failure.count
        examples.setdefault((failure.outcome, failure.reason), failure.example)
    for (outcome, reason), count in counts.most_common():
        if outcome == Outcome.UNFINISHED:
            yield (
                f"{count} unfinished {number(drain_s)} s after the last arrival and ended then. The slowest "
                "requests are therefore missing in the latencies, which look better than they are."
            )
        else:
            yield f"{count} {outcome} ({reason}). The first: {examples[outcome, reason]}"


def _spread(points: Sequence[LoadPoint]) -> str:
    """Say how far the repeats lie apart at the rate where they do most."""
    spreads: dict[str, list[float]] = {}
    for point in points:
        metrics = [run.metrics for run in point.runs]
        for name, values in {
            "TTFT p50": [each.ttft.p50_ms for each in metrics if each.ttft],
            "TPOT p50": [each.tpot.p50_ms for each in metrics if each.tpot],
            "output tokens/s": [each.output_tokens_per_s for each in metrics if each.output_tokens_per_s],
        }.items():
            if len(values) > 1:
                spreads.setdefault(name, []).append((max(values) - min(values)) / median(values))
    parts = [f"{name} {max(found):.0%}" for name, found in spreads.items()]
    return f"From lowest to highest, at the rate with most spread: {', '.join(parts)}." if parts else ""
