"""Plots as files (PNG) and as parts of the page (SVG, in the page's colours)."""

import re
from io import BytesIO, StringIO
from typing import TYPE_CHECKING

from neo_desktop.app.bench import charts
from neo_desktop.app.bench.page.content import sections
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 160
# Colour in a plot -> the page's variable for it, which has another value in the dark; see page/style.css.
_VARIABLES = {
    **{"#000000": "text", charts.BLACK: "text", "#ffffff": "page", charts.LINE_GREY: "line"},
    **{charts.BLUE: "blue", charts.ORANGE: "orange", charts.GREEN: "green", charts.RED: "red"},
    **{charts.GREY: "grey", charts.LIGHT_GREY: "grey"},
    "#1f77b4": "blue",  # matplotlib's own, which some invisible parts of error bars keep
}


def pictures(report: Report) -> dict[str, bytes]:
    """Return `name of a plot -> PNG` for all plots of a report."""
    return {plot.name: picture(plot) for section in sections(report) for plot in section.plots}


def picture(plot: Plot) -> bytes:
    """Draw a plot as PNG."""
    png = BytesIO()
    _drawn(plot).savefig(png, format="png", dpi=_DOTS_PER_INCH)
    return png.getvalue()


def drawing(plot: Plot) -> str:
    """Draw a plot as an `<svg>` element: text stays text, colours are the page's variables."""
    from matplotlib import rc_context  # noqa: PLC0415 - slow to load, and most commands draw nothing

    text = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        _drawn(plot).savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Names are unique in the whole page: those of a plot begin with its own.
    svg = re.sub(r'\bid="', f'id="{plot.name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{plot.name}-", svg)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;", "", svg)
    for colour, variable in _VARIABLES.items():
        svg = re.sub(rf"{colour}\b", f"var(--{variable})", svg)
    width, height = (round(72 * inches) for inches in plot.inches)
    for side in ("width", "height"):
        svg = re.sub(rf'(<svg\b[^>]*?) {side}="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" style="aspect-ratio: {width} / {height}"', 1).strip()


def _drawn(plot: Plot) -> "Figure":
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to load, and most commands draw nothing

    figure = Figure(figsize=plot.inches, layout="constrained")
    plot.draw(figure)
    return figure
