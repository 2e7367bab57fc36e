"""The files of a report."""

from contextlib import suppress
from pathlib import Path

from neo_desktop.app.bench.page.html import html
from neo_desktop.app.bench.page.markdown import markdown
from neo_desktop.app.bench.page.pictures import pictures
from neo_desktop.app.bench.report import Report

PICTURES = "plots"


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
    drawn = pictures(report)
    for name, png in drawn.items():
        (folder / PICTURES / f"{name}.png").write_bytes(png)
    (folder / "report.md").write_text(markdown(report, PICTURES), encoding="utf-8")
    page = folder / "report.html"
    page.write_text(html(report), encoding="utf-8")
    return page
