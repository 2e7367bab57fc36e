"""The self-test, as the page starts it: `neo-desktop bench` in a process of its own, and earlier reports.

    <data folder>/selftest/2026-11-22-201500/report.html, report.json

A process of its own measures what a user would: no other threads, no memory of this one. A model that is
loaded is unloaded first, since it would take memory from what is measured; the next request brings it back.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from neo_desktop.app.bench.options import Suite
from neo_desktop.app.news import SELFTEST, News
from neo_desktop.app.shelf.hosting import ModelHost

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "neo_desktop.app.entry")
MAX_REPORTS = 10  # older ones are deleted when a new one begins
SUITES = tuple(Suite)
STOP_TIMEOUT_S = 20.0  # the suite that runs ends with what it has
TOLD_LINES = 6  # of what a run that failed said last
LINE_BYTES = 1 << 20


class SelfTestError(RuntimeError):
    """A run that cannot begin; the message says why."""


@dataclass(frozen=True, slots=True)
class Run:
    report: str  # the name of its folder
    suites: tuple[str, ...]
    share: float = 0.0  # done, 0 to 1
    what: str = "Starting"  # is being measured
    is_stopping: bool = False


class SelfTest:
    """One run at a time, and what earlier ones found. Belongs to the event loop."""

    def __init__(
        self, news: News, host: ModelHost, folder: Path, command: Sequence[str] | None = None
    ) -> None:
        self._news = news
        self._host = host
        self._folder = folder
        self.running: Run | None = None
        self.error: str | None = None  # why the last run has no report
        self._command = command or PROGRAM
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def reports(self) -> list[str]:
        """Return the names of the finished reports, the newest first."""
        return [folder.name for folder in _reports(self._folder)]

    def page(self, name: str) -> Path | None:
        pages = (folder / "report.html" for folder in _reports(self._folder) if folder.name == name)
        return next(pages, None)

    def start(self, suites: Sequence[str] = SUITES) -> None:
        """Begin a run, once the host's model has given its memory back; SelfTestError: it cannot begin."""
        host = self._host
        if host.loading is not None:
            raise SelfTestError(f"{host.loading.name} is being loaded: wait for it, or stop that first")
        if host.has_weights and host.service.idle_since_s is None:
            raise SelfTestError("an answer is being written: wait for it, or stop it first")
        if self.running is not None:
            raise SelfTestError("a self-test is running: stop it, or wait for it")
        if unknown := [suite for suite in suites if suite not in SUITES]:
            raise SelfTestError(f"no suite is called {unknown[0]!r}: choose from {', '.join(SUITES)}")
        chosen = tuple(suite for suite in SUITES if not suites or suite in suites)
        self.error = None
        self.running = Run(f"{datetime.now():%Y-%m-%d-%H%M%S}", chosen)
        self._task = asyncio.create_task(self._run(self.running))
        self._news.tell(SELFTEST)

    async def stop(self) -> None:
        """End the run; what was measured until then is in its report."""
        process, task = self._process, self._task
        if self.running is None or task is None:
            return
        self._set(is_stopping=True, what="Ending with what was measured")
        if process is None:
            task.cancel()
        else:
            _signal(process, signal.SIGINT)
        done, _ = await asyncio.wait([task], timeout=STOP_TIMEOUT_S)
        if not done and process is not None:
            _signal(process, signal.SIGKILL)
            await asyncio.wait([task])

    async def close(self) -> None:
        """End the run at once: the server ends."""
        if self._process is not None:
            _signal(self._process, signal.SIGKILL)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self, run: Run) -> None:
        folder = self._folder / run.report
        try:
            await self._host.rest()
            await asyncio.to_thread(_make_room, self._folder)
            lines = await self._child(run, folder)
            if not (folder / "report.html").is_file() and not (self.running and self.running.is_stopping):
                said = " ".join(lines) or "it said nothing"
                self.error = f"The self-test ended without a report. It said last: {said}"
        except asyncio.CancelledError:
            if not (self.running and self.running.is_stopping):
                raise
        except OSError as error:
            self.error = f"The self-test could not be run: {error}"
        finally:
            self.running = self._process = self._task = None
            self._news.tell(SELFTEST)

    async def _child(self, run: Run, folder: Path) -> list[str]:
        """Run the bench; return its last lines."""
        chosen = () if run.suites == SUITES else run.suites
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            *("bench", "--progress-json", "--out", str(folder)),
            *(word for suite in chosen for word in ("--suite", suite)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is the server's
            limit=LINE_BYTES,
            env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
        )
        last: deque[str] = deque(maxlen=TOLD_LINES)
        assert process.stderr is not None
        try:
            with contextlib.suppress(ValueError):  # a line without end
                async for line in process.stderr:
                    text = line.decode(errors="replace").strip()
                    try:
                        step = json.loads(text)
                        share = min(max(float(step["share"]), 0.0), 1.0)
                        self._set(share=share, what=str(step["what"])[:200])
                    except (ValueError, KeyError, TypeError):
                        last.append(text)
            await process.wait()
        finally:
            _signal(process, signal.SIGKILL)
            await process.wait()
        return [line for line in last if line]

    def _set(self, **changes: Any) -> None:
        if self.running is None:
            return
        if self.running.is_stopping:
            changes.pop("what", None)
        now = replace(self.running, **changes)
        if now != self.running:
            self.running = now
            self._news.tell(SELFTEST)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to a process that has not ended, and to all that it started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _make_room(folder: Path) -> None:
    for old in _reports(folder)[MAX_REPORTS - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def _reports(folder: Path) -> list[Path]:
    """Return the folders of finished reports, newest first."""
    return sorted((page.parent for page in folder.glob("*/report.html")), reverse=True)
