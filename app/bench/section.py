"""The text and tables of a suite."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from neo_desktop.app.words import binary_size, number

# What a column shows of a row: an attribute ("rate.median"), perhaps with a format ("share:.0%", "n:size")
# and a unit ("power:.0f W"), or what a function makes of the row.
Column = str | Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they are to be read; the first column is set left, the others right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        rows: Iterable[object],
        columns: Mapping[str, Column] | Mapping[str, str],
        missing: str = "",
    ) -> "Table":
        """Make a row per item; numbers get about three digits, `missing` stands for None."""
        cells = tuple(tuple(_cell(row, column, missing) for column in columns.values()) for row in rows)
        return cls(tuple(columns), cells, title)


def _cell(row: object, column: Column, missing: str) -> str:
    how = unit = ""
    if isinstance(column, str):
        name, _, shown = column.partition(":")
        how, space, unit = shown.partition(" ")
        value, unit = attrgetter(name)(row), space + unit
    else:
        value = column(row)
    if value is None:
        return missing
    if how == "size":
        return binary_size(value) + unit
    if how:
        return format(value, how) + unit
    return (number(value) if isinstance(value, float) else str(value)) + unit


@dataclass(frozen=True, slots=True)
class Section:
    """One suite's part of a report: a sentence or two, figures, and the limits of the figures."""

    title: str
    summary: str
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


def render_section(section: Section, *, notes: bool = True) -> RenderableType:
    """Return a section to print; headings are broken, so that many columns fit."""
    parts: list[RenderableType] = [Text(section.title, style="bold"), Text(section.summary)]
    for table in section.tables:
        shown = RichTable(
            title=table.title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for column in table.columns:
            is_name = column is table.columns[0]
            heading = re.sub(r" |(?<=-)", "\n", column)
            shown.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
        for row in table.rows:
            shown.add_row(*map(Text, row))
        parts.append(shown)
    if notes:
        parts += [Text(note, style="dim") for note in section.notes]
    return Padding(Group(*parts), (1, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of repetitions, and the range of four fifths."""

    median: float
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        median, p10, p90 = np.quantile(samples, (0.5, 0.1, 0.9)).tolist()
        return cls(median, p10, p90, len(samples))

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.p10)} - {number(self.p90)})"
