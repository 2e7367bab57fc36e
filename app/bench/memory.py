"""How much memory is measured on, and giving it back."""

import gc

import torch

from neo_desktop.engine.profiling.hardware import host_memory

_LEAST_BYTES = 1 << 30


def bytes_beyond_caches(last_level_bytes: int) -> int:
    """Return so much host memory that caches do not matter, within a quarter of what is free.

    Args:
        last_level_bytes: size of the last-level cache; 0: unknown.
    """
    return min(host_memory().available_bytes // 4, max(4 * last_level_bytes, _LEAST_BYTES))


def give_back_memory() -> None:
    """Return what is no longer referred to, on the GPU too: whoever measures next looks at what is free."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where no GPU was used
