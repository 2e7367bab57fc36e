"""What one run of the self-test found, as plain data: it can be kept, read again, shown and compared."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neo_desktop.app.bench.computer import Probe
from neo_desktop.app.bench.cost_model import CostModelReport
from neo_desktop.app.bench.cpu_attention.report import CpuAttentionReport
from neo_desktop.app.bench.gpu.report import GpuReport
from neo_desktop.app.bench.hardware.report import HardwareReport
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.section import Metric
from neo_desktop.app.bench.throughput.report import ThroughputReport
from neo_desktop.app.bench.weights.report import WeightsReport
from neo_desktop.engine.profiling.hardware import MachineInfo

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA_VERSION = 4  # of the JSON file: raised when a field changes its meaning, goes away, or is required

# What a suite found: plain data, which is its JSON (`suite` tells which), a `section` of the page and its
# headline `metrics`. A suite yields it again and again, each time with more in it.
AnySuiteReport = (
    HardwareReport
    | CpuAttentionReport
    | GpuReport
    | WeightsReport
    | CostModelReport
    | ThroughputReport
    | LoadReport
)


class ReportError(ValueError):
    """A file that is no report of this version."""


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
        """Whether a suite could not be run, or an answer was changed or given up."""
        throughputs = [suite for suite in self.suites if isinstance(suite, ThroughputReport)]
        return bool(self.failures) or any(suite.has_failed for suite in throughputs)

    def metrics(self) -> dict[str, Metric]:
        """The headline figures of all suites, by name."""
        return {metric.name: metric for suite in self.suites for metric in suite.metrics()}

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `json_schema` describes it."""
        return asdict(self)

    def write_json(self, path: str | Path) -> None:
        """Write the report to a file. Raises OSError where that is impossible."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def read_json(path: str | Path) -> "Report":
        """Read what `write_json` wrote.

        Raises:
            ReportError: the file holds no report, or one of another version.
            OSError: it cannot be read.
        """
        from pydantic import ValidationError  # noqa: PLC0415 - measuring does without it

        try:
            report = _adapter().validate_json(Path(path).read_bytes())
        except ValidationError as error:
            errors = error.errors()
            # A suite's report is tried as one of every suite: only the errors of the right one say something.
            others = {each["loc"][:3] for each in errors if each["type"] == "literal_error"}
            first = next((each for each in errors if each["loc"][:3] not in others), errors[0])
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ReportError(
                f"{path} is no report of neo-desktop bench, version {SCHEMA_VERSION}: {where}: {first['msg']}"
            ) from None
        if report.schema_version != SCHEMA_VERSION:
            raise ReportError(
                f"{path} has version {report.schema_version} of the report, expected {SCHEMA_VERSION}: "
                "measure again"
            )
        return report


@cache
def _adapter() -> "TypeAdapter[Report]":
    from pydantic import TypeAdapter  # noqa: PLC0415 - measuring does without it

    return TypeAdapter(Report)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a report."""
    return _adapter().json_schema(mode="serialization")
