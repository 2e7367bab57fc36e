"""Files that are read from their beginning to their end, faster than they are touched."""

import os
from pathlib import Path

READ_AHEAD_BYTES = 256 << 20
_ASKED_BYTES = 8 << 20  # in one call


class ReadAhead:
    """Has the system read what comes next in a file, while somebody works on what was read.

    What is mapped is otherwise read when it is touched, and the disk waits in between. Systems without
    `posix_fadvise` read ahead as they see fit.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked = 0  # up to which byte

    def at(self, position: int) -> None:
        """Tell where in the file somebody works now: it moves forward."""
        end = min(position + READ_AHEAD_BYTES, self._path.stat().st_size)
        if self._asked >= end or not hasattr(os, "posix_fadvise"):
            return
        with self._path.open("rb") as file:
            for first in range(max(self._asked, position), end, _ASKED_BYTES):
                os.posix_fadvise(file.fileno(), first, _ASKED_BYTES, os.POSIX_FADV_WILLNEED)
                self._asked = first + _ASKED_BYTES
