"""What the suites measured, for people (tables) and for programs (JSON)."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, RenderableType

from neo_desktop.engine.profiling.hardware import MachineInfo

SCHEMA_VERSION = 1  # of the JSON file: raised when a field changes its meaning or goes away

Progress = Callable[[float, str], None]  # share done, 0 to 1; what is being measured


class SuiteReport(Protocol):
    """What one suite found."""

    def render(self) -> RenderableType:
        """A table, and what its reader should know."""

    def to_json(self) -> dict[str, Any]:
        """The suite's name, its settings, its notes and one object per case; units are in the names."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run measured."""

    machine: MachineInfo
    suites: tuple[SuiteReport, ...]

    def print(self, console: Console) -> None:
        """Print one table per suite."""
        machine = self.machine
        memory = f"{machine.memory_bytes / 2**30:.0f} GiB memory"
        console.print(f"{machine.cpu}, {machine.usable_cores} usable cores, {machine.isa}, {memory}")
        for suite in self.suites:
            console.print(suite.render())

    def to_json(self) -> dict[str, Any]:
        """Plain data: schema version, machine, suites."""
        return {
            "schema_version": SCHEMA_VERSION,
            "machine": asdict(self.machine),
            "suites": [suite.to_json() for suite in self.suites],
        }

    def write_json(self, path: str | Path) -> None:
        """Write `to_json` to a file. Raises OSError where that is impossible."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
