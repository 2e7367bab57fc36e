"""What the load suite found, as plain data and as a part of the page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from neo_desktop.app.bench.charts import BLUE, GREEN, ORANGE, RED, legend, round_logs, tidy
from neo_desktop.app.bench.load.metrics import (
    GOOD_SHARE,
    LoadCurve,
    Row,
)
from neo_desktop.app.bench.load.target import Limits
from neo_desktop.app.bench.section import Metric, Plot, Section, Table
from neo_desktop.app.bench.words import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = ((GREEN, "o"), (RED, "s"), (BLUE, "^"), (ORANGE, "D"))  # colour and marker per curve
_LOG_FROM = 10.0  # times that differ by more than this factor are drawn on a logarithmic axis


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
        title, summary, *notes = say("load", report=self, good_share=GOOD_SHARE)
        rates = "against the rate of requests"
        both = f"Time to first token and time per output token {rates}"
        plots = (
            Plot("load-latency", f"Latency per output token {rates}", self._draw_per_token),
            Plot("load-ttft-tpot", both, self._draw_ttft_tpot, (5.4, 6.0)),
        )
        answered = any(run.metrics.finished for curve in self.curves for p in curve.points for run in p.runs)
        return Section(
            title,
            summary,
            tuple(table for curve in self.curves for table in _tables(curve)),
            plots if answered else (),  # else there would be nothing to see
            tuple(notes),
        )

    @property
    def shared_notes(self) -> list[str]:
        """What all curves have to say alike."""
        first = self.curves[0].notes if self.curves else ()
        return [note for note in first if all(note in curve.notes for curve in self.curves)]

    @property
    def spreads(self) -> dict[str, float]:
        """How far the repeats lie apart, relative to their median, at the rate where they do most."""
        found: dict[str, float] = {}
        for point in (point for curve in self.curves for point in curve.points):
            metrics = [run.metrics for run in point.runs]
            for name, values in {
                "TTFT p50": [each.ttft.p50_ms for each in metrics if each.ttft],
                "TPOT p50": [each.tpot.p50_ms for each in metrics if each.tpot],
                "output tokens/s": [each.output_tokens_per_s for each in metrics if each.output_tokens_per_s],
            }.items():
                if len(values) > 1:
                    spread = (max(values) - min(values)) / median(values)
                    found[name] = max(found.get(name, 0.0), spread)
        return found

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
                    if (latency := getattr(point.typical, name)) is not None:
                        add(f"{point.label}.{name}_p50_ms", latency.p50_ms, "ms", False)
                if point.load_share is None:  # else it repeats the capacity
                    add(f"{point.label}.output_tokens_per_s", point.typical.output_tokens_per_s, "tokens/s")
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
        found = [(point.rate_per_s, getattr(point.typical, name)) for point in curve.points]
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


def _tables(curve: LoadCurve) -> Iterator[Table]:
    """Yield latencies, counts and, of an engine, what it did."""
    rows, name = curve.rows(), {"requests/s": "name"}
    if rows:
        latencies = {"TTFT ms": "ttft", "TPOT ms": "tpot", "ITL ms": "itl", "end to end s": "end_to_end_s"}
        title = f"{curve.name}, {curve.model}: p50 / p90 / p99"
        yield Table.of(title, rows, name | _columns("typical", latencies), missing="-")
        yield Table.of(f"{curve.name}: requests and tokens", rows, name | _columns("typical", _COUNTS))
    worked = [Row(point.title, point) for point in curve.points if point.engine is not None]
    if worked:
        yield Table.of(f"{curve.name}: what the engine did", worked, name | _columns("engine", _ENGINE))


def _columns(of: str, figures: dict[str, str]) -> dict[str, str]:
    return {heading: f"point.{of}.{figure}" for heading, figure in figures.items()}


_COUNTS = {
    **{"sent": "requests:.0f", "finished": "finished:.0f", "lost": "lost:.0f", "good": "good_share:.0%"},
    **{"good/s": "good_per_s", "finished/s": "finished_per_s"},
    **{"output tok/s": "output_tokens_per_s", "tok/s": "total_tokens_per_s"},
}
_ENGINE = {
    **{"mean batch": "mean_batch:.1f", "on the CPU": "cpu_share:.0%"},
    **{"two sub-batches": "double_share:.0%", "preempted": "preemptions:.0f", "moved": "moves:.0f"},
}
