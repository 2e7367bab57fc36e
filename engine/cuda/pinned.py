"""Large host buffers for GPU copies, pinned in place.

torch rounds its own pinned memory up to a power of two, which can waste gigabytes for a model's weights.
"""

import logging
import mmap
from contextlib import suppress
from weakref import WeakSet

import torch
from torch import Tensor

from neo_desktop.engine.cuda.driver import open_driver
from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.huge_pages import ask_for_huge_pages, check_huge_pages

logger = logging.getLogger(__name__)

_PORTABLE, _MAPPED = 1, 2  # flags of cudaHostRegister; kernels read mapped memory in place


class PageableError(RuntimeError):
    """The system does not pin host memory that must be pinned."""


class _Pages(mmap.mmap):
    """Host memory that stays pinned until the last reference to it is gone."""

    pinned_at: int | None = None  # the address; None: not pinned

    def pin(self) -> RuntimeError | None:
        """Pin the memory; return the error if the system refuses."""
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        try:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if number := int(cudart.cudaHostRegister(address, len(self), _PORTABLE | _MAPPED)):
                raise RuntimeError(f"CUDA error {number}")
        except RuntimeError as error:
            if is_lost(error):
                raise
            _forget_refusal()
            return error
        self.pinned_at = address
        return None

    def __del__(self) -> None:
        if self.pinned_at is not None:
            with suppress(RuntimeError):  # CUDA may already be gone when the process exits
                torch.cuda.cudart().cudaHostUnregister(self.pinned_at)  # type: ignore[no-untyped-call]


_weights: WeakSet[_Pages] = WeakSet()  # weights of every loaded model


def kv_bytes(nbytes: int) -> Tensor:
    """Return pinned bytes for KV that a GPU copies.

    If the system refuses, these bytes and all later allocations are pageable.
    """
    pages, memory = _advised(nbytes)
    refusal = pages.pin() if fallbacks.level("host_memory") == "pinned" else None
    if refusal is not None:
        fallbacks.limit("host_memory", "pageable", f"{nbytes / 1e9:.1f} GB cannot be pinned: {refusal}")
    return memory


def weight_bytes(nbytes: int, *, must_pin: bool = False) -> Tensor:
    """Return bytes for weights, pinned if the system allows; `execute.weight_stream` handles both cases.

    Raises:
        PageableError: `must_pin`, and the bytes are not pinned.
    """
    pages, memory = _advised(nbytes)
    _weights.add(pages)
    refusal = pages.pin() if fallbacks.level("host_memory") == "pinned" else None
    if refusal is not None:
        logger.debug("%.1f GB of weights are not pinned: %s", nbytes / 1e9, refusal)
    if must_pin and pages.pinned_at is None:
        raise PageableError(f"{nbytes / 1e9:.1f} GB of host memory cannot be pinned") from refusal
    return memory


class _Mapped:
    """Pinned bytes as torch takes them for GPU memory."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        result, address = open_driver().cuMemHostGetDevicePointer(memory.data_ptr(), 0)
        if result != 0:
            raise RuntimeError(f"cuMemHostGetDevicePointer failed with CUDA driver error {int(result)}")
        self.__cuda_array_interface__ = {
            "shape": (len(memory),),
            "typestr": "|u1",
            "data": (int(address), False),
            "version": 3,
        }


def mapped_bytes(nbytes: int) -> Tensor:
    """Return pinned host memory as a tensor of the GPU, whose kernels read and write it across the bus.

    Raises:
        PageableError: the system does not pin the bytes, or the GPU cannot read them.
    """
    memory = weight_bytes(nbytes, must_pin=True)
    try:
        return torch.as_tensor(_Mapped(memory), device="cuda")
    except (AssertionError, RuntimeError) as error:  # torch's, without CUDA
        if is_lost(error):
            raise
        raise PageableError(f"the GPU cannot read host memory: {error}") from error


def check_weight_pages() -> None:
    """Fall back to small pages if the loaded weights got too few of the huge pages they asked for."""
    if _weights:
        check_huge_pages([torch.frombuffer(pages, dtype=torch.uint8) for pages in _weights])


def _advised(nbytes: int) -> tuple[_Pages, Tensor]:
    """Return pages that are not pinned yet, and a tensor over them.

    The mapping is private: shared memory gets no huge pages, and the system does not reclaim its pages for
    good. After a fork, a process that writes to a private page gets a copy that the GPU does not read.
    So child processes do not inherit this memory.
    """
    pages = _Pages(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    memory = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    ask_for_huge_pages(memory)
    return pages, memory


def _forget_refusal() -> None:
    """Clear CUDA's pending error, which the next caller would see: torch checks after each launch."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        if is_lost(error):
            raise
