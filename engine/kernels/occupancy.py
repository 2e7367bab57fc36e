"""Occupancy: the number of a compiled kernel's programs that fit on a multiprocessor at once.

The arithmetic is CUDA's occupancy calculator. The limits per multiprocessor are from the CUDA programming
guide (compute capabilities), the allocation rules from the tuning guides. Warps get registers in units, from
four equal parts of the register file. Programs get shared memory in units; from 8.0 on, the system reserves
1 KiB per program.
"""

from collections.abc import Mapping
from dataclasses import dataclass

REGISTER_UNIT = 256  # per warp
REGISTER_FILES = 4
THREADS_PER_WARP = 32
KIB = 1024
MIN_SPLIT_TOKENS = 128  # smaller splits cost more to start and merge than they save
MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Limits of a multiprocessor."""

    threads: int
    programs: int
    shared: int  # bytes in total
    shared_unit: int  # bytes
    shared_reserved: int  # bytes per program
    registers: int = 65_536


MULTIPROCESSORS: Mapping[int, Multiprocessor] = {
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

# Programs of decode attention (4 query heads per KV head, head_dim 128, 16 bits) as compiled by Triton 3.7.
# These serve as defaults if the running kernel is unknown.
USUAL_PROGRAMS: Mapping[int, int] = {75: 4, 80: 4, 86: 2, 89: 2, 90: 6, 120: 2}
PROGRAMS_ELSEWHERE = 4


def programs_per_sm(capability: int, registers: int, shared: int, num_warps: int) -> int | None:
    """Return the programs of a kernel that fit on a multiprocessor, perhaps 0; None: unknown limits.

    Args:
        capability: Compute capability; 86 is 8.6.
        registers: Registers per thread.
        shared: Shared memory per program in bytes.
        num_warps: Warps per program.
    """
    sm = MULTIPROCESSORS.get(capability)
    if sm is None:
        return None
    unit_registers = _round_up(registers * THREADS_PER_WARP, REGISTER_UNIT)
    warps = REGISTER_FILES * (sm.registers // REGISTER_FILES // unit_registers)
    taken = _round_up(shared + sm.shared_reserved, sm.shared_unit)
    by_shared = sm.shared // taken if taken else sm.programs
    return min(warps // num_warps, sm.threads // (num_warps * THREADS_PER_WARP), by_shared, sm.programs)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def num_splits(requests: int, kv_heads: int, max_tokens: int, num_programs: int) -> int:
    """Return the number of splits per context.

    Args:
        requests: Number of requests in the batch, padding included.
        max_tokens: Most tokens that a request attends to: `max_blocks * block_size`, or the window if less.
        num_programs: Number of this kernel's programs that the GPU runs at once. If at least this number of
            programs start together, enough bytes are in flight to hide the memory's latency.
    """
    wanted = num_programs // (requests * kv_heads)
    return max(1, min(wanted, max_tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))
