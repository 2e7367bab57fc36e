"""The speed of the computer itself during a run, and the memory that measurements go over.

A laptop that gets hot, other programs and neighbours on a server change all figures, and repetition does not
help against what lasts for minutes. So two short measurements are made between the suites.
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


def steadiness(probes: Sequence[Probe]) -> tuple[bool, str]:
    """Return whether the computer stayed the same, and a sentence; it is empty for less than two probes."""
    if len(probes) < 2:
        return True, ""
    flops, reads = (
        (min(figures), max(figures))
        for figures in ([each.gflop_per_s for each in probes], [each.read_gb_per_s for each in probes])
    )
    steady = all(high <= STEADY * low for low, high in (flops, reads))
    return steady, say("steadiness", steady=steady, flops=flops, reads=reads, count=len(probes))[0]


def bytes_beyond_caches() -> int:
    """Return a size of host memory far beyond the caches, within a quarter of what is free."""
    return min(host_memory().available_bytes // 4, max(4 * last_level_cache_bytes(), _LEAST_BYTES))
