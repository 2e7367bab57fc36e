"""Whether the computer itself stayed the same during a run: two short measurements between the suites.

A laptop that gets hot, a program in the background and a neighbour on the same server change all figures, and
no repetition helps against what lasts for minutes. Then it must at least be told.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neo_desktop import native
from neo_desktop.app.bench.spread import number
from neo_desktop.engine.profiling.hardware import host_memory, last_level_cache_bytes

STEADY = 1.1  # the most by which the fastest and the slowest may differ
_REPEATS = 3
_FMA_SECONDS = 0.02
_LEAST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Probe:
    """What the CPU and its memory reached at one time, with all threads; the best of a few tries."""

    gflop_per_s: float
    read_gb_per_s: float


class Prober:
    """Takes probes, always of the same memory."""

    def __init__(self) -> None:
        wanted = max(2 * last_level_cache_bytes(), _LEAST_BYTES)
        self._memory = torch.empty(min(wanted, host_memory().available_bytes // 8), dtype=torch.uint8)
        native.advise_huge_pages(self._memory)
        self._memory.fill_(1)

    def probe(self) -> Probe:
        """Measure; takes about a tenth of a second."""
        seconds = min(native.read_seconds(self._memory) for _ in range(_REPEATS))
        rate = max(native.fma_rate(_FMA_SECONDS) for _ in range(_REPEATS))
        return Probe(2 * rate / 1e9, self._memory.nbytes / seconds / 1e9)


def is_steady(probes: Sequence[Probe]) -> bool:
    """Whether neither figure changed by more than `STEADY`."""
    return all(high <= STEADY * low for low, high in _ranges(probes))


def describe(probes: Sequence[Probe]) -> str | None:
    """Say how much the computer itself changed; None where that was not looked at."""
    if len(probes) < 2:
        return None
    (flops, most_flops), (read, most_read) = _ranges(probes)
    what = (
        f"the CPU did {_range(flops, most_flops)} GFLOP/s and read memory at {_range(read, most_read)} GB/s, "
        f"at {len(probes)} times during the run"
    )
    if is_steady(probes):
        return f"The computer was steady: {what}."
    return (
        f"The computer was not steady: {what}. Other programs were at work, or it got hot: figures may be "
        "off by as much. Measure again when nothing else runs."
    )


def _ranges(probes: Sequence[Probe]) -> tuple[tuple[float, float], tuple[float, float]]:
    flops = [probe.gflop_per_s for probe in probes] or [1.0]
    reads = [probe.read_gb_per_s for probe in probes] or [1.0]
    return (min(flops), max(flops)), (min(reads), max(reads))


def _range(low: float, high: float) -> str:
    return f"{number(low)} to {number(high)}"
