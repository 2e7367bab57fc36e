"""Checks, and the child process that runs them; `engine.doctor.trials` is the parent."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

from neo_desktop.engine.cuda.errors import is_out_of_memory
from neo_desktop.engine.doctor.outcome import Announcement, CheckError, Figures, Outcome, Result
from neo_desktop.engine.doctor.trials import START, Request, Subject
from neo_desktop.engine.fallbacks import MECHANISMS, fallbacks
from neo_desktop.engine.frames import FrameWriter, read_frames, take_pipes


@dataclass(frozen=True, slots=True)
class Check(Announcement):
    """One check."""

    run: Callable[[], Figures]  # raises CheckError, or any error of the mechanism
    is_needed: bool = False  # later checks need it: a new child process repeats it

    @classmethod
    def of_level(cls, mechanism: str, level: str, deadline_s: float, run: Callable[[], Figures]) -> Self:
        """Return the check of a mechanism at one level."""
        checked = MECHANISMS[mechanism]
        title = f"{checked.title}: {checked.levels[checked.position(level)].what}"
        return cls(f"{mechanism}-{level}", title, mechanism, level, deadline_s, run)

    @property
    def announcement(self) -> Announcement:
        return Announcement(*(getattr(self, field.name) for field in fields(Announcement)))


def serve(checks_of: Callable[[Subject], Iterable[Check]]) -> None:
    """Run as the child process: read the request from stdin, write outcomes to stdout.

    Args:
        checks_of: the checks of a subject, in order. An error before the first check ends the run.
    """
    requests, events = take_pipes()
    tell, values = FrameWriter(events).put, read_frames(requests)
    request: Request = next(values)
    threading.Thread(target=_end_with_parent, args=(values,), name="neo-desktop-end", daemon=True).start()
    for mechanism, level in request.limits.items():
        fallbacks.limit(mechanism, level, "a check failed", is_told=True)
    try:
        for check in checks_of(request.subject):
            if check.name not in request.done:
                tell(check.announcement)
                tell(_carry_out(check))
            elif check.is_needed:
                tell(replace(START, deadline_s=check.deadline_s))
                check.run()
    except Exception as error:
        tell(START.outcome(Result.FAILED, _clause(error), {}))
        raise
    tell(START.outcome(Result.OK, None, {}))


def _carry_out(check: Check) -> Outcome:
    started = time.perf_counter()
    figures: Figures = {}
    result, error = Result.OK, None
    try:
        figures = check.run()
    except CheckError as failure:
        result, figures, error = Result.FAILED, failure.figures, str(failure)
    except Exception as failure:  # any error counts as the mechanism's result
        is_full = is_out_of_memory(failure)
        result = Result.NO_MEMORY if is_full else Result.FAILED
        error = f"there was too little GPU memory: {_clause(failure)}" if is_full else _clause(failure)
    figures = {**figures, "seconds": round(time.perf_counter() - started, 3)}
    failed = check.mechanism if result is Result.FAILED else None
    if failed is not None and fallbacks.level(failed) == check.level:  # later checks avoid the level
        fallbacks.descend(failed, str(error))
    return check.outcome(result, error, figures)


def _clause(error: BaseException) -> str:
    """Return an error's first line; the rest contains addresses and hints for programmers."""
    lines = str(error).replace(str(Path.home()), "~").strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _end_with_parent(values: Iterator[object]) -> None:
    next(values, None)
    os._exit(1)
