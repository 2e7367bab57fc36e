"""The result of one run of the self-test: plain data, its verdict, and a page that needs no other file."""

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.text import Text

from neo_desktop.app.bench.hardware import HardwareReport
from neo_desktop.app.bench.host_rates import Probe
from neo_desktop.app.bench.load import LoadReport
from neo_desktop.app.bench.section import render_section
from neo_desktop.app.bench.throughput import BASELINE, ThroughputReport
from neo_desktop.app.bench.words import say
from neo_desktop.engine.profiling.hardware import MachineInfo

S = TypeVar("S")

_PAGE_COLUMNS = 110
# Rich fills in the report as it prints it.
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>neo-desktop bench</title>
<style>
:root {{ color-scheme: light dark }}
body {{ margin: 1rem; color: CanvasText; background: Canvas }}
pre {{ font: .85rem/1.5 ui-monospace, monospace; overflow-x: auto }}
{stylesheet}
</style>
<pre>{code}</pre>
</html>
"""
_STEADY = 1.1  # the most by which the fastest and the slowest probe of a steady computer differ
_WORTH_IT = 1.05  # a gain that two runs on one machine cannot make up

# What a suite found: plain data, which is its JSON (`suite` tells which), and a `section` of the page.
# A suite yields it again and again, each time with more in it.
AnySuiteReport = HardwareReport | ThroughputReport | LoadReport


@dataclass(frozen=True, slots=True)
class Failure:
    suite: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    started: str  # local time, ISO 8601
    seconds: float  # the whole run
    machine: MachineInfo  # at its start
    suites: tuple[AnySuiteReport, ...]
    failures: tuple[Failure, ...] = ()
    interrupted: str | None = None  # the suite that was under way when the run was ended: it may lack cases
    gpu_slice_sms: int | None = None  # multiprocessors that all GPU work was confined to; None: to none
    model_note: str = ""  # which model was chosen and why; empty: it was asked for, or the built-in one
    probes: tuple[Probe, ...] = ()  # how fast the computer itself was, before the suites and after each

    @property
    def has_failed(self) -> bool:
        """True if a suite could not be run, or an answer was changed or given up."""
        throughput = self._suite(ThroughputReport)
        return bool(self.failures) or (throughput is not None and throughput.has_failed)

    def headline(self) -> tuple[str, ...]:
        """Return the verdict, and what is missing in the report."""
        throughput, load = self._suite(ThroughputReport), self._suite(LoadReport)
        sustained = {
            curve.name: curve.sustained
            for curve in (load.curves if load is not None else ())
            if curve.sustained is not None and curve.sustained.says_enough
        }
        # The pace of a chat's tokens at the highest rate that was kept, with and without offloading.
        paces = [sustained[name].metrics.tpot for name in ("auto", BASELINE) if name in sustained]
        is_steady, sentence = self._steadiness()
        return say(
            "headline",
            report=self,
            throughput=throughput,
            load=load,
            sustained={name: point.rate_per_s for name, point in sustained.items()},
            paces=[pace.p50_ms for pace in paces if pace is not None],
            baseline=BASELINE,
            worth_it=_WORTH_IT,
            unsteady="" if is_steady else sentence,
        )

    def write_files(self, folder: Path) -> Path:
        """Write report.json and report.html; return the page."""
        (folder / "report.json").write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        page = folder / "report.html"
        page.write_text(self.html(), encoding="utf-8")
        return page

    def html(self) -> str:
        """Return the page, which holds what `print` prints."""
        console = Console(record=True, file=io.StringIO(), width=_PAGE_COLUMNS)
        self.print(console, is_page=True)
        return console.export_html(code_format=_PAGE)

    def print(self, console: Console, *, is_page: bool = False) -> None:
        """Print machine, suites and verdict; a page begins with the verdict, and explains all figures."""
        verdict: list[RenderableType] = [Text(f"\n{line}", style="bold") for line in self.headline()]
        if self.model_note:
            verdict.insert(len(verdict) if is_page else 0, Text(f"\n{self.model_note}", style="dim"))
        is_steady, sentence = self._steadiness()
        machine = say("machine", report=self, steadiness=sentence if is_steady else "")
        details: list[RenderableType] = [Text(line, style="dim") for line in machine]
        # Of a whole self-test, the terminal shows the figures alone.
        has_notes = is_page or len(self.suites) == 1
        details += [render_section(suite.section(), notes=has_notes) for suite in self.suites]
        for one in (*verdict, "", *details) if is_page else (*details, *verdict):
            console.print(one, highlight=False)

    def _steadiness(self) -> tuple[bool, str]:
        """Return whether the computer stayed the same, and a sentence; it is empty for less than two probes.

        A laptop that gets hot, other programs and neighbours on a server change all figures, and repetition
        does not help against what lasts for minutes.
        """
        if len(self.probes) < 2:
            return True, ""
        rates = ([each.gflop_per_s for each in self.probes], [each.read_gb_per_s for each in self.probes])
        flops, reads = ((min(each), max(each)) for each in rates)
        steady = all(high <= _STEADY * low for low, high in (flops, reads))
        told = say("steadiness", steady=steady, flops=flops, reads=reads, count=len(self.probes))
        return steady, told[0]

    def _suite(self, kind: type[S]) -> S | None:
        return next((suite for suite in self.suites if isinstance(suite, kind)), None)
