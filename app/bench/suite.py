"""What all suites have in common."""

from collections.abc import Callable
from typing import Protocol

from neo_desktop.app.bench.section import Metric, Section

Progress = Callable[[float, str], None]  # share done, 0 to 1; what is being measured


class SuiteReport(Protocol):
    """What a suite found: a frozen dataclass of plain data, which is its JSON, and ways to show it.

    A suite yields it again and again, each time with more in it: what was measured before Ctrl-C is kept.
    """

    @property
    def suite(self) -> str:
        """The suite's name."""

    def section(self) -> Section:
        """Its part of the page."""

    def metrics(self) -> tuple[Metric, ...]:
        """What can be set beside another run."""
