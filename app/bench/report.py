"""The result of one run of the self-test, as plain data."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from neo_desktop.app.bench.computer import Probe
from neo_desktop.app.bench.hardware.report import HardwareReport
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.throughput.report import ThroughputReport
from neo_desktop.engine.profiling.hardware import MachineInfo

SCHEMA_VERSION = 5  # of the JSON file: raised when a field changes its meaning, goes away, or is required

# What a suite found: plain data, which is its JSON (`suite` tells which), and a `section` of the page.
# A suite yields it again and again, each time with more in it.
AnySuiteReport = HardwareReport | ThroughputReport | LoadReport


@dataclass(frozen=True, slots=True)
class Failure:
    """A suite that could not be run, or not to its end."""

    suite: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run measured."""

    started: str  # local time, ISO 8601
    seconds: float  # the whole run
    machine: MachineInfo  # at its start
    suites: tuple[AnySuiteReport, ...]
    failures: tuple[Failure, ...] = ()
    interrupted: str | None = None  # the suite that was under way when the run was ended: it may lack cases
    gpu_slice_sms: int | None = None  # multiprocessors that all GPU work was confined to; None: to none
    model_note: str = ""  # which model was chosen and why; empty: it was asked for, or the built-in one
    probes: tuple[Probe, ...] = ()  # how fast the computer itself was, before the suites and after each
    schema_version: int = SCHEMA_VERSION

    @property
    def has_failed(self) -> bool:
        """True if a suite could not be run, or an answer was changed or given up."""
        throughputs = [suite for suite in self.suites if isinstance(suite, ThroughputReport)]
        return bool(self.failures) or any(suite.has_failed for suite in throughputs)

    def write_json(self, path: str | Path) -> None:
        """Write the report to a file. Raises OSError where that is impossible."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
