"""Checks, and the child process that runs them; `engine.doctor.trials` is the parent."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TextIO

from neo_desktop.engine.cuda.errors import is_out_of_memory
from neo_desktop.engine.doctor.outcome import Announcement, CheckError, Figures, Result
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.fallbacks import MECHANISMS, fallbacks


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


def serve(checks_of: Callable[[Subject], Iterable[Check]]) -> None:
    """Run as the child process: read the request from stdin, write events to stdout.

    Args:
        checks_of: the checks of a subject, in order. An error before the first check ends the run.
    """
    # Libraries may print to stdout, so events use their own descriptor.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request: Mapping[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="neo-desktop-end", daemon=True).start()
    for mechanism, level in request["limits"].items():
        fallbacks.limit(mechanism, level, "a check failed", is_told=True)
    done = set(request["done"])
    try:
        for check in checks_of(Subject(**request["subject"])):
            if check.name not in done:
                _carry_out(check, out)
            elif check.is_needed:
                _say(out, event="again", deadline_s=check.deadline_s)
                check.run()
    except Exception as error:
        _say(out, event="failed", error=_clause(error))
        raise
    _say(out, event="done")


def _carry_out(check: Check, out: TextIO) -> None:
    _say(out, event="begin", check={f.name: getattr(check, f.name) for f in fields(Announcement)})
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
    _say(out, event="end", name=check.name, result=result, figures=figures, error=error)


def _clause(error: BaseException) -> str:
    """Return an error's first line; the rest contains addresses and hints for programmers."""
    lines = str(error).replace(str(Path.home()), "~").strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _say(out: TextIO, **event: object) -> None:
    out.write(json.dumps(event) + "\n")
    out.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)
