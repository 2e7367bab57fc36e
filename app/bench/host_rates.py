"""The CPU and its memory: what plain reads, copies, multiply-adds and matrix products reach."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from neo_desktop import native
from neo_desktop.engine.profiling.hardware import host_memory, last_level_cache_bytes

_FMA_SECONDS = 0.01
_PROBES = 3
_LEAST_PROBE_BYTES, _LEAST_BYTES = 1 << 28, 1 << 30
_BF16_ISAS = ("avx512bf16", "amx", "neon_bf16")  # instruction sets that multiply bf16


@dataclass(frozen=True, slots=True)
class Probe:
    """Rates of the CPU and its memory at one time, with all threads; the best of a few tries."""

    gflop_per_s: float
    read_gb_per_s: float


class Host:
    """A large piece of memory, and the work that is timed on it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self.huge_pages = native.advise_huge_pages(self._memory)
        native.interleave_numa_nodes(self._memory)  # as the engine's CPU-cache
        self._memory.fill_(1)
        self._matrices: dict[tuple[int, str], torch.Tensor] = {}

    def probe(self) -> Probe:
        """Measure; takes about a tenth of a second."""
        threads = native.default_num_threads()
        flops = max(self.multiply_add_gflop_per_s(threads, "float32") for _ in range(_PROBES))
        return Probe(flops, max(self.read_gb_per_s(threads) for _ in range(_PROBES)))

    def read_gb_per_s(self, threads: int) -> float:
        """Read the memory front to back with the kernels' thread pool."""
        return self.nbytes / native.read_seconds(self._memory, threads) / 1e9

    def copy_gb_per_s(self, threads: int) -> float:
        """Copy one half to the other with torch; what is read and what is written both count."""
        half = self.nbytes // 2
        source, target = self._memory[:half], self._memory[half : 2 * half]
        with _torch_threads(threads):
            start = time.perf_counter()
            target.copy_(source)
            return 2 * half / (time.perf_counter() - start) / 1e9

    def multiply_add_gflop_per_s(self, threads: int, dtype: str) -> float:
        """Multiply and add in registers; either counts as an operation."""
        return 2 * native.fma_rate(_FMA_SECONDS, threads, dtype=getattr(torch, dtype)) / 1e9

    def matrix_gflop_per_s(self, size: int, dtype: str) -> float:
        """Multiply two square matrices with torch, on as many threads as torch takes by itself."""
        if (size, dtype) not in self._matrices:
            generator = torch.Generator().manual_seed(0)
            self._matrices[size, dtype] = torch.randn(size, size, generator=generator).to(
                getattr(torch, dtype)
            )
        matrix = self._matrices[size, dtype]
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        return 2 * size**3 / (time.perf_counter() - start) / 1e9


def native_dtypes() -> tuple[str, ...]:
    """The number formats that the kernels' instruction set multiplies."""
    return ("float32", "bfloat16") if native.default_isa() in _BF16_ISAS else ("float32",)


def bytes_beyond_caches() -> int:
    """Return a size of host memory far beyond the caches, within a quarter of what is free."""
    return min(host_memory().available_bytes // 4, max(4 * last_level_cache_bytes(), _LEAST_BYTES))


def probe_bytes() -> int:
    """Return a size of host memory for a probe: beyond the last cache, within an eighth of what is free."""
    return min(host_memory().available_bytes // 8, max(2 * last_level_cache_bytes(), _LEAST_PROBE_BYTES))


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
