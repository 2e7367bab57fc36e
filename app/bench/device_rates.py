"""A CUDA GPU's arithmetic, its memory and its way to the host, timed by the GPU's own clock."""

import math
from collections.abc import Callable
from enum import StrEnum

import torch

from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.timeline import timed_event

SAMPLE_SECONDS = 0.005  # short work is done several times in a row, until it takes so long
MOST_TIMES = 200
_MATRIX_BYTES = 4 + 2 + 2 + 2  # per element: random numbers, the same in two formats, a product


class Direction(StrEnum):
    TO_DEVICE = "to device"
    TO_HOST = "to host"


def fitting_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes whose matrices fit into a quarter of the free memory."""
    free, _ = torch.cuda.mem_get_info()
    return tuple(size for size in sizes if _MATRIX_BYTES * size**2 <= free // 4)


class CudaTimer:
    """Does work several times in a row and returns the seconds together; takes its memory at once.

    Args:
        streams: of the GPU; all calls are made inside its `on_device`.
        memory_bytes: what reads and copies go over; a quarter of the free memory at most.
        matrix_size: of the largest matrices.
        transfer_bytes: of the largest transfer; 0: there will be none.

    Raises:
        torch.OutOfMemoryError: the GPU has too little memory left.
    """

    def __init__(
        self, streams: Streams, memory_bytes: int, matrix_size: int, transfer_bytes: int = 0
    ) -> None:
        self._device = streams.device
        self.name = torch.cuda.get_device_name(self._device)
        has_bfloat16 = torch.cuda.get_device_capability(self._device) >= (8, 0)
        self.dtypes = ("float16", "bfloat16") if has_bfloat16 else ("float16",)  # multiplied at full speed
        free, _ = torch.cuda.mem_get_info(self._device)
        # Random numbers: zeros cost less power, and a GPU would show clocks that it does not reach at work.
        self._memory = torch.rand(min(memory_bytes, free // 4) // 8 * 2, device=self._device)
        self.memory_bytes = self._memory.nbytes
        self._numbers = torch.randn(matrix_size**2, device=self._device)
        self._matrices: dict[str, torch.Tensor] = {}
        self._ways = {
            way: (
                streams.stream(),
                torch.zeros(transfer_bytes, dtype=torch.uint8, device=self._device),
                torch.zeros(transfer_bytes, dtype=torch.uint8).pin_memory(),
            )
            for way in (Direction if transfer_bytes else ())
        }

    def matrix_seconds(self, size: int, dtype: str, times: int) -> float:
        """Multiply a matrix of [size, size] with itself."""
        if dtype not in self._matrices:
            self._matrices[dtype] = self._numbers.to(getattr(torch, dtype))
        matrix = self._matrices[dtype][: size * size].view(size, size)
        out = torch.empty_like(matrix)
        return self._seconds(lambda: torch.mm(matrix, matrix, out=out), times)

    def read_seconds(self, nbytes: int, times: int) -> float:
        """Add up the first `nbytes` bytes of the memory, as fp32."""
        return self._seconds(self._memory[: nbytes // 4].sum, times)

    def copy_seconds(self, nbytes: int, times: int) -> float:
        """Copy one half of `nbytes` bytes to the other half."""
        half = nbytes // 8
        source, target = self._memory[:half], self._memory[half : 2 * half]
        return self._seconds(lambda: target.copy_(source), times)

    def transfer_seconds(self, nbytes: int, ways: tuple[Direction, ...], times: int) -> float:
        """Copy `nbytes` bytes between GPU and pinned host memory; each way has a stream of its own."""
        torch.cuda.synchronize(self._device)
        start, ends = timed_event(), []
        start.record()
        for way in ways:
            self._ways[way][0].wait_event(start)
        for _ in range(times):
            for way in ways:
                stream, on_device, on_host = self._ways[way]
                source, target = (on_host, on_device) if way is Direction.TO_DEVICE else (on_device, on_host)
                with torch.cuda.stream(stream):
                    target[:nbytes].copy_(source[:nbytes], non_blocking=True)
        for way in ways:
            ends.append(timed_event())
            ends[-1].record(self._ways[way][0])
        torch.cuda.synchronize(self._device)
        return max(float(start.elapsed_time(end)) for end in ends) / 1e3

    def _seconds(self, work: Callable[[], object], times: int) -> float:
        torch.cuda.synchronize(self._device)
        start, end = timed_event(), timed_event()
        start.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class Rate:
    """Work per second: `work` is that of one piece, `seconds_of` tells the seconds of some pieces."""

    def __init__(self, seconds_of: Callable[[int], float], work: float) -> None:
        self._seconds_of, self.work = seconds_of, work
        self._times = 0  # unknown

    def seconds(self) -> float:
        """Return the seconds of one piece."""
        if self._times == 0:
            self._seconds_of(1)  # libraries are loaded and memory is taken by the first one
            once = max(self._seconds_of(1), SAMPLE_SECONDS / MOST_TIMES)
            self._times = max(1, math.ceil(SAMPLE_SECONDS / once))
        return self._seconds_of(self._times) / self._times

    def giga_per_s(self) -> float:
        return self.work / self.seconds() / 1e9


def matrix_rate(timer: CudaTimer, size: int, dtype: str) -> Rate:
    """GFLOP/s: a multiplication and an addition for each of size³."""
    return Rate(lambda times: timer.matrix_seconds(size, dtype, times), 2 * size**3)


def read_rate(timer: CudaTimer, nbytes: int) -> Rate:
    """GB/s."""
    return Rate(lambda times: timer.read_seconds(nbytes, times), nbytes)
