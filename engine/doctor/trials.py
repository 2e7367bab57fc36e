"""Checks in a child process: if one hangs or crashes, it is recorded, and the next one follows.

    parent                                        child: engine.selfcheck
    ──────                                        ────────────────────
    {"subject": …, "done": […], …}  ── stdin ───→ the request, and the finished checks
    deadline of the start           ←─ stdout ──  {"event": "begin", "check": {"name": …, "deadline_s": …, …}}
    deadline of the check           ←─ stdout ──  {"event": "end", "result": …, "figures": {…}, "error": …}
    deadline of the repetition      ←─ stdout ──  {"event": "again", …}: repeats a check that others need
    …                               ←─ stdout ──  {"event": "done"}
    (end of this process)           ── end of stdin → ends

A child that misses a deadline is killed, and a new one continues with the remaining checks.
"""

import contextlib
import json
import logging
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from neo_desktop.engine.doctor.outcome import Announcement, Outcome, Result, limits_of
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


_START = Announcement("start", "Start of the checks", None, None, START_DEADLINE_S)


def run_selfchecks(
    subject: Subject,
    *,
    listener: Listener | None = None,
    child: Sequence[str] = CHILD,
) -> list[Outcome]:
    """Run all checks; return their outcomes in order.

    Args:
        listener: called when a check starts and when it ends.
        child: the command of the child process.
    """
    listener = listener or (lambda title, outcome: None)
    outcomes: list[Outcome] = []
    deaths = 0
    while True:
        request = {
            "subject": asdict(subject),
            "done": [outcome.name for outcome in outcomes],
            "limits": {limit.mechanism: limit.level for limit in limits_of(outcomes)},
        }
        with _Child(child, request) as running:
            lost = _follow(running, outcomes, listener)
        if lost is None:
            return outcomes
        if lost.name == _START.name and lost.result is Result.CRASHED and outcomes and deaths < MOST_DEATHS:
            deaths += 1  # earlier checks may have corrupted state: a new child starts clean
            continue
        outcomes.append(lost)
        listener(lost.title, lost)
        if lost.name == _START.name:
            return outcomes


def _follow(running: "_Child", outcomes: list[Outcome], listener: Listener) -> Outcome | None:
    """Collect outcomes from a child; return the outcome that ended it, or None if it finished."""
    under_way = _START
    while True:
        try:
            event = running.event(under_way.deadline_s)
        except TimeoutError:
            seconds = f"{under_way.deadline_s:g}"
            return under_way.outcome(Result.HUNG, f"it had not finished after {seconds} s", {})
        match event:
            case None:
                return under_way.outcome(Result.CRASHED, f"it ended its process: {running.death()}", {})
            case {"event": "begin", "check": dict(check)}:
                under_way = Announcement(**check)
                listener(under_way.title, None)
            case {"event": "again", "deadline_s": float(deadline_s)}:
                under_way = replace(_START, deadline_s=deadline_s)
            case {"event": "end", "result": str(result), "figures": dict(figures), "error": error}:
                outcomes.append(under_way.outcome(Result(result), error, figures))
                listener(under_way.title, outcomes[-1])
                under_way = replace(_START, deadline_s=END_DEADLINE_S)
            case {"event": "failed", "error": str(error)}:  # before any check
                return under_way.outcome(Result.FAILED, error, {})
            case {"event": "done"}:
                return None


class _Child:
    """A process that runs checks."""

    def __init__(self, command: Sequence[str], request: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=work, name="neo-desktop-doctor", daemon=True)
            for work in (self._read, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died already, and its exit is reported
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the driver for good
            self._process.wait(END_DEADLINE_S)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def event(self, timeout_s: float) -> Mapping[str, Any] | None:
        """Return the next event; None if the child has died.

        Raises:
            TimeoutError: no event in time.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return None
        event: Mapping[str, Any] = json.loads(line)
        return event

    def death(self) -> str:
        """Describe the child's death."""
        try:
            code = self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        if code >= 0:
            return f"exit code {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                logger.debug("check: %s", line.decode(errors="replace").rstrip())
