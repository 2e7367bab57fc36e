"""Speed of the processor and its memory, and page placement."""

import torch

from neo_desktop.native import _native
from neo_desktop.native.arguments import DTYPE_CODES, check_contiguous, default_isa


def read_seconds(tensor: torch.Tensor, num_threads: int = 0) -> float:
    """Return the seconds that the kernels' thread pool takes to read a contiguous CPU tensor once."""
    check_contiguous(tensor)
    return _native.read_seconds(tensor.data_ptr(), tensor.nbytes, num_threads)


def read_bandwidth(nbytes: int, num_threads: int = 0, repeats: int = 5) -> float:
    """Return the best of `repeats` streaming reads of `nbytes` bytes, in GB/s (1e9 bytes per second)."""
    if nbytes < 1 or repeats < 1:
        raise ValueError(f"nbytes and repeats must be at least 1, not {nbytes} and {repeats}")
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    advise_huge_pages(buffer)
    buffer.fill_(1)
    return nbytes / min(read_seconds(buffer, num_threads) for _ in range(repeats)) / 1e9


def fma_rate(
    seconds: float = 0.01,
    num_threads: int = 0,
    isa: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Return the peak multiply-adds per second of the kernels' thread pool, in registers, over `seconds`.

    bfloat16 uses the instruction set's bf16 dot products, if it has them; otherwise fp32.

    Raises:
        ValueError: an unsupported dtype or instruction set, seconds outside (0, 10], or an invalid number of
            threads.
    """
    return _native.fma_rate(seconds, num_threads, isa or default_isa(), DTYPE_CODES.get(dtype, -1))


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask for huge pages behind a contiguous CPU tensor that has not been written to yet.

    Large caches are then read faster (fewer TLB misses). Return True if the system agrees.
    """
    check_contiguous(tensor)
    return _native.advise_huge_pages(tensor.data_ptr(), tensor.nbytes)


def interleave_numa_nodes(tensor: torch.Tensor) -> bool:
    """Spread a contiguous CPU tensor that has not been written to yet over all NUMA nodes.

    Large caches are then read with the bandwidth of every node. Return False if the system has only one node.
    """
    check_contiguous(tensor)
    return _native.interleave_numa_nodes(tensor.data_ptr(), tensor.nbytes)
