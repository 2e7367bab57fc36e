"""Load-latency curves as pictures."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from neo_desktop.app.bench.load.curve import LoadCurve
from neo_desktop.app.bench.load.metrics import Latency, LoadMetrics
from neo_desktop.app.bench.load.records import Limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour and marker per curve.
_STYLES = (("#1c8c4c", "o"), ("#b0413e", "s"), ("#2f6fb0", "^"), ("#d08700", "D"))
_PERCENTILES: tuple[tuple[str, str, Callable[[Latency], float]], ...] = (
    ("p50", "-", lambda latency: latency.p50_ms),
    ("p90", "--", lambda latency: latency.p90_ms),
)
_LOG_FROM = 10.0  # times that differ by more than this factor are drawn on a logarithmic axis


def draw_per_token(curves: Sequence[LoadCurve], figure: "Figure") -> None:
    """Draw the normalised latency, as in NEO's figure 6."""
    axes = figure.subplots()
    _draw(axes, curves, lambda metrics: metrics.per_token)
    axes.set(title="End-to-end time per output token", ylabel="ms per output token")
    _legend(figure, axes)


def draw_ttft_tpot(curves: Sequence[LoadCurve], limits: Limits, figure: "Figure") -> None:
    """Draw the two that have limits, and the limits where they are not far above."""
    first, second = figure.subplots(2, 1)
    _draw(first, curves, lambda metrics: metrics.ttft, limits.ttft_ms)
    first.set(title="Time to first token", ylabel="ms")
    _draw(second, curves, lambda metrics: metrics.tpot, limits.tpot_ms)
    second.set(title="Time per output token after the first", ylabel="ms")
    _legend(figure, first, second)


def _draw(
    axes: "Axes",
    curves: Sequence[LoadCurve],
    latency: Callable[[LoadMetrics], Latency | None],
    limit_ms: float | None = None,
) -> None:
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    drawn: list[float] = []
    for index, curve in enumerate(curves):
        colour, marker = _STYLES[index % len(_STYLES)]
        found = [(point.rate_per_s, point.median_latency(latency)) for point in curve.points]
        for name, line, percentile in _PERCENTILES:
            values = [(rate, percentile(one)) for rate, one in found if one is not None]
            if values:
                rates, times = zip(*values, strict=True)
                axes.plot(rates, times, line, color=colour, marker=marker, label=f"{curve.name} {name}")
                drawn += times
    if drawn and max(drawn) > _LOG_FROM * min(drawn) > 0:
        axes.set_yscale("log", subs=range(2, 10))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    elif drawn:
        axes.set_ylim(0, 1.08 * max(drawn))
    if limit_ms is not None and drawn and limit_ms < 2 * max(drawn):
        axes.axhline(limit_ms, color="black", linewidth=0.9, linestyle=":", label="limit")
        axes.set_ylim(top=max(1.08 * max(drawn), 1.2 * limit_ms))
    axes.set_xlim(left=0)
    axes.set_xlabel("requests per second")
    axes.set_axisbelow(True)
    axes.grid(linewidth=0.4, color="#cccccc")
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: "Figure", *panels: "Axes") -> None:
    figure.set_layout_engine("constrained")  # leaves room for a legend outside
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(len(handles), 3),
        frameon=False,
    )
