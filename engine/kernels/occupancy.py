"""How many programs of a kernel a multiprocessor holds at once, from what the compiler made of it.

The arithmetic of CUDA's occupancy calculator. What each capability has per multiprocessor is from the CUDA
programming guide (compute capabilities), how it is handed out from the tuning guides: registers to warps, in
units, from the four equal parts of the register file; shared memory to programs, in units, and from 8.0 on
with 1 KiB that the system keeps for itself in each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

REGISTER_UNIT = 256  # per warp
REGISTER_FILES = 4
THREADS_PER_WARP = 32
KIB = 1024


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one has."""

    threads: int
    programs: int
    shared: int  # bytes, of all programs
    shared_unit: int  # bytes
    shared_reserved: int  # bytes, in each program
    registers: int = 65_536


MULTIPROCESSORS: Mapping[int, Multiprocessor] = MappingProxyType(
    {
        75: Multiprocessor(1024, 16, 64 * KIB, 256, 0),
        80: Multiprocessor(2048, 32, 164 * KIB, 128, KIB),
        86: Multiprocessor(1536, 16, 100 * KIB, 128, KIB),
        87: Multiprocessor(1536, 16, 164 * KIB, 128, KIB),
        89: Multiprocessor(1536, 24, 100 * KIB, 128, KIB),
        90: Multiprocessor(2048, 32, 228 * KIB, 128, KIB),
        100: Multiprocessor(2048, 32, 228 * KIB, 128, KIB),
        103: Multiprocessor(2048, 32, 228 * KIB, 128, KIB),
        120: Multiprocessor(1536, 24, 100 * KIB, 128, KIB),
        121: Multiprocessor(1536, 24, 100 * KIB, 128, KIB),
    }
)

# Of decode attention (4 query heads per KV head, head_dim 128, 16 bits), as Triton 3.7 compiles it: where
# nothing is known of the kernel that runs.
USUAL_PROGRAMS: Mapping[int, int] = MappingProxyType({75: 4, 80: 4, 86: 2, 89: 2, 90: 6, 120: 2})
PROGRAMS_ELSEWHERE = 4


def programs_per_sm(capability: int, registers: int, shared: int, num_warps: int) -> int | None:
    """Return how many programs of a kernel fit into a multiprocessor.

    Args:
        capability: 86 is 8.6.
        registers: per thread.
        shared: bytes per program.
        num_warps: per program.

    Returns:
        0: not even one fits. None: it is not known what this capability has.
    """
    sm = MULTIPROCESSORS.get(capability)
    if sm is None:
        return None
    unit_registers = _round_up(registers * THREADS_PER_WARP, REGISTER_UNIT)
    warps = REGISTER_FILES * (sm.registers // REGISTER_FILES // unit_registers)
    taken = _round_up(shared + sm.shared_reserved, sm.shared_unit)
    by_shared = sm.shared // taken if taken else sm.programs
    return min(warps // num_warps, sm.threads // (num_warps * THREADS_PER_WARP), by_shared, sm.programs)


def usual_programs(capability: int) -> int:
    """Return what to reckon with where nothing is known of the kernel."""
    return USUAL_PROGRAMS.get(capability, PROGRAMS_ELSEWHERE)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
