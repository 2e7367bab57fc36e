"""The files of a report: JSON, and a page that needs nothing else."""

from contextlib import suppress
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, select_autoescape

from neo_desktop.app.bench.page.content import headline, machine_lines, sections
from neo_desktop.app.bench.report import Report

_FOLDER = Path(__file__).parent


def prepare_folder(folder: Path) -> None:
    """Make the folder, before anything is measured. Raises OSError where that is impossible."""
    folder.mkdir(parents=True, exist_ok=True)


def discard_folder(folder: Path) -> None:
    """Remove the folder that `prepare_folder` made, if it is empty."""
    with suppress(OSError):
        folder.rmdir()


def write_files(report: Report, folder: Path) -> Path:
    """Write report.json and report.html; return the page."""
    report.write_json(folder / "report.json")
    page = folder / "report.html"
    page.write_text(html(report), encoding="utf-8")
    return page


def html(report: Report) -> str:
    """Return the page: the answer, then a section per suite, charts first and details folded."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
        report=report,
        headline=headline(report),
        machine=machine_lines(report),
        sections=sections(report),
        style=(_FOLDER / "style.css").read_text(encoding="utf-8"),
    )
