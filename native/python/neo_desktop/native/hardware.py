"""What the processor and its memory can do, and where memory lies."""

import torch

from neo_desktop.native import _native
from neo_desktop.native.arguments import DTYPE_CODES, check_contiguous, default_isa


def read_seconds(tensor: torch.Tensor, num_threads: int = 0) -> float:
    """Seconds that the kernels' thread pool takes to read a contiguous CPU tensor once."""
    check_contiguous(tensor)
    return _native.read_seconds(tensor.data_ptr(), tensor.nbytes, num_threads)


def read_bandwidth(nbytes: int, num_threads: int = 0, repeats: int = 5) -> float:
    """The best of `repeats` streaming reads of `nbytes` bytes, in GB/s (1e9 bytes per second)."""
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
    """Multiply-adds per second of the kernels' thread pool at its best: in registers, for `seconds` seconds.

    With `dtype` bfloat16 those of the dot-product instructions that the kernels use for bf16, where the
    instruction set has them; in fp32 otherwise.

    Raises:
        ValueError: another dtype, seconds outside (0, 10], a wrong number of threads or instruction set.
    """
    return _native.fma_rate(seconds, num_threads, isa or default_isa(), DTYPE_CODES.get(dtype, -1))


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask for huge pages behind a contiguous CPU tensor that was made but not yet written to.

    Large caches are read faster then (fewer TLB misses). Returns whether the system agreed.
    """
    check_contiguous(tensor)
    return _native.advise_huge_pages(tensor.data_ptr(), tensor.nbytes)


def interleave_numa_nodes(tensor: torch.Tensor) -> bool:
    """Spread a contiguous CPU tensor that was made but not yet written to over all NUMA nodes.

    Large caches are then read with the bandwidth of all nodes. Returns False where there is only one.
    """
    check_contiguous(tensor)
    return _native.interleave_numa_nodes(tensor.data_ptr(), tensor.nbytes)
