"""The computer itself: whether it stayed the same during a run, and how much memory is measured on.

A laptop that gets hot, a program in the background and a neighbour on the same server change all figures, and
no repetition helps against what lasts for minutes. Then it must at least be told: two short measurements are
made between the suites.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neo_desktop import native
from neo_desktop.app.bench.words import say
from neo_desktop.engine.profiling.hardware import host_memory, last_level_cache_bytes

STEADY = 1.1  # the most by which the fastest and the slowest may differ
_REPEATS = 3
_FMA_SECONDS = 0.02
_LEAST_PROBE_BYTES, _LEAST_BYTES = 1 << 28, 1 << 30


@dataclass(frozen=True, slots=True)
class Probe:
    """Rates of the CPU and its memory at one time, with all threads; the best of a few tries."""

    gflop_per_s: float
    read_gb_per_s: float


class Prober:
    """Takes probes, always of the same memory."""

    def __init__(self) -> None:
        wanted = max(2 * last_level_cache_bytes(), _LEAST_PROBE_BYTES)
        self._memory = torch.empty(min(wanted, host_memory().available_bytes // 8), dtype=torch.uint8)
        native.advise_huge_pages(self._memory)
        self._memory.fill_(1)

    def probe(self) -> Probe:
        """Measure; takes about a tenth of a second."""
        seconds = min(native.read_seconds(self._memory) for _ in range(_REPEATS))
        rate = max(native.fma_rate(_FMA_SECONDS) for _ in range(_REPEATS))
        return Probe(2 * rate / 1e9, self._memory.nbytes / seconds / 1e9)


def is_steady(probes: Sequence[Probe]) -> bool:
    """True if neither figure changed by more than `STEADY`."""
    return all(high <= STEADY * low for low, high in _ranges(probes))


def describe(probes: Sequence[Probe]) -> str | None:
    """Say how much the computer itself changed; None where that was not looked at."""
    if len(probes) < 2:
        return None
    flops, reads = _ranges(probes)
    steady = is_steady(probes)
    return say("steadiness", steady=steady, flops=flops, reads=reads, count=len(probes))[0]


def bytes_beyond_caches() -> int:
    """Return a size of host memory far beyond the caches, within a quarter of what is free."""
    return min(host_memory().available_bytes // 4, max(4 * last_level_cache_bytes(), _LEAST_BYTES))


def _ranges(probes: Sequence[Probe]) -> list[tuple[float, float]]:
    figures = [probe.gflop_per_s for probe in probes], [probe.read_gb_per_s for probe in probes]
    return [(min(values, default=1.0), max(values, default=1.0)) for values in figures]
