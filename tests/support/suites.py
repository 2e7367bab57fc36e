"""Suites in tests: run to the end, and shown as in a terminal."""

from collections.abc import Iterable
from io import StringIO
from typing import TypeVar

from rich.console import Console

from neo_desktop.app.bench.section import Section, render_section

T = TypeVar("T")


def ignore(share: float, what: str) -> None:
    """Ignore progress."""


def last(reports: Iterable[T]) -> T:
    """Run a suite to its end."""
    *_, report = reports
    return report


def shown(section: Section, width: int = 80) -> str:
    """Return a section's text in a terminal of that width."""
    console = Console(width=width, record=True, file=StringIO())
    console.print(render_section(section))
    return console.export_text()
