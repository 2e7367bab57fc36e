"""Two reports side by side."""

import statistics

from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Metric, Section, Table
from neo_desktop.app.bench.spread import number
from neo_desktop.app.bench.steadiness import describe

NOISE = 0.05  # by which two runs on one idle machine may differ


def compare(first: Report, second: Report, names: tuple[str, str]) -> Section:
    """Set the headline figures of two reports beside each other.

    Args:
        names: of the reports, which may be long: the table calls them A and B.
    """
    a, b = first.metrics(), second.metrics()
    rows = [
        _row(name, a.get(name), b.get(name)) for name in sorted({*a, *b}, key=lambda name: _order(name, a, b))
    ]
    ratios = [  # above 1: B is better
        (b[name].value / a[name].value if a[name].higher_is_better else a[name].value / b[name].value)
        for name in a
        if name in b and a[name].value > 0 and b[name].value > 0
    ]
    better = sum(ratio > 1 + NOISE for ratio in ratios)
    worse = sum(ratio < 1 - NOISE for ratio in ratios)
    summary = (
        f"B is better in {better} and worse in {worse} of {len(ratios)} figures; the others differ "
        f"by at most {NOISE:.0%}, as two runs on one machine do. In the middle the difference is "
        f"{statistics.median(abs(ratio - 1) for ratio in ratios):.1%}."
        if ratios
        else "The two reports have no figure in common: they are of different suites."
    )
    summary = f"A is {names[0]}, B is {names[1]}. {summary}"
    notes = []
    if first.machine.cpu != second.machine.cpu:
        notes.append("The two were measured on different processors.")
    models = [", ".join(_models(each)) for each in (first, second)]
    if all(models) and models[0] != models[1]:
        notes.append(
            f"The two were measured with different models ({' and '.join(models)}): their speeds do not "
            "compare. --shape takes the same one for both."
        )
    for name, report in (("A", first), ("B", second)):
        steadiness = describe(report.probes)
        if steadiness is not None:
            notes.append(f"{name}: {steadiness}")
    return Section(
        "Comparison",
        summary,
        (Table(("figure", "A", "B", "B to A", "better"), tuple(rows)),),
        notes=tuple(notes),
    )


def _models(report: Report) -> tuple[str, ...]:
    """Those of suites that have one, each once."""
    curves = [curve.model for suite in report.suites for curve in getattr(suite, "curves", ())]
    names = [getattr(suite, "model", None) for suite in report.suites]
    return tuple(dict.fromkeys(name for name in (*names, *curves) if name))


def _order(name: str, a: dict[str, Metric], b: dict[str, Metric]) -> tuple[int, int]:
    """As the first report has them, then what only the second has."""
    return (0, list(a).index(name)) if name in a else (1, list(b).index(name))


def _row(name: str, a: Metric | None, b: Metric | None) -> tuple[str, ...]:
    known = a or b
    assert known is not None
    ratio = f"{b.value / a.value:.2f}x" if a is not None and b is not None and a.value else ""
    better = "higher" if known.higher_is_better else "lower"
    return name, _value(a), _value(b), ratio, better


def _value(metric: Metric | None) -> str:
    return "" if metric is None else number(metric.value)
