"""Checks, and the child process that carries them out; see `engine.doctor.trials`."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from neo_desktop.engine.cuda.errors import is_out_of_memory
from neo_desktop.engine.doctor.outcome import CheckError, Figures, Result
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.fallbacks import fallbacks


@dataclass(frozen=True, slots=True)
class Check:
    """Something that is tried."""

    name: str  # unique
    title: str
    mechanism: str | None  # of the fallbacks; None: nothing serves in its place
    level: str | None
    deadline_s: float
    run: Callable[[], Figures]  # raises CheckError, or whatever the mechanism raises
    is_needed: bool = False  # by those after it: a child that goes on after another one does it again


def serve(checks_of: Callable[[Subject], Iterable[Check]]) -> None:
    """Be the child process: read what is to be checked from stdin, say on stdout what happens.

    Args:
        checks_of: the checks of a subject, in order. What raises before the first of them ends all.
    """
    # Libraries print, too: what is said to the parent has a descriptor of its own.
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
    _say(
        out,
        event="begin",
        name=check.name,
        title=check.title,
        mechanism=check.mechanism,
        level=check.level,
        deadline_s=check.deadline_s,
    )
    started = time.perf_counter()
    figures: Figures = {}
    result, error = Result.OK, None
    try:
        figures = check.run()
    except CheckError as failure:
        result, figures, error = Result.FAILED, failure.figures, str(failure)
    except Exception as failure:  # whatever it is, it is what the mechanism does here
        is_full = is_out_of_memory(failure)
        result = Result.NO_MEMORY if is_full else Result.FAILED
        error = f"there was too little GPU memory: {_clause(failure)}" if is_full else _clause(failure)
    figures = {**figures, "seconds": round(time.perf_counter() - started, 3)}
    if result is Result.FAILED and check.mechanism is not None and check.level is not None:
        _give_up(check.mechanism, check.level, str(error))
    _say(out, event="end", name=check.name, result=result, figures=figures, error=error)


def _give_up(mechanism: str, level: str, reason: str) -> None:
    """Let later checks do without what has failed."""
    if fallbacks.level(mechanism) == level:
        fallbacks.descend(mechanism, reason)


def _clause(error: BaseException) -> str:
    """Return an error's first line: what follows are addresses and hints for programmers."""
    lines = str(error).replace(str(Path.home()), "~").strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _say(out: TextIO, **event: object) -> None:
    out.write(json.dumps(event) + "\n")
    out.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)
