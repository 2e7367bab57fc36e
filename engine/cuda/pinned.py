"""Large pieces of host memory that a GPU copies from: pinned where they lie.

torch's own pinned memory is rounded up to a power of two, which for the weights of a model can be gigabytes.
"""

import logging
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.ladder import ladder

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable


class _Pages(mmap.mmap):
    """Memory that is pinned until nobody refers to it any more."""

    pinned_at = 0  # its address; 0: it is not pinned

    def __del__(self) -> None:
        if self.pinned_at:
            with suppress(RuntimeError):  # at the end of the process there may be no CUDA any more
                torch.cuda.cudart().cudaHostUnregister(self.pinned_at)  # type: ignore[no-untyped-call]


def pinned_bytes(nbytes: int) -> Tensor:
    """Return bytes of host memory, `[nbytes]` uint8: pinned, if the system pins them.

    If not, all other memory is pageable from then on, too.
    """
    memory, refusal = _pinned(nbytes)
    if refusal is not None:
        ladder.limit("host_memory", "pageable", f"{nbytes / 1e9:.1f} GB cannot be pinned: {refusal}")
    return memory


def weight_bytes(nbytes: int) -> Tensor:
    """Return bytes for weights, likewise; of those that are not pinned `execute.weight_stream` knows."""
    memory, refusal = _pinned(nbytes)
    if refusal is not None:
        logger.debug("%.1f GB of weights are not pinned: %s", nbytes / 1e9, refusal)
    return memory


def _pinned(nbytes: int) -> tuple[Tensor, RuntimeError | None]:
    """Return memory, and why it could not be pinned, if it was tried in vain."""
    pages = _Pages(-1, max(nbytes, 1))
    memory = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    native.advise_huge_pages(memory)
    if ladder.rung("host_memory") != "pinned":
        return memory, None
    try:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(cudart.cudaHostRegister(memory.data_ptr(), len(pages), _PORTABLE))
        if error:
            raise RuntimeError(f"CUDA error {error}")
        pages.pinned_at = memory.data_ptr()
    except RuntimeError as error:
        if is_lost(error):
            raise
        _forget_refusal()
        return memory, error
    return memory, None


def _forget_refusal() -> None:
    """Let the refusal be told here: CUDA keeps it for whoever asks next, and torch asks after each launch."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        if is_lost(error):
            raise
