"""A GPU's arithmetic, its memory and its way to the host: which work, how often, and what it comes to."""

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from neo_desktop.app.bench.hardware.rounds import Case

SAMPLE_SECONDS = 0.005  # short work is done several times in a row, until it takes so long
MOST_TIMES = 200


class Way(StrEnum):
    """A direction over the bus."""

    TO_DEVICE = "to device"
    TO_HOST = "to host"


BOTH = (Way.TO_DEVICE, Way.TO_HOST)


class GpuTimer(Protocol):
    """Does work several times in a row and returns the seconds that all of it took, by the GPU's clock."""

    @property
    def name(self) -> str:
        """Of the GPU."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Number formats of 16 bits that it multiplies at full speed."""

    @property
    def memory_bytes(self) -> int:
        """Memory that reads and copies go over."""

    def matrix_seconds(self, size: int, dtype: str, times: int) -> float:
        """Multiply two matrices of [size, size]."""

    def read_seconds(self, nbytes: int, times: int) -> float:
        """Read the first so many bytes of the memory."""

    def copy_seconds(self, nbytes: int, times: int) -> float:
        """Copy half of so many bytes to the other half."""

    def transfer_seconds(self, nbytes: int, ways: tuple[Way, ...], times: int) -> float:
        """Copy so many bytes between GPU and pinned host memory, each way; several ways at once."""


class Repeated:
    """Seconds of one piece of work, done as often in a row as the clock needs."""

    def __init__(self, seconds_of: Callable[[int], float]) -> None:
        self._seconds_of = seconds_of
        self._times = 0  # unknown

    def __call__(self) -> float:
        """Seconds of one."""
        if self._times == 0:
            self._seconds_of(1)  # libraries are loaded and memory is taken by the first one
            once = max(self._seconds_of(1), SAMPLE_SECONDS / MOST_TIMES)
            self._times = max(1, math.ceil(SAMPLE_SECONDS / once))
        return self._seconds_of(self._times) / self._times


def gpu_cases(
    timer: GpuTimer, matrix_sizes: tuple[int, ...], transfer_bytes: tuple[int, ...]
) -> dict[Case, Callable[[], float]]:
    """Every measurement on the GPU: GFLOP/s of matrix products, GB/s in its memory, us of transfers."""
    cases: dict[Case, Callable[[], float]] = {}
    for dtype in timer.dtypes:
        for size in matrix_sizes:
            cases[Case("GPU matrix products", size, dtype)] = matrix_rate(timer, size, dtype)
    cases[Case("GPU reads", timer.memory_bytes)] = read_rate(timer, timer.memory_bytes)
    cases[Case("GPU copies", timer.memory_bytes)] = _copy_rate(timer)
    for nbytes in transfer_bytes:
        for name, ways in (*((str(way), (way,)) for way in Way), ("both ways", BOTH)):
            cases[Case(f"transfers {name}", nbytes)] = _transfer_us(timer, nbytes, ways)
    return cases


def matrix_rate(timer: GpuTimer, size: int, dtype: str) -> Callable[[], float]:
    """GFLOP/s: a multiplication and an addition for each of size³."""
    repeated = Repeated(lambda times: timer.matrix_seconds(size, dtype, times))
    return lambda: 2 * size**3 / repeated() / 1e9


def read_rate(timer: GpuTimer, nbytes: int) -> Callable[[], float]:
    """GB/s."""
    repeated = Repeated(lambda times: timer.read_seconds(nbytes, times))
    return lambda: nbytes / repeated() / 1e9


def _copy_rate(timer: GpuTimer) -> Callable[[], float]:
    """GB/s: half of the memory is read, half is written."""
    nbytes = timer.memory_bytes
    repeated = Repeated(lambda times: timer.copy_seconds(nbytes, times))
    return lambda: nbytes / repeated() / 1e9


def _transfer_us(timer: GpuTimer, nbytes: int, ways: tuple[Way, ...]) -> Callable[[], float]:
    repeated = Repeated(lambda times: timer.transfer_seconds(nbytes, ways, times))
    return lambda: repeated() * 1e6
