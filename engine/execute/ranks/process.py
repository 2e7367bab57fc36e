"""Rank 0's handle of another rank's process."""

import contextlib
import logging
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from neo_desktop.engine.cuda.errors import EngineLostError
from neo_desktop.engine.execute.ranks.last_lines import LastLines
from neo_desktop.engine.execute.ranks.messages import Beginning, Failed
from neo_desktop.engine.frames import FrameWriter, read_frames

logger = logging.getLogger(__name__)
T = TypeVar("T")

EXIT_S = 5.0  # timeout for a process's end after an error
_PROGRAM = "from neo_desktop.engine.follower import main; main()"


class RankLostError(EngineLostError):
    """Another rank's process has ended or does not answer, so a part of the model is missing."""


class RankProcess:
    """The process of another rank.

    Args:
        beginning: The first message to the rank.
        environment: Environment variables of the process.
    """

    def __init__(self, beginning: Beginning, environment: Mapping[str, str]) -> None:
        self.rank = beginning.rank
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],  # -P: import nothing from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self._said = LastLines(self._process.stderr, f"stderr of rank {self.rank.number}")
        self._writer = FrameWriter(self._process.stdin)
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._failed: Exception | None = None
        self._alarm: Callable[[], object] = bool  # no callback yet
        threading.Thread(target=self._read, name=f"rank {self.rank.number}", daemon=True).start()
        self.send(beginning)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> None:
        """Send a message; ignore errors if the process has ended."""
        with contextlib.suppress(OSError, ValueError):
            self._writer.put(message)

    def answer(self, kind: type[T], timeout_s: float | None = None) -> T:
        """Wait for the next message.

        Args:
            timeout_s: None: wait until the process ends.

        Raises:
            RankLostError: The process has ended or timed out.
            Exception: The process failed during set-up, with this error.
        """
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            raise RankLostError(f"{self} did not answer within {timeout_s:g} s") from None
        if self._failed is not None:
            raise self._failed
        if not isinstance(message, kind):
            raise RankLostError(f"{self} {self.what_ended() or f'said {message}'}")
        return message

    def what_ended(self, timeout_s: float = 0.0) -> str | None:
        """Describe the end of the process; None: it did not end within the timeout."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if self._failed is not None:
            return f"failed: {self._failed}"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-status).name}"
        return f"ended (exit status {status})"

    @property
    def is_cause(self) -> bool:
        """True if a signal or its own error ended the process, which then made the others end."""
        return self._failed is not None or (self._process.poll() or 0) < 0

    def log_last_lines(self) -> None:
        """Log the ended process's last lines."""
        if text := self._said.text():
            logger.error("last output of process %d:\n%s", self.pid, text)

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # unwritten data is lost
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for message in read_frames(stdout):
                if isinstance(message, Failed):
                    self._failed = message.error
                self._messages.put(message)
        self.what_ended(EXIT_S)  # the pipe ends slightly before the process
        self._messages.put(None)
        self._alarm()

    def watch(self, alarm: Callable[[], object]) -> None:
        """Call `alarm` after the process has ended."""
        self._alarm = alarm
        if self.what_ended() is not None:
            alarm()

    def __str__(self) -> str:
        return f"process {self.pid}, which has part {self.rank.number + 1} of the model,"
