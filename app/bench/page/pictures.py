"""Plots as PNG."""

from io import BytesIO

from neo_desktop.app.bench.page.content import sections
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Plot

_DOTS_PER_INCH = 110


def pictures(report: Report) -> dict[str, bytes]:
    """Return `name of a plot -> PNG` for all plots of a report."""
    return {plot.name: picture(plot) for section in sections(report) for plot in section.plots}


def picture(plot: Plot) -> bytes:
    """Draw a plot."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to load, and most commands draw nothing

    figure = Figure(figsize=plot.inches, layout="constrained")
    plot.draw(figure)
    png = BytesIO()
    figure.savefig(png, format="png", dpi=_DOTS_PER_INCH)
    return png.getvalue()
