"""The imitated GPU's own controls: how many queues it has, and what fails on it."""

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, OUT_OF_MEMORY, NOT_SUPPORTED = 700, 702, 2, 801
ALWAYS = 1 << 30  # times
RUNTIME = "libcudart.so.13"


class ImitatedDevice:
    """What tests ask of the GPU that `scripts/imitated_gpu.sh` puts in the place of a real one.

    Args:
        library: the imitated CUDA runtime.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def set_queues(self, count: int, seed: int = 0) -> None:
        """Take so many hardware queues, 1 to 8 (0: drawn), once nothing is under way."""
        if error := self._library.imitated_gpu_set_queues(count, seed):
            raise RuntimeError(f"the imitated GPU does not take {count} queues: CUDA error {error}")

    def set_timeout(self, seconds: float) -> None:
        """Set for how long nothing may be able to run before that is told as a deadlock."""
        self._library.imitated_gpu_set_timeout(ctypes.c_double(seconds))

    def fail(self, call: str, error: int, first: int = 1, times: int = 1) -> None:
        """Let calls from now on fail.

        Args:
            call: a function's name; "NAME in a capture"; "operation": the device dies in the middle of work.
            error: CUDA's number.
            first: which call from now on is the first to fail.
            times: how many do.
        """
        self._library.imitated_gpu_fail(
            call.encode(), ctypes.c_int(error), ctypes.c_long(first), ctypes.c_long(times)
        )

    def hang(self, number: int) -> None:
        """Let the operation that is the `number`-th from now on never end."""
        self._library.imitated_gpu_hang(ctypes.c_long(number))

    def delay(self, us: int) -> None:
        """Let each operation take so much longer."""
        self._library.imitated_gpu_delay(ctypes.c_int(us))

    @contextmanager
    def counted_calls(self) -> Iterator[Counter[str]]:
        """Count the calls that put something on a stream, by what that is: a kernel, "copy", "graph".."""
        calls = Counter[str]()
        self._library.imitated_gpu_count_calls()
        try:
            yield calls
        finally:
            counted = ctypes.string_at(self._library.imitated_gpu_counted_calls()).decode()
            for line in counted.splitlines():
                count, _, name = line.partition(" ")
                calls[name] = int(count)

    @property
    def num_failed(self) -> int:
        """How many calls and operations failed or hung as they were asked to."""
        return int(self._library.imitated_gpu_num_failed())

    @property
    def num_deadlocks(self) -> int:
        """How many deadlocks were found; each ended the device with a launch timeout."""
        return int(self._library.imitated_gpu_num_deadlocks())

    def recover(self) -> None:
        """Forget all that was asked for and all that came of it; what hangs is dropped."""
        self._library.imitated_gpu_recover()


@cache
def imitated_device() -> ImitatedDevice | None:
    """Return the imitated GPU, if torch computes on it."""
    if not torch.cuda.is_available():
        return None
    try:
        library = ctypes.CDLL(RUNTIME, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    library.imitated_gpu_counted_calls.restype = ctypes.c_void_p
    return ImitatedDevice(library) if hasattr(library, "imitated_gpu_recover") else None


needs_imitated_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        imitated_device() is None, reason="needs the imitated GPU: run scripts/imitated_gpu.sh"
    ),
]
