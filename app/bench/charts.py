"""What the suites' pictures have in common: grid, legend, axes with few round numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from neo_desktop.app.bench.section import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# The page knows another value of each in the dark; see page/pictures.py.
BLACK, BLUE, ORANGE, GREEN, RED = "#222222", "#2f6fb0", "#d08700", "#1c8c4c", "#b0413e"
GREY, LIGHT_GREY, LINE_GREY = "#8a8a8a", "#9a9a9a", "#cccccc"


def tidy(axes: "Axes", grid: Literal["x", "y", "both"] | None = "both") -> None:
    """Leave out half of the frame; `grid`: lines along "x", "y", "both" or None."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid is not None:
        axes.set_axisbelow(True)
        axes.grid(axis=grid, linewidth=0.4, color=LINE_GREY)


def legend(figure: "Figure", *panels: "Axes", columns: int = 2, fontsize: float | None = None) -> None:
    """Explain every label once, below the picture."""
    found = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels]
    handles = {label: handle for pairs in found for handle, label in pairs}
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=max(min(len(handles), columns), 1),
        frameon=False,
        fontsize=fontsize,
    )


def round_logs(axis: "Axis") -> None:
    """Label a logarithmic axis with 1, 2, 5, 10, ..."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415 - slow to load, and most commands draw nothing

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:,g}")


def doubling(axes: "Axes", values: Sequence[int], labels: Sequence[str] | None = None) -> None:
    """Make x an axis on which each doubling is as wide, with a label per value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, labels or [str(value) for value in values])
    axes.minorticks_off()


def spreads(axes: "Axes", x: Sequence[int], y: Sequence[Spread], style: str, colour: str, label: str) -> None:
    """Draw medians, with bars from the 10th to the 90th percentile."""
    medians = [each.median for each in y]
    bars = ([each.median - each.p10 for each in y], [each.p90 - each.median for each in y])
    axes.errorbar(x, medians, bars, fmt=style, color=colour, label=label, capsize=4)


def ticks(axes: "Axes", values: Sequence[float], height: float = 0.38, **style: Any) -> None:
    """Draw a line across each horizontal bar."""
    places = range(len(values))
    low, high = [at - height for at in places], [at + height for at in places]
    axes.vlines(values, low, high, **style)
