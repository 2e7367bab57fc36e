"""The process of another rank, as rank 0 sees it."""

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

EXIT_S = 5.0  # from an error of a rank to the end of its process
_PROGRAM = "from neo_desktop.engine.follower import main; main()"


class RankLostError(EngineLostError):
    """A process of another rank is gone, or does not answer: the model is not whole any more."""


class RankProcess:
    """The process of another rank.

    Args:
        beginning: what it is told first.
        environment: its variables.
    """

    def __init__(self, beginning: Beginning, environment: Mapping[str, str]) -> None:
        self.rank = beginning.rank
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],  # nothing is imported from the current folder
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
        self._alarm: Callable[[], object] = bool  # nobody wants to know
        threading.Thread(target=self._read, name=f"rank {self.rank.number}", daemon=True).start()
        self.send(beginning)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, message: object) -> None:
        """Tell it something; one that has ended is told nothing."""
        with contextlib.suppress(OSError, ValueError):
            self._writer.put(message)

    def answer(self, kind: type[T], timeout_s: float | None = None) -> T:
        """Wait for what it says next.

        Args:
            timeout_s: None: as long as it lives.

        Raises:
            RankLostError: it has ended, or is late.
            what it has failed with, while it is set up.
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
        """Say how it ended; None: it has not, within the timeout."""
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
        """Whether a signal ended it, or an error of its own: others end because of that."""
        return self._failed is not None or (self._process.poll() or 0) < 0

    def log_last_lines(self) -> None:
        """Tell what it wrote last, after its end."""
        if text := self._said.text():
            logger.error("what process %d wrote last:\n%s", self.pid, text)

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # of what was not written
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
        self.what_ended(EXIT_S)  # its pipe ends a moment before it does
        self._messages.put(None)
        self._alarm()

    def watch(self, alarm: Callable[[], object]) -> None:
        """Have something called when it has ended."""
        self._alarm = alarm
        if self.what_ended() is not None:
            alarm()

    def __str__(self) -> str:
        return f"process {self.pid}, which has part {self.rank.number + 1} of the model,"
