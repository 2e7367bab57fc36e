"""The device that the model runs on, by itself: its read rate and its matrix rate."""

from typing import Protocol

import psutil
import torch

from neo_desktop import native
from neo_desktop.app.bench.hardware.device import CudaTimer, matrix_rate, read_rate
from neo_desktop.app.bench.hardware.host import Host
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.profiling.hardware import cpu_name

_MOST_BYTES = 1 << 30  # beyond any cache: more would only take longer
_SAMPLE_BYTES = 256 << 20  # on a CPU: fewer are read several times in a row
_MATRIX_SIZE = {"cpu": 1024, "cuda": 4096}


class Processor(Protocol):
    """What limits the model."""

    @property
    def name(self) -> str:
        """For people."""

    def read_gb_per_s(self, nbytes: int) -> float:
        """Plain reads of so many bytes, again and again; a gigabyte at most.

        What fits into a cache is read from there, as an iteration's weights would be.
        """

    def matrix_gflop_per_s(self) -> float:
        """Products of large square matrices in the model's dtype."""


class Cpu:
    """All usable cores."""

    def __init__(self, nbytes: int, dtype: str) -> None:
        available = psutil.virtual_memory().available
        self._host = Host(max(min(nbytes, _MOST_BYTES, available // 4), 1))
        self._dtype = dtype
        self.name = cpu_name()

    def read_gb_per_s(self, nbytes: int) -> float:
        """See `Processor`."""
        nbytes = min(nbytes, self._host.nbytes)
        times = max(1, _SAMPLE_BYTES // nbytes)
        threads = native.default_num_threads()
        self._host.read_gb_per_s(threads, nbytes)  # into the cache, if it fits
        seconds = sum(nbytes / self._host.read_gb_per_s(threads, nbytes) for _ in range(times))
        return times * nbytes / seconds

    def matrix_gflop_per_s(self) -> float:
        """See `Processor`."""
        return self._host.matrix_gflop_per_s(_MATRIX_SIZE["cpu"], self._dtype)


class CudaGpu:
    """The GPU that torch uses."""

    def __init__(self, streams: Streams, nbytes: int, dtype: str) -> None:
        self._timer = CudaTimer(streams, min(nbytes, _MOST_BYTES), _MATRIX_SIZE["cuda"])
        self._matrix = matrix_rate(self._timer, _MATRIX_SIZE["cuda"], dtype).giga_per_s
        self.name = self._timer.name

    def read_gb_per_s(self, nbytes: int) -> float:
        """See `Processor`."""
        return read_rate(self._timer, min(nbytes, self._timer.memory_bytes)).giga_per_s()

    def matrix_gflop_per_s(self) -> float:
        """See `Processor`."""
        return self._matrix()


def processor(streams: Streams, nbytes: int, dtype: torch.dtype) -> Processor:
    """Take the memory for reads of up to `nbytes`."""
    name = str(dtype).removeprefix("torch.")
    return CudaGpu(streams, nbytes, name) if streams.device.type == "cuda" else Cpu(nbytes, name)
