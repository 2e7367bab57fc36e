"""The body of `neo-desktop doctor`: checks this computer, or shows what was found before."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from neo_desktop.app.llamacpp.trial import TITLE, try_llamacpp
from neo_desktop.app.words import duration
from neo_desktop.engine.cuda.presence import why_unusable
from neo_desktop.engine.doctor.first_start import subject_key
from neo_desktop.engine.doctor.outcome import Figures, Outcome, Result, limits_of, unserved
from neo_desktop.engine.doctor.safe_start import start_in_full
from neo_desktop.engine.doctor.trials import CHILD, Subject, run_selfchecks
from neo_desktop.engine.doctor.verdict import Verdict, keep, new_verdict, read_verdict
from neo_desktop.engine.fallbacks import MECHANISMS
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.profiling.hardware import machine_info

_COLOURS = {Result.OK: "green", Result.FAILED: "red", Result.HUNG: "red", Result.CRASHED: "red"} | {
    Result.NO_MEMORY: "yellow"
}
_PRIVATE = ("package_folder",)  # of what `info` tells: paths may hold a user's name


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The result of the checks, of now or before."""

    verdict: Verdict
    is_kept: bool  # from before

    @property
    def is_well(self) -> bool:
        """True if nothing failed."""
        return not self.verdict.failed

    def print(self, console: Console) -> None:
        """Print a table of the checks, and what follows."""
        if (trouble := why_unusable()) is not None:
            console.print(f"[bold yellow]{escape(trouble)}[/]", highlight=False, soft_wrap=True)
        key = self.verdict.key
        where = key["gpu"]["name"] if key["gpu"] else key["cpu"]
        console.print(f"{where}, {key['dtype']}, torch {key['torch']}", highlight=False)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        is_plain = self.is_well and self.verdict.is_complete
        columns = ["Check", "Result", "Figures", *([] if is_plain else ["What it means"])]
        for name in columns:
            table.add_column(name, overflow="fold")
        for outcome in self.verdict.outcomes:
            colour = _COLOURS[outcome.result]
            cells = [
                escape(outcome.title),
                f"[{colour}]{outcome.result}[/]",
                _figures(outcome.figures),
                escape(self._meaning(outcome)),
            ]
            table.add_row(*cells[: len(columns)])
        console.print(table, highlight=False)
        for line in self.conclusion():
            console.print(escape(line), highlight=False)

    def conclusion(self) -> Iterator[str]:
        """Yield what a person should know, in lines."""
        failed, total = len(self.verdict.failed), len(self.verdict.outcomes)
        num_left = sum(outcome.result is Result.NO_MEMORY for outcome in self.verdict.outcomes)
        if num_left:
            yield (
                f"For {num_left} of {total} checks there was too little GPU memory: close other programs, "
                "and check again. The next start does by itself."
            )
        if self.is_well and not num_left:
            yield f"All {total} checks passed. Nothing fell back."
        elif failed:
            yield f"{failed} of {total} checks failed."
        for limit in limits_of(self.verdict.outcomes):
            mechanism = MECHANISMS[limit.mechanism]
            level = mechanism.levels[mechanism.position(limit.level)]
            yield f"From now on, {mechanism.title}: {level.what}."
        if self.is_kept:
            yield f"Found on {self.verdict.checked_at} (UTC); --refresh checks again."

    def to_json(self) -> dict[str, Any]:
        """Return everything that an issue needs, and nothing that is private."""
        machine = asdict(machine_info())
        for name in _PRIVATE:
            del machine[name]
        for gpu in machine["gpus"]:
            del gpu["other_processes"]
        return {
            **self.verdict.to_json(),
            "is_well": self.is_well,
            "limits": [asdict(limit) for limit in limits_of(self.verdict.outcomes)],
            "machine": machine,
        }

    def write_json(self, path: Path) -> None:
        """Write `to_json` to a file."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def _meaning(self, outcome: Outcome) -> str:
        if outcome.is_ok:
            return ""
        reason = outcome.reason or "no reason is known"
        if outcome.mechanism is None or not outcome.has_failed:
            return reason
        if outcome in unserved(self.verdict.outcomes):
            return f"{reason}; nothing serves in its place"
        limits = {limit.mechanism: limit.level for limit in limits_of(self.verdict.outcomes)}
        mechanism = MECHANISMS[outcome.mechanism]
        serves = limits.get(mechanism.name)
        if serves is None:  # a lower level failed, which is not in use
            return reason
        return f"{reason}; in its place: {mechanism.levels[mechanism.position(serves)].what}"


def run_doctor(
    subject: Subject, *, refresh: bool, progress: Callable[[str], object], child: Sequence[str] = CHILD
) -> DoctorReport:
    """Check this computer, or find what was found before.

    Args:
        subject: what is checked.
        refresh: check in any case, and start in full again, also after crashes.
        progress: told what is being checked.
        child: the command of the child process.

    Raises:
        ValueError, ModelError: the model cannot be loaded.
    """
    key = subject_key(subject, choose_device(subject.device))
    if refresh:
        start_in_full()
    elif (kept := read_verdict(key)) is not None and not kept.is_quick:
        return DoctorReport(_with_llamacpp(kept, progress), is_kept=True)

    def tell(title: str, outcome: Outcome | None) -> None:
        if outcome is None:
            progress(title)

    verdict = new_verdict(key, run_selfchecks(subject, listener=tell, child=child), is_quick=subject.is_quick)
    keep(verdict)
    return DoctorReport(_with_llamacpp(verdict, progress), is_kept=False)


def _with_llamacpp(verdict: Verdict, progress: Callable[[str], object]) -> Verdict:
    """Add how llama.cpp does, where it is installed: that is not kept, since it may be installed anew."""
    progress(TITLE)
    outcome = try_llamacpp()
    return verdict if outcome is None else replace(verdict, outcomes=(*verdict.outcomes, outcome))


def _figures(figures: Figures) -> str:
    parts = []
    if "error" in figures and "bound" in figures:
        parts.append(f"error {_number(figures['error'])} of {_number(figures['bound'])}")
    ms, bytes_ = figures.get("ms"), figures.get("bytes")
    if isinstance(ms, float | int):
        parts.append(duration(ms))
        if isinstance(bytes_, int) and ms > 0:
            parts.append(f"{bytes_ / ms / 1e6:.1f} GB/s")
    known = {"error", "bound", "ms", "bytes", "seconds", "cases"}
    for name, value in figures.items():
        if name in known or value == 0:
            continue
        if name.endswith("_bytes") and isinstance(value, int):
            parts.append(f"{name.removesuffix('_bytes').replace('_', ' ')} {value / 1e6:.0f} MB")
        else:
            parts.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts)


def _number(value: float | int | str) -> str:
    return value if isinstance(value, str) else f"{value:.1e}"
