"""The load suite's part of the page."""

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from neo_desktop.app.bench.section import Plot, Section, Table
from neo_desktop.app.bench.serving import plot
from neo_desktop.app.bench.serving.curve import GOOD_SHARE, LoadCurve
from neo_desktop.app.bench.serving.metrics import Latency
from neo_desktop.app.bench.serving.notes import notes

if TYPE_CHECKING:
    from neo_desktop.app.bench.serving.report import LoadReport


def section(report: "LoadReport") -> Section:
    """Return what is shown of a report, also of one that was ended early."""
    return Section(
        title=f"Load: {report.subject}",
        summary=_summary(report),
        tables=tuple(table for curve in report.curves for table in _tables(curve)),
        plots=_plots(report),
        notes=tuple(notes(report)),
    )


def _plots(report: "LoadReport") -> tuple[Plot, ...]:
    """Return none where no request was answered: there would be nothing to see."""
    if not any(run.metrics.finished for curve in report.curves for p in curve.points for run in p.runs):
        return ()
    return (
        Plot(
            "load-latency",
            "Latency per output token against the rate of requests",
            lambda figure: plot.draw_per_token(report, figure),
        ),
        Plot(
            "load-ttft-tpot",
            "Time to first token and time per output token against the rate of requests",
            lambda figure: plot.draw_ttft_tpot(report, figure),
        ),
    )


def _summary(report: "LoadReport") -> str:
    sentences = [sentence for curve in report.curves if (sentence := _findings(curve))]
    if not sentences:
        return "Nothing was measured."
    return (
        f"Limits: TTFT within {report.ttft_limit_ms:g} ms and TPOT within {report.tpot_limit_ms:g} ms for "
        f"{GOOD_SHARE:.0%} of the requests. {' '.join(sentences)}"
    )


def _findings(curve: LoadCurve) -> str:
    parts = []
    if curve.points:
        sustained = curve.sustained_per_s
        if sustained is None:
            lowest = number(curve.points[0].rate_per_s)
            parts.append(f"keeps them at no measured rate (the lowest was {lowest} requests/s)")
        elif sustained == curve.points[-1].rate_per_s:
            parts.append(f"keeps them up to the highest measured rate, {number(sustained)} requests/s")
        else:
            parts.append(f"keeps them up to {number(sustained)} requests/s")
    if curve.capacity is not None:
        metrics = curve.capacity.metrics
        parts.append(
            f"delivers {number(metrics.finished_per_s)} requests/s, {number(metrics.output_tokens_per_s)} "
            f"output tokens/s, when {curve.capacity.burst} come at once"
        )
    return f"{curve.name} {' and '.join(parts)}." if parts else ""


def _tables(curve: LoadCurve) -> Iterator[Table]:
    rows = curve.rows()
    if not rows:
        return
    yield Table(
        ("requests/s", "TTFT ms", "TPOT ms", "ITL ms", "end to end s"),
        tuple(
            (
                name,
                _latency(point.median_latency(lambda metrics: metrics.ttft)),
                _latency(point.median_latency(lambda metrics: metrics.tpot)),
                _latency(point.median_latency(lambda metrics: metrics.itl)),
                _latency(point.median_latency(lambda metrics: metrics.end_to_end), 1e-3),
            )
            for name, point in rows
        ),
        f"{curve.name}, {curve.model}: p50 / p90 / p99",
    )
    yield Table(
        ("requests/s", "sent", "finished", "lost", "good", "good/s", "finished/s", "output tok/s", "tok/s"),
        tuple(
            (
                name,
                f"{point.median(lambda metrics: metrics.requests):.0f}",
                f"{point.median(lambda metrics: metrics.finished):.0f}",
                f"{point.median(lambda metrics: metrics.requests - metrics.finished):.0f}",
                f"{point.median(lambda metrics: metrics.good_share):.0%}",
                number(point.median(lambda metrics: metrics.good_per_s)),
                number(point.median(lambda metrics: metrics.finished_per_s)),
                number(point.median(lambda metrics: metrics.output_tokens_per_s)),
                number(point.median(lambda metrics: metrics.total_tokens_per_s)),
            )
            for name, point in rows
        ),
        f"{curve.name}: requests and tokens",
    )
    worked = [(point.title, point.engine_figures) for point in curve.points if point.engine_figures]
    if worked:
        yield Table(
            ("requests/s", "mean batch", "on the CPU", "two sub-batches", "preempted", "moved"),
            tuple(
                (
                    name,
                    f"{median(one.mean_batch for one in figures):.1f}",
                    f"{median(one.cpu_share for one in figures):.0%}",
                    f"{median(one.double_share for one in figures):.0%}",
                    f"{median(one.preemptions for one in figures):.0f}",
                    f"{median(one.moves for one in figures):.0f}",
                )
                for name, figures in worked
            ),
            f"{curve.name}: what the engine did",
        )


def _latency(latency: Latency | None, scale: float = 1.0) -> str:
    if latency is None:
        return "-"
    values = (latency.p50_ms, latency.p90_ms, latency.p99_ms)
    return " / ".join(number(scale * value) for value in values)


def number(value: float) -> str:
    """Return three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
