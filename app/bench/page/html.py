"""A report as one HTML file that needs nothing else: styles and pictures are inside, there are no scripts."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from neo_desktop.app.bench.page.content import headline, machine_lines, sections
from neo_desktop.app.bench.page.pictures import drawing
from neo_desktop.app.bench.report import Report

_FOLDER = Path(__file__).parent


def html(report: Report) -> str:
    """Return the page: the answer, then a section per suite, charts first and details folded."""
    shown = sections(report)
    return (
        _environment()
        .get_template("page.html")
        .render(
            report=report,
            style=(_FOLDER / "style.css").read_text(encoding="utf-8"),
            headline=headline(report),
            machine=machine_lines(report),
            sections=shown,
            drawings={plot.name: drawing(plot) for section in shown for plot in section.plots},
        )
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
