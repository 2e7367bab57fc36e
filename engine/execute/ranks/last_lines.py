"""The last stderr lines of a process, for the message about its end."""

import contextlib
import sys
import threading
from collections import deque
from typing import IO

MOST_LINES = 40
MOST_CHARACTERS = 400  # per line
TIMEOUT_S = 2.0  # timeout for the end of the pipe after the process has ended


class LastLines:
    """A forwarder of a process's stderr that keeps the last lines.

    Args:
        pipe: Pipe of the process's stderr; the reading thread closes it at its end.
        name: Name of the reading thread.
    """

    def __init__(self, pipe: IO[bytes], name: str) -> None:
        self._pipe = pipe
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the last lines of an ended process; empty if it wrote nothing."""
        self._thread.join(TIMEOUT_S)
        return "\n".join(tuple(self._lines))

    def _read(self) -> None:
        with self._pipe:
            while line := self._pipe.readline(MOST_CHARACTERS):
                text = line.decode(errors="replace")
                self._lines.append(text.rstrip("\n"))
                with contextlib.suppress(OSError, ValueError):  # this process has no stderr
                    sys.stderr.write(text)
