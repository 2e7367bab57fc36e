"""Final page of `gpu_check.py`: working parts, fallbacks, speeds, targets; and the processes that fill it."""

import json
import os
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Target:
    """A figure and its target; ratios, or with the unit in the name."""

    name: str
    found: float
    wanted: float
    is_upper: bool = False  # True: the figure must not exceed the target; False: not fall below it

    @property
    def is_met(self) -> bool:
        return self.found <= self.wanted if self.is_upper else self.found >= self.wanted

    def __str__(self) -> str:
        sign = "at most" if self.is_upper else "at least"
        how = "met   " if self.is_met else "MISSED"
        return f"{how}  {self.name}: {self.found:.3g} ({sign} {self.wanted:.3g})"


@dataclass
class Page:
    """Collects results during the checks, also those of several processes, in a file."""

    title: str
    works: list[str] = field(default_factory=list)
    fell_back: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    speeds: list[str] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Self:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return cls(**kept | {"targets": [Target(**each) for each in kept["targets"]]})

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def stage(self, name: str, work: Callable[[], object]) -> None:
        """Run a part of the check; later parts run even if it fails."""
        print(f"--- {name}", flush=True)
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            self.failed.append(f"{name}: {lines[0] if lines else type(error).__name__}")
        else:
            self.works.append(name)

    def speed(self, line: str) -> None:
        """Print a figure now and on the page."""
        print(line, flush=True)
        self.speeds.append(line)

    def lines(self) -> Iterator[str]:
        """Yield the page."""
        yield f"==== {self.title}"
        parts = (
            ("What works", self.works, "nothing"),
            ("What fell back", self.fell_back, "nothing: everything is used as it is meant to be"),
            ("What failed", self.failed, "nothing"),
            ("How fast", self.speeds, "not measured"),
            ("Targets", [str(target) for target in self.targets], "none was measured"),
        )
        for head, found, otherwise in parts:
            yield f"\n{head}"
            yield from (f"  {line}" for line in found or [otherwise])


def run_apart(command: Sequence[str], limit_s: float) -> str | None:
    """Run a command, and end all its processes; return why it did not end well, or None."""
    with subprocess.Popen(command, start_new_session=True) as child:
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"it had not finished after {limit_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}" if code else None
