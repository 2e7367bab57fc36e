"""The load suite's part of the page."""

from collections.abc import Iterator, Sequence
from statistics import median

from neo_desktop.app.bench.load import plot
from neo_desktop.app.bench.load.curve import GOOD_SHARE, LoadCurve
from neo_desktop.app.bench.load.metrics import Latency
from neo_desktop.app.bench.load.records import Limits
from neo_desktop.app.bench.section import Plot, Table
from neo_desktop.app.bench.spread import number


def plots(curves: Sequence[LoadCurve], limits: Limits) -> tuple[Plot, ...]:
    """Return none where no request was answered: there would be nothing to see."""
    if not any(run.metrics.finished for curve in curves for p in curve.points for run in p.runs):
        return ()
    return (
        Plot(
            "load-latency",
            "Latency per output token against the rate of requests",
            lambda figure: plot.draw_per_token(curves, figure),
        ),
        Plot(
            "load-ttft-tpot",
            "Time to first token and time per output token against the rate of requests",
            lambda figure: plot.draw_ttft_tpot(curves, limits, figure),
            (5.4, 6.0),
        ),
    )


def summary(curves: Sequence[LoadCurve], limits: Limits) -> str:
    """Return what each curve says about the limits, and its capacity."""
    sentences = [sentence for curve in curves if (sentence := _findings(curve))]
    if not sentences:
        return "Nothing was measured."
    return (
        f"Limits: TTFT within {limits.ttft_ms:g} ms and TPOT within {limits.tpot_ms:g} ms for "
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
    return f"{curve.name} {', and '.join(parts)}." if parts else ""


def tables(curve: LoadCurve) -> Iterator[Table]:
    """Yield latencies, counts and, of an engine, what it did."""
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
