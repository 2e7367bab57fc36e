"""Read-ahead for files that are read from start to end."""

import os
from pathlib import Path

READ_AHEAD_BYTES = 256 << 20
_ASKED_BYTES = 8 << 20  # bytes per call


class ReadAhead:
    """Asks the system to read a file's next bytes while the caller works on the previous ones.

    Without it, mapped pages are read on first access, and the disk idles in between. Systems without
    `posix_fadvise` use their own read-ahead.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked = 0  # end of the requested bytes

    def at(self, position: int) -> None:
        """Set the position of the reader, which moves forward."""
        end = min(position + READ_AHEAD_BYTES, self._path.stat().st_size)
        if self._asked >= end or not hasattr(os, "posix_fadvise"):
            return
        with self._path.open("rb") as file:
            for first in range(max(self._asked, position), end, _ASKED_BYTES):
                os.posix_fadvise(file.fileno(), first, _ASKED_BYTES, os.POSIX_FADV_WILLNEED)
                self._asked = first + _ASKED_BYTES
