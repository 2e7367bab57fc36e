"""A report as Markdown, to paste where people talk."""

import re
from collections.abc import Iterator

from neo_desktop.app.bench.page.content import headline, machine_lines, sections
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Section, Table


def markdown(report: Report, pictures: str) -> str:
    """Return the page; `pictures` is the folder of the plots, as seen from the page."""
    return "\n".join(_lines(report, pictures)) + "\n"


def _lines(report: Report, pictures: str) -> Iterator[str]:
    yield "# neo-desktop bench"
    yield ""
    for line in headline(report):
        yield f"**{_escaped(line)}**"
        yield ""
    if report.model_note:
        yield from (_escaped(report.model_note), "")
    yield from (f"- {_escaped(line)}" for line in machine_lines(report))
    for section in sections(report):
        yield from _section(section, pictures)


def _section(section: Section, pictures: str) -> Iterator[str]:
    yield from ("", f"## {_escaped(section.title)}", "", _escaped(section.summary))
    for plot in section.plots:
        yield from ("", f"![{_escaped(plot.title)}]({pictures}/{plot.name}.png)")
    for table in section.tables:
        yield from _table(table)
    if section.notes:
        yield ""
        yield from (f"- {_escaped(note)}" for note in section.notes)


def _table(table: Table) -> Iterator[str]:
    yield ""
    if table.title:
        yield from (f"**{_escaped(table.title)}**", "")
    yield _row(table.columns)
    yield _row(("---", *("---:" for _ in table.columns[1:])))
    yield from (_row(map(_escaped, row)) for row in table.rows)


def _row(cells: "Iterator[str] | map[str] | tuple[str, ...]") -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    """Names of models and processes may hold anything."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)
