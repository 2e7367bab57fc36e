"""What a process has written to stderr last, for the message that tells how it ended."""

import contextlib
import sys
import threading
from collections import deque
from typing import IO

MOST_LINES = 40
MOST_CHARACTERS = 400  # of a line
TIMEOUT_S = 2.0  # with the end of the pipe, once the process has ended


class LastLines:
    """Passes on what a process writes, and keeps the end of it.

    Args:
        pipe: of its stderr, which is closed at its end.
        name: of the thread that reads.
    """

    def __init__(self, pipe: IO[bytes], name: str) -> None:
        self._pipe = pipe
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the last lines of a process that has ended; empty: it wrote nothing."""
        self._thread.join(TIMEOUT_S)
        return "\n".join(tuple(self._lines))

    def _read(self) -> None:
        with self._pipe:
            while line := self._pipe.readline(MOST_CHARACTERS):
                text = line.decode(errors="replace")
                self._lines.append(text.rstrip("\n"))
                with contextlib.suppress(OSError, ValueError):  # there is no stderr
                    sys.stderr.write(text)
