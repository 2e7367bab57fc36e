"""Sections in a terminal."""

import re

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from neo_desktop.app.bench.section import Section, Table


def render_section(section: Section, *, notes: bool = True) -> RenderableType:
    """Title, summary, tables and, if wanted, notes; plots are for the page."""
    parts: list[RenderableType] = [Text(section.title, style="bold"), Text(section.summary)]
    parts += map(_render_table, section.tables)
    if notes:
        parts += [Text(note, style="dim") for note in section.notes]
    return Padding(Group(*parts), (1, 0, 0, 0))


def _render_table(table: Table) -> RenderableType:
    """Headings are broken at spaces and hyphens, so that many columns fit."""
    shown = RichTable(
        title=table.title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in table.columns:
        is_name = column is table.columns[0]
        shown.add_column(
            re.sub(r" |(?<=-)", "\n", column), justify="left" if is_name else "right", no_wrap=is_name
        )
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown
