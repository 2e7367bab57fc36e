"""Large pieces of host memory that a GPU copies from: pinned where they lie.

torch's own pinned memory is rounded up to a power of two, which for the weights of a model can be gigabytes.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.ladder import ladder

_PORTABLE = 1  # cudaHostRegisterPortable


class _Pages(mmap.mmap):
    """Memory that is pinned until nobody refers to it any more."""

    pinned_at = 0  # its address; 0: it is not pinned

    def __del__(self) -> None:
        if self.pinned_at:
            with suppress(RuntimeError):  # at the end of the process there may be no CUDA any more
                torch.cuda.cudart().cudaHostUnregister(self.pinned_at)  # type: ignore[no-untyped-call]


def pinned_bytes(nbytes: int) -> Tensor:
    """Return bytes of host memory, `[nbytes]` uint8: pinned, if the system pins them."""
    pages = _Pages(-1, max(nbytes, 1))
    memory = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    native.advise_huge_pages(memory)
    if ladder.rung("host_memory") != "pinned":
        return memory
    try:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(cudart.cudaHostRegister(memory.data_ptr(), len(pages), _PORTABLE))
        if error:
            raise RuntimeError(f"CUDA error {error}")
        pages.pinned_at = memory.data_ptr()
    except RuntimeError as error:
        if is_lost(error):
            raise
        ladder.limit("host_memory", "pageable", f"{nbytes / 1e9:.1f} GB cannot be pinned: {error}")
    return memory
