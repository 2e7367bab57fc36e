"""Two reports side by side."""

import statistics

from neo_desktop.app.bench.computer import describe
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Metric, Section, Table
from neo_desktop.app.bench.words import say

NOISE = 0.05  # by which two runs on one idle machine may differ


def compare(first: Report, second: Report, names: tuple[str, str]) -> Section:
    """Set the headline figures of two reports beside each other.

    Args:
        names: of the reports, which may be long: the table calls them A and B.
    """
    a, b = first.metrics(), second.metrics()
    table = Table.of(
        "",
        a | {name: metric for name, metric in b.items() if name not in a},
        {
            "figure": str,
            "A": lambda name: a[name].value if name in a else None,
            "B": lambda name: b[name].value if name in b else None,
            "B to A": lambda name: _ratio(a.get(name), b.get(name)),
            "better": lambda name: "higher" if (a.get(name) or b[name]).higher_is_better else "lower",
        },
    )
    ratios = [  # above 1: B is better
        (b[name].value / a[name].value if a[name].higher_is_better else a[name].value / b[name].value)
        for name in a
        if name in b and a[name].value > 0 and b[name].value > 0
    ]
    summary, *notes = say(
        "compare",
        names=names,
        first=first,
        second=second,
        ratios=ratios,
        better=sum(ratio > 1 + NOISE for ratio in ratios),
        worse=sum(ratio < 1 - NOISE for ratio in ratios),
        middle=statistics.median(abs(ratio - 1) for ratio in ratios) if ratios else None,
        noise=NOISE,
        models=[_models(each) for each in (first, second)],
        steadiness=[(name, describe(report.probes)) for name, report in (("A", first), ("B", second))],
    )
    return Section("Comparison", summary, (table,), notes=tuple(notes))


def _models(report: Report) -> str:
    """Those of suites that have one, each once."""
    curves = [curve.model for suite in report.suites for curve in getattr(suite, "curves", ())]
    names = [getattr(suite, "model", None) for suite in report.suites]
    return ", ".join(dict.fromkeys(name for name in (*names, *curves) if name))


def _ratio(a: Metric | None, b: Metric | None) -> str:
    return f"{b.value / a.value:.2f}x" if a is not None and b is not None and a.value else ""
