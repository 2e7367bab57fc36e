"""The head of the page: the verdict and the computer."""

from typing import TypeVar

from neo_desktop.app.bench.computer import describe, is_steady
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Section
from neo_desktop.app.bench.throughput.report import BASELINE, ThroughputReport
from neo_desktop.app.bench.words import say

S = TypeVar("S")

_WORTH_IT = 1.05  # a gain that two runs on one machine cannot make up


def headline(report: Report) -> tuple[str, ...]:
    """The verdict, and what is missing in the report."""
    unsteady = None if is_steady(report.probes) else describe(report.probes)
    return say("headline", unsteady=unsteady or "", **_verdict(report))


def sections(report: Report) -> tuple[Section, ...]:
    """A section per suite."""
    return tuple(suite.section() for suite in report.suites)


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
