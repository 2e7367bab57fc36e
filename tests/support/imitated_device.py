"""Controls of the imitated GPU: number of queues, and injected failures."""

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
    """Controls of the GPU that `scripts/imitated_gpu.sh` imitates.

    Args:
        library: the imitated CUDA runtime.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def set_queues(self, count: int, seed: int = 0) -> None:
        """Set the number of hardware queues, 1 to 8 (0: random), once no work is in flight."""
        if error := self._library.imitated_gpu_set_queues(count, seed):
            raise RuntimeError(f"the imitated GPU does not take {count} queues: CUDA error {error}")

    def set_timeout(self, seconds: float) -> None:
        """Set the time without runnable work after which a deadlock is reported."""
        self._library.imitated_gpu_set_timeout(ctypes.c_double(seconds))

    def fail(self, call: str, error: int, first: int = 1, times: int = 1) -> None:
        """Make later calls fail.

        Args:
            call: function name, "NAME in a capture", or "operation": the device dies in the middle of work.
            error: CUDA error code.
            first: number of the first failing call, counted from now.
            times: number of failing calls.
        """
        self._library.imitated_gpu_fail(
            call.encode(), ctypes.c_int(error), ctypes.c_long(first), ctypes.c_long(times)
        )

    def hang(self, number: int) -> None:
        """Make the `number`-th operation from now hang."""
        self._library.imitated_gpu_hang(ctypes.c_long(number))

    def delay(self, us: int) -> None:
        """Lengthen every operation by `us` microseconds."""
        self._library.imitated_gpu_delay(ctypes.c_int(us))

    @contextmanager
    def counted_calls(self) -> Iterator[Counter[str]]:
        """Count the calls that add work to a stream, by kind: a kernel's name, "copy", "graph", and so on."""
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
        """Number of calls and operations that failed or hung on request."""
        return int(self._library.imitated_gpu_num_failed())

    @property
    def num_deadlocks(self) -> int:
        """Number of deadlocks; each ended the device with a launch timeout."""
        return int(self._library.imitated_gpu_num_deadlocks())

    def recover(self) -> None:
        """Drop all injected failures and their effects, including hung work."""
        self._library.imitated_gpu_recover()


@cache
def imitated_device() -> ImitatedDevice | None:
    """Return the imitated GPU, if torch runs on it."""
    if not torch.cuda.is_available():
        return None
    try:
        library = ctypes.CDLL(RUNTIME, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    if not hasattr(library, "imitated_gpu_recover"):
        return None
    library.imitated_gpu_counted_calls.restype = ctypes.c_void_p
    return ImitatedDevice(library)


needs_imitated_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        imitated_device() is None, reason="needs the imitated GPU: run scripts/imitated_gpu.sh"
    ),
]
