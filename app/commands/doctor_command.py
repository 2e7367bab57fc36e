"""The body of `neo-desktop doctor`: checks or measures this computer, or shows what was found before."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from neo_desktop.app.words import duration
from neo_desktop.engine.cuda.presence import why_unusable
from neo_desktop.engine.doctor.first_start import subject_key
from neo_desktop.engine.doctor.outcome import Outcome, Result, limits_of, unserved
from neo_desktop.engine.doctor.trials import CHILD, Subject, run_selfchecks
from neo_desktop.engine.doctor.verdict import Verdict, keep, new_verdict, read_verdict
from neo_desktop.engine.fallbacks import MECHANISMS
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.profiling.hardware import machine_info
from neo_desktop.engine.profiling.profile_cache import load_or_profile, profile_key, profile_path
from neo_desktop.engine.progress import Progress, part
from neo_desktop.engine.setup import MEASURING, set_up

_COLOURS = {Result.OK: "green", Result.NO_MEMORY: "yellow"}  # others: red


@dataclass(frozen=True, slots=True)
class DoctorReport:
    verdict: Verdict
    is_kept: bool  # from before

    @property
    def is_well(self) -> bool:
        return not self.verdict.failed

    def print(self, console: Console) -> None:
        if (trouble := why_unusable()) is not None:
            console.print(f"[bold yellow]{escape(trouble)}[/]", highlight=False, soft_wrap=True)
        key = self.verdict.key
        where = key["gpu"]["name"] if key["gpu"] else key["cpu"]
        console.print(f"{where}, {key['dtype']}, torch {key['torch']}", highlight=False)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        is_plain = self.is_well and self.verdict.is_complete
        for name in ("Check", "Result", "Time", *(() if is_plain else ("What it means",))):
            table.add_column(name, overflow="fold")
        for each in self.verdict.outcomes:
            result = f"[{_COLOURS.get(each.result, 'red')}]{each.result}[/]"
            ms = each.figures.get("ms")
            time = duration(ms) if isinstance(ms, float | int) else ""
            cells = [escape(each.title), result, time, escape(self._meaning(each))]
            table.add_row(*cells[: len(table.columns)])
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
        if failed:
            yield f"{failed} of {total} checks failed."
        elif not num_left:
            yield f"All {total} checks passed. Nothing fell back."
        for limit in limits_of(self.verdict.outcomes):
            yield f"From now on, {MECHANISMS[limit.mechanism].title}: {_what(limit.mechanism, limit.level)}."
        if self.is_kept:
            yield f"Found on {self.verdict.checked_at} (UTC); --refresh checks again."

    def to_json(self) -> dict[str, Any]:
        """Return everything that an issue needs, and nothing that is private."""
        machine = asdict(machine_info())
        del machine["package_folder"]  # it may hold a user's name
        for gpu in machine["gpus"]:
            del gpu["other_processes"]
        return {
            **self.verdict.to_json(),
            "is_well": self.is_well,
            "limits": [asdict(limit) for limit in limits_of(self.verdict.outcomes)],
            "machine": machine,
        }

    def _meaning(self, outcome: Outcome) -> str:
        if outcome.is_ok:
            return ""
        reason = outcome.reason or "no reason is known"
        if outcome.mechanism is None or not outcome.has_failed:
            return reason
        if outcome in unserved(self.verdict.outcomes):
            return f"{reason}; nothing serves in its place"
        limits = {limit.mechanism: limit.level for limit in limits_of(self.verdict.outcomes)}
        if outcome.mechanism not in limits:  # a lower level failed, which is not in use
            return reason
        return f"{reason}; in its place: {_what(outcome.mechanism, limits[outcome.mechanism])}"


def _what(mechanism: str, level: str) -> str:
    found = MECHANISMS[mechanism]
    return found.levels[found.position(level)].what


def run_doctor(
    subject: Subject, *, refresh: bool, progress: Callable[[str], object], child: Sequence[str] = CHILD
) -> DoctorReport:
    """Check this computer, or find what was found before; `progress` gets the titles of checks.

    Raises ValueError, ModelError: the model cannot be loaded.
    """

    def tell(title: str, outcome: Outcome | None) -> None:
        if outcome is None:
            progress(title)

    key = subject_key(subject, choose_device(subject.device))
    verdict = None if refresh else read_verdict(key)
    is_kept = verdict is not None and not verdict.is_quick
    if verdict is None or not is_kept:
        outcomes = run_selfchecks(subject, listener=tell, child=child)
        verdict = new_verdict(key, outcomes, is_quick=subject.is_quick)
        keep(verdict)
    return DoctorReport(verdict, is_kept)


def run_measure(
    options: EngineOptions, progress: Progress, *, refresh: bool = False
) -> tuple[str, dict[str, Any]]:
    """Load the model, then find or measure its tables; raises what `Engine.from_pretrained` raises.

    Returns lines that say where the tables are, and the tables with their key.
    """
    parts = set_up(options, progress)
    decoder, streams = parts.model.decoder, parts.model.streams
    measuring = part(progress, 0.0, 1.0, MEASURING)
    tables = load_or_profile(
        decoder, parts.storage, parts.limits, measuring, streams=streams, refresh=refresh
    )
    key = profile_key(decoder, parts.storage, parts.limits, streams)
    path = profile_path(key)
    where = key["gpu"]["name"] if key["gpu"] else key["cpu"]
    lines = [f"{parts.model.name} on {where}, {key['dtype']}: the tables are in {path}.", streams.note]
    return "\n".join(filter(None, lines)), {"key": key, "path": str(path), "tables": tables.to_json()}
