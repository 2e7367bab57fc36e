"""The files of a report: JSON, a page in Markdown, one in HTML that needs nothing else, and the plots."""

import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape

from neo_desktop.app.bench.page.content import headline, machine_lines, sections
from neo_desktop.app.bench.page.pictures import drawing, pictures
from neo_desktop.app.bench.report import Report

PICTURES = "plots"
_FOLDER = Path(__file__).parent


def prepare_folder(folder: Path) -> None:
    """Make the folder, before anything is measured. Raises OSError where that is impossible."""
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)


def discard_folder(folder: Path) -> None:
    """Take away what `prepare_folder` made, unless something else is there."""
    with suppress(OSError):
        (folder / PICTURES).rmdir()
        folder.rmdir()


def write_files(report: Report, folder: Path) -> Path:
    """Write report.json, report.md, report.html and the plots; return the HTML file.

    The figures come first: whatever happens to the pictures, they are kept.
    """
    report.write_json(folder / "report.json")
    for name, png in pictures(report).items():
        (folder / PICTURES / f"{name}.png").write_bytes(png)
    (folder / "report.md").write_text(markdown(report, PICTURES), encoding="utf-8")
    page = folder / "report.html"
    page.write_text(html(report), encoding="utf-8")
    return page


def markdown(report: Report, pictures: str) -> str:
    """Return the page to paste where people talk; `pictures` is the folder of the plots, as seen from it."""
    return _page("page.md", report, pictures=pictures)


def html(report: Report) -> str:
    """Return the page: the answer, then a section per suite, charts first and details folded."""
    drawings = {plot.name: drawing(plot) for section in sections(report) for plot in section.plots}
    return _page(
        "page.html", report, drawings=drawings, style=(_FOLDER / "style.css").read_text(encoding="utf-8")
    )


def _page(template: str, report: Report, **more: Any) -> str:
    shown = {"headline": headline(report), "machine": machine_lines(report), "sections": sections(report)}
    return _environment().get_template(template).render(report=report, **shown, **more)


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True
    )
    # Names of models and processes may hold anything.
    found.filters["md"] = lambda text: re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)
    return found
