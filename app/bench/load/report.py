"""What the load suite found, as plain data."""

from dataclasses import dataclass
from typing import Literal

from neo_desktop.app.bench.load import show
from neo_desktop.app.bench.load.curve import LoadCurve
from neo_desktop.app.bench.load.notes import notes
from neo_desktop.app.bench.load.records import Limits
from neo_desktop.app.bench.section import Metric, Section


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
        return Section(
            title=f"Load: {self.subject}",
            summary=show.summary(self.curves, self.limits),
            tables=tuple(table for curve in self.curves for table in show.tables(curve)),
            plots=show.plots(self.curves, self.limits),
            notes=tuple(notes(self.workload, self.curves, self.repeats)),
        )

    def metrics(self) -> tuple[Metric, ...]:
        """Return headline figures; a rate's are there only if a request finished."""
        found: list[Metric] = []
        for curve in self.curves:
            head = f"load.{curve.name}"

            def add(name: str, value: float | None, unit: str, higher: bool = True, head: str = head) -> None:
                if value is not None:
                    found.append(Metric(f"{head}.{name}", value, unit, higher))

            if curve.capacity is not None:
                metrics = curve.capacity.metrics
                add("capacity_requests_per_s", metrics.finished_per_s, "requests/s")
                add("capacity_output_tokens_per_s", metrics.output_tokens_per_s, "tokens/s")
            if curve.points:
                add("sustained_requests_per_s", curve.sustained_per_s or 0.0, "requests/s")
            for point in curve.points:
                ttft = point.median_latency(lambda metrics: metrics.ttft)
                tpot = point.median_latency(lambda metrics: metrics.tpot)
                add(f"{point.label}.ttft_p50_ms", None if ttft is None else ttft.p50_ms, "ms", False)
                add(f"{point.label}.tpot_p50_ms", None if tpot is None else tpot.p50_ms, "ms", False)
                if point.load_share is None:  # else it repeats the capacity
                    per_s = point.median(lambda metrics: metrics.output_tokens_per_s)
                    add(f"{point.label}.output_tokens_per_s", per_s, "tokens/s")
        return tuple(found)
