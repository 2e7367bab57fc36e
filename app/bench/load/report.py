"""The result of the load suite, as plain data and as a section of the page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from neo_desktop.app.bench.charts import COLOURS, Line, lines
from neo_desktop.app.bench.load.metrics import GOOD_SHARE, Limits, LoadCurve
from neo_desktop.app.bench.section import Plot, Section, Table
from neo_desktop.app.bench.words import say

_LOG_FROM = 10.0  # times that differ by more than this factor are drawn on a logarithmic axis


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load-latency curves, side by side where there are several policies: same requests, same times."""

    subject: str  # the engine's device and number format
    workload: str
    limits: Limits
    curves: tuple[LoadCurve, ...]
    suite: Literal["load"] = "load"

    def section(self) -> Section:
        """Return tables, curves and what they mean."""
        title, summary, *notes = say("load", report=self, good_share=GOOD_SHARE)
        plots = [
            Plot(f"{name} against the rate of requests", picture)
            for name, figure, limit in (
                ("Time to first token", "ttft", self.limits.ttft_ms),
                ("Time per output token after the first", "tpot", self.limits.tpot_ms),
            )
            if (picture := _drawn(self.curves, figure, limit))
        ]
        tables = tuple(table for curve in self.curves for table in _tables(curve))
        return Section(title, summary, tables, tuple(plots), tuple(notes))


def _drawn(curves: Sequence[LoadCurve], figure: str, limit_ms: float) -> str:
    """Draw p50 and p90 per policy, and the limit if it is near; empty where no request finished."""
    drawn = []
    for curve, colour in zip(curves, COLOURS * len(curves), strict=False):
        found = [(point.rate_per_s, getattr(point.metrics, figure)) for point in curve.points]
        for percentile in ("p50", "p90"):
            points = [(rate, getattr(one, f"{percentile}_ms")) for rate, one in found if one is not None]
            if points:
                drawn.append(Line(f"{curve.name} {percentile}", points, colour, dashed=percentile == "p90"))
    times = [ms for line in drawn for _, ms in line.points]
    if not times:
        return ""
    shown = limit_ms if limit_ms < 2 * max(times) else None
    log = max(times) > _LOG_FROM * min(times) > 0
    return lines(drawn, "requests per second", "ms", log_y=log, limit=shown)


def _tables(curve: LoadCurve) -> Iterator[Table]:
    """Yield latencies and counts."""
    latencies = {
        "requests/s": "title",
        "TTFT ms": "metrics.ttft",
        "TPOT ms": "metrics.tpot",
        "ITL ms": "metrics.itl",
    }
    counts = {
        "requests/s": "title",
        "sent": "metrics.requests",
        "finished": "metrics.finished",
        "good": "metrics.good_share:.0%",
        "good/s": "metrics.good_per_s",
        "finished/s": "metrics.finished_per_s",
        "output tok/s": "metrics.output_tokens_per_s",
    }
    title = f"{curve.name}, {curve.model}: p50 / p90 / p99"
    yield Table.of(title, curve.rows(), latencies, missing="-")
    yield Table.of(f"{curve.name}: requests and tokens", curve.rows(), counts)
