"""The speed of the computer itself during a run, and the memory that measurements go over.

A laptop that gets hot, other programs and neighbours on a server change all figures, and repetition does not
help against what lasts for minutes. So two short measurements are made between the suites.
"""

from collections.abc import Sequence

from neo_desktop.app.bench.host_rates import Probe
from neo_desktop.app.bench.words import say
from neo_desktop.engine.profiling.hardware import host_memory, last_level_cache_bytes

STEADY = 1.1  # the most by which the fastest and the slowest may differ
_LEAST_PROBE_BYTES, _LEAST_BYTES = 1 << 28, 1 << 30


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


def probe_bytes() -> int:
    """Return a size of host memory for a probe: beyond the last cache, within an eighth of what is free."""
    return min(host_memory().available_bytes // 8, max(2 * last_level_cache_bytes(), _LEAST_PROBE_BYTES))
