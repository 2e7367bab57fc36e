"""An engine in a process of its own: its crash, its hang or a lost device is not this program's end.

    this process                                     child: child.py
    ────────────                                     ───────────────
    Beginning, the maker of the engine ─── stdin ──→ loads.
    commands, by a thread of their own ─── stdin ──→ EngineLoop.
    events, log messages ←──────────────── stdout ── (read here by a thread).
    the end of this process ─── the end of stdin ──→ ends.
    Ended ←─── the end of stdout, and exit status ── ended, however that came about

The parent never asks CUDA for memory: what the GPU holds of a model ends with the child.
"""

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import Any, Self

from neo_desktop.app.engines import messages as msg
from neo_desktop.app.engines.child import Beginning
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.frames import FrameWriter, read_frames
from neo_desktop.engine.progress import Progress

logger = logging.getLogger(__name__)

POLL_S = 0.25  # how often, while loading, it is asked whether the model is still wanted
LOAD_TIMEOUT_S = 900.0  # the longest step of loading that says nothing
# More than any iteration takes. On a GPU the engine itself gives up earlier where it can; on a CPU a chunk of
# a large model's prompt takes minutes.
TIMEOUT_S = {"cuda": 300.0, "cpu": 3600.0}
CLOSE_S = 30.0  # for a trace of a long run to be written
EXIT_S = 2.0  # from the end of the pipe to the end of the process
_CRASHES = ("SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT")
_PROGRAM = "from neo_desktop.app.engines.child import main; main()"


class EngineProcess:
    """A way to an engine that works in a process, made by `load`."""

    is_process = True  # it can be ended at any time and started anew
    facts: msg.EngineFacts

    def __init__(self, make: msg.EngineMaker) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],  # nothing is imported from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which tells the child
        )
        self.pid = self._process.pid
        self._kill_reason: str | None = None
        self._is_over = threading.Event()  # the loop in the child has ended
        self._lock = threading.Lock()
        self._early: queue.SimpleQueue[Any] = queue.SimpleQueue()  # what came before `start`
        self._receive: msg.Receiver | None = None
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        level = logging.getLogger().getEffectiveLevel()
        limits = [
            (each.mechanism.name, each.level.name, each.reason) for each in fallbacks.states() if each.reason
        ]
        self._commands.put(Beginning(list(sys.path), level, limits))
        self._commands.put(make)
        self._threads = [
            threading.Thread(target=target, name=f"engine's {name}", daemon=True)
            for target, name in ((self._write, "commands"), (self._read, "events"))
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def load(cls, make: msg.EngineMaker, progress: Progress) -> Self:
        """Start a process and let it make the engine there; called by a thread that may wait.

        `progress` may raise, which ends the process. Raises what `make` raises; RuntimeError: the process
        ended or hung.
        """
        process = cls(make)
        try:
            process._wait_until_loaded(progress)
        except BaseException:
            process.kill("it is not wanted any more")
            raise
        return process

    @property
    def timeout_s(self) -> float | None:
        """Seconds of silence with work until it counts as hung; None: no limit."""
        return TIMEOUT_S[self.facts.stats.device]

    def start(self, receive: msg.Receiver) -> None:
        """Begin to work; events go to `receive`, `Ended` being the last one."""
        with self._lock:
            while not self._early.empty():
                receive([self._early.get()])
            self._receive = receive

    def send(self, command: msg.Command) -> None:
        """Have a command carried out, between two iterations; does nothing once the engine has ended."""
        self._commands.put(command)

    def kill(self, reason: str) -> None:
        """End the process at once with this reason."""
        self._kill_reason = self._kill_reason or reason
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it ends just now
                os.killpg(self.pid, signal.SIGKILL)  # its group, with all that it started

    def close(self) -> None:
        """Free weights and caches after `Stop`."""
        self.send(msg.Stop())
        try:
            self._process.wait(CLOSE_S if self._is_over.is_set() else EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill("it did not end when it was told to")
        self._threads[1].join()

    def _wait_until_loaded(self, progress: Progress) -> None:
        now, num_silent = msg.Progressed(0.0, "Starting the engine"), 0
        while num_silent * POLL_S < LOAD_TIMEOUT_S:
            try:
                event = self._early.get(timeout=POLL_S)
                num_silent = 0
            except queue.Empty:
                event = now
                num_silent += 1
            match event:
                case msg.Progressed():
                    now = event
                    progress(event.share, event.what)
                case msg.EngineFacts():
                    self.facts = event
                    return
                case Exception():
                    raise event
                case msg.Ended(reason, crash):
                    reason = reason or "the engine ended while the model was loaded"
                    if crash is not None:
                        advice = "neo-desktop doctor --refresh finds what fails here, and starts avoid it"
                        raise msg.EngineCrashError(f"{reason}; {advice}", crash, now.what)
                    raise RuntimeError(reason)
        reason = f"nothing went on for {LOAD_TIMEOUT_S:g} s while it said: {now.what}"
        self.kill(reason)
        raise RuntimeError(reason)

    # From here on: the two threads.

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        writer = FrameWriter(stdin)
        try:
            while (value := self._commands.get()) is not None:
                writer.put(value)
        except OSError:  # it has ended, which the other thread tells
            pass
        except Exception:
            logger.exception("a command could not be sent to the engine's process")
            self.kill("the engine's process could not be told what to do")
        with contextlib.suppress(OSError):
            stdin.close()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            for message in read_frames(stdout):
                self._take(message)
        except Exception:  # a defect: what comes from there is the program's own
            logger.exception("what the engine's process said could not be read")
            self.kill("what the engine's process said could not be read")
        try:
            status = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill("the engine's process closed its pipe and went on")
            status = self._process.wait()
        stdout.close()
        self._commands.put(None)
        if not self._is_over.is_set():
            self._is_over.set()
            reason = self._kill_reason
            self._pass_on(what_ended(status) if reason is None else msg.Ended(reason))

    def _take(self, message: Any) -> None:
        if isinstance(message, logging.LogRecord):
            if (target := logging.getLogger(message.name)).isEnabledFor(message.levelno):
                target.handle(message)
        elif isinstance(message, list):
            if isinstance(message[-1], msg.Ended):
                self._is_over.set()
            self._pass_on(*message)
        else:
            self._pass_on(message)

    def _pass_on(self, *events: Any) -> None:
        with self._lock:
            if self._receive is not None:
                self._receive(events)
                return
            for event in events:
                self._early.put(event)


def what_ended(status: int) -> msg.Ended:
    """Say how a process ended, by its exit status; a negative one is a signal."""
    if status >= 0:
        return msg.Ended(f"the engine's process ended (exit status {status})")
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    if name == "SIGKILL":
        return msg.Ended(
            "the engine's process was killed (SIGKILL: by a person, or by the system for want of memory)"
        )
    return msg.Ended(f"the engine's process crashed ({name})", name if name in _CRASHES else None)
