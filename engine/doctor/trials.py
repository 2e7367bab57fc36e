"""Checks in a child process: if one hangs or crashes, it is recorded, and the next one follows.

    parent                                        child: engine.selfcheck
    ──────                                        ────────────────────
    Request: subject, finished checks ── stdin ─→ starts.
    deadline of the start           ←─ stdout ──  Announcement
    deadline of the check           ←─ stdout ──  its Outcome
    deadline of the repetition      ←─ stdout ──  START: repeats a check that others need
    …                               ←─ stdout ──  the Outcome of START: all have ended, or none can start
    (end of this process)           ── end of stdin → ends

A child that misses a deadline is killed, and a new one continues with the remaining checks.
"""

import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from neo_desktop.engine.doctor.outcome import Announcement, Outcome, Result, limits_of
from neo_desktop.engine.frames import ChildProcess
from neo_desktop.engine.options import EngineOptions

logger = logging.getLogger(__name__)

CHILD = (sys.executable, "-m", "neo_desktop.engine.selfcheck")
START_DEADLINE_S = 120.0  # to import torch from a slow disk, and to open the GPU
END_DEADLINE_S = 15.0  # between two checks, and at the end
MOST_DEATHS = 2  # deaths of children between checks before the run is aborted

Listener = Callable[[str, Outcome | None], None]  # (title of a check, its outcome; None: it starts)


@dataclass(frozen=True, slots=True)
class Subject:
    """The object of the checks; see `EngineOptions`."""

    model: str = "builtin"
    shape: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    gpu_slice: int | None = None
    is_quick: bool = False  # a first start: the model's shape with few layers

    @classmethod
    def of(cls, options: EngineOptions, *, is_quick: bool = False) -> Self:
        """Return the options that matter for the checks, as plain values."""
        return cls(
            str(options.model), options.shape, options.device, options.dtype, options.gpu_slice, is_quick
        )


@dataclass(frozen=True, slots=True)
class Request:
    """The first message to a child."""

    subject: Subject
    done: Sequence[str]  # names of finished checks
    limits: Mapping[str, str]  # mechanism -> level


START = Announcement("start", "Start of the checks", None, None, START_DEADLINE_S)


def run_selfchecks(
    subject: Subject,
    *,
    listener: Listener | None = None,
    child: Sequence[str] = CHILD,
) -> list[Outcome]:
    """Run all checks; return their outcomes in order.

    Args:
        listener: called when a check starts and when it ends.
    """
    listener = listener or (lambda title, outcome: None)
    outcomes: list[Outcome] = []
    deaths = 0
    while True:
        limits = {limit.mechanism: limit.level for limit in limits_of(outcomes)}
        request = Request(subject, [outcome.name for outcome in outcomes], limits)
        process = ChildProcess(child, request, lambda line: logger.debug("check: %s", line.rstrip()))
        try:
            lost = _follow(process, outcomes, listener)
        finally:
            process.end()
        if lost.is_ok:
            return outcomes
        if lost.name == START.name and lost.result is Result.CRASHED and outcomes and deaths < MOST_DEATHS:
            deaths += 1  # earlier checks may have corrupted state: a new child starts clean
            continue
        outcomes.append(lost)
        listener(lost.title, lost)
        if lost.name == START.name:
            return outcomes


def _follow(process: ChildProcess, outcomes: list[Outcome], listener: Listener) -> Outcome:
    """Collect outcomes from a child; return the outcome that ended it."""
    under_way = START
    while True:
        try:
            message = process.receive(under_way.deadline_s)
        except TimeoutError:
            seconds = f"{under_way.deadline_s:g}"
            return under_way.outcome(Result.HUNG, f"it had not finished after {seconds} s", {})
        if message is None:
            return under_way.outcome(Result.CRASHED, f"it ended its process: {_death(process)}", {})
        if isinstance(message, Announcement):
            under_way = message
            if message.name != START.name:
                listener(message.title, None)
            continue
        outcome: Outcome = message
        if outcome.name == START.name:
            return outcome
        outcomes.append(outcome)
        listener(outcome.title, outcome)
        under_way = replace(START, deadline_s=END_DEADLINE_S)


def _death(process: ChildProcess) -> str:
    code = process.status(END_DEADLINE_S)
    if code is None:
        return "it closed its output"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
