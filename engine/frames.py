"""Values on a pipe to a child process: length, then the pickled value.

Unpickling is safe because no other process can reach the pipe: it has no name and no port, and no other
process inherits it.
"""

import os
import pickle
import struct
import threading
from collections.abc import Iterator
from typing import IO, Any, BinaryIO

_HEAD = struct.Struct("<Q")


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
