"""Values on a pipe between this program and a child of its own: the length of each, then itself, pickled.

Nobody else can reach such a pipe, so that what comes out of it may be unpickled: it has no name and no port,
and no other process inherits it.
"""

import os
import pickle
import struct
import threading
from collections.abc import Iterator
from typing import IO, Any, BinaryIO

_HEAD = struct.Struct("<Q")


class FrameWriter:
    """Writes values; any thread may."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def put(self, value: object) -> None:
        """Write one value.

        Raises:
            OSError: nobody reads any more.
        """
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._stream.write(_HEAD.pack(len(data)) + data)
            self._stream.flush()


def read_frames(stream: IO[bytes]) -> Iterator[Any]:
    """Yield values until the other side is gone; one that it had begun to write is left out."""
    while len(head := stream.read(_HEAD.size)) == _HEAD.size:
        (size,) = _HEAD.unpack(head)
        data = stream.read(size)
        if len(data) < size:
            return
        yield pickle.loads(data)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take stdin and stdout for such values alone; children and what prints get something else."""
    values_in, values_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # there is no stderr
        os.dup2(nothing, 1)
    return values_in, values_out
