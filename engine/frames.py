"""Child processes that exchange values with this one through their stdin and stdout.

On a pipe, a value is its length, then its pickle. Unpickling is safe because no other process can reach the
pipe: it has no name and no port, and no other process inherits it.
"""

import contextlib
import os
import pickle
import queue
import struct
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, BinaryIO

_HEAD = struct.Struct("<Q")
EXIT_S = 5.0  # from the end of a pipe to the end of its process
LINES_S = 2.0  # from the end of a process to the end of its stderr
MOST_LINES, MOST_CHARACTERS = 40, 400  # of stderr; characters per line


class FrameWriter:
    """Writes values; thread-safe."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def put(self, value: object) -> None:
        """Write one value.

        Raises:
            OSError: the reader is gone.
        """
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._stream.write(_HEAD.pack(len(data)) + data)
            self._stream.flush()


def read_frames(stream: IO[bytes]) -> Iterator[Any]:
    """Yield values until the writer is gone; an incomplete value is dropped."""
    while len(head := stream.read(_HEAD.size)) == _HEAD.size:
        (size,) = _HEAD.unpack(head)
        data = stream.read(size)
        if len(data) < size:
            return
        yield pickle.loads(data)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Reserve stdin and stdout for values; child processes and prints get replacements."""
    values_in, values_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # no stderr
        os.dup2(nothing, 1)
    return values_in, values_out


class ChildProcess:
    """A child process, whose values and lines on stderr threads of this process read.

    Args:
        command: starts a program that calls `take_pipes`.
        first: the first value for it.
        tell: called with each line of its stderr.
        environment: environment variables; None: those of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        first: object,
        tell: Callable[[str], object],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
        assert self._process.stdin is not None
        self._writer = FrameWriter(self._process.stdin)
        self._values: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failure: Exception | None = None  # the error that it sent
        self._tell = tell
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._alarm: Callable[[], object] = bool  # no callback yet
        self._readers = [
            threading.Thread(target=read, name=f"{read.__name__} of process {self.pid}", daemon=True)
            for read in (self._read, self._read_lines)
        ]
        for reader in self._readers:
            reader.start()
        self.send(first)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, value: object) -> None:
        """Send a value; ignore errors if the process has ended."""
        with contextlib.suppress(OSError, ValueError):
            self._writer.put(value)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next value; None: the process has ended.

        Args:
            timeout_s: None: wait until the process ends.

        Raises:
            TimeoutError: no value came in time.
            Exception: the process failed with this error.
        """
        try:
            value = self._values.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if self.failure is not None:
            raise self.failure
        return value

    def status(self, timeout_s: float = 0.0) -> int | None:
        """Return the exit status, negative for a signal; None: it did not end within the timeout."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def last_lines(self) -> str:
        """Return the last lines of an ended process; empty if it wrote nothing."""
        self._readers[1].join(LINES_S)
        return "\n".join(tuple(self._lines))

    def watch(self, alarm: Callable[[], object]) -> None:
        """Call `alarm` after the process has ended."""
        self._alarm = alarm
        if self.status() is not None:
            alarm()

    def end(self) -> None:
        self._process.kill()
        self.status(EXIT_S)  # it may hang in a driver for good
        with contextlib.suppress(OSError):  # unwritten data is lost
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for value in read_frames(stdout):
                if isinstance(value, Exception):
                    self.failure = value
                self._values.put(value)
        self.status(EXIT_S)  # the pipe ends slightly before the process
        self._values.put(None)
        self._alarm()

    def _read_lines(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            while line := stderr.readline(MOST_CHARACTERS):
                text = line.decode(errors="replace")
                self._lines.append(text.rstrip("\n"))
                with contextlib.suppress(OSError, ValueError):  # this process has no stderr
                    self._tell(text)
