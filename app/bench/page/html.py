"""The page of a report: the verdict, the computer, and a section per suite; it needs no other file."""

from pathlib import Path
from typing import TypeVar

from jinja2 import Environment, FileSystemLoader, select_autoescape

from neo_desktop.app.bench.computer import describe, is_steady
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.throughput.report import BASELINE, ThroughputReport
from neo_desktop.app.bench.words import say

S = TypeVar("S")

_FOLDER = Path(__file__).parent
_WORTH_IT = 1.05  # a gain that two runs on one machine cannot make up


def headline(report: Report) -> tuple[str, ...]:
    """The verdict, and what is missing in the report."""
    unsteady = None if is_steady(report.probes) else describe(report.probes)
    return say("headline", unsteady=unsteady or "", **_verdict(report))


def machine_lines(report: Report) -> tuple[str, ...]:
    """The measured computer, and the time."""
    steadiness = describe(report.probes) if is_steady(report.probes) else None
    return say("machine", report=report, steadiness=steadiness or "")


def _verdict(report: Report) -> dict[str, object]:
    throughput, load = _suite(report, ThroughputReport), _suite(report, LoadReport)
    curves = {curve.name: curve for curve in load.curves if curve.says_enough} if load is not None else {}
    # At what pace a chat gets its tokens at the highest rate that was kept, with and without offloading.
    paces = [curves[name].pace_ms for name in ("auto", BASELINE) if name in curves]
    return {
        "report": report,
        "throughput": throughput,
        "load": load,
        "sustained": {name: curve.sustained_per_s for name, curve in curves.items()},
        "paces": [pace for pace in paces if pace is not None],
        "baseline": BASELINE,
        "worth_it": _WORTH_IT,
    }


def _suite(report: Report, kind: type[S]) -> S | None:
    return next((suite for suite in report.suites if isinstance(suite, kind)), None)


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
        sections=[suite.section() for suite in report.suites],
        style=(_FOLDER / "style.css").read_text(encoding="utf-8"),
    )
