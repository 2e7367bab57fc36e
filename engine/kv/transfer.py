"""A reusable host buffer for transfers, pinned if possible."""

import math

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_memory


class HostBuffer:
    """A host buffer for transfers, see `cuda.copies`; it grows and never shrinks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the memory as a tensor. All views share it, so only one view may be in use at a time."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._bytes):
            size = max(num_bytes, 2 * len(self._bytes))
            self._bytes = host_memory(
                lambda pin: torch.empty(size, dtype=torch.uint8, pin_memory=pin), self._device
            )
        return self._bytes[:num_bytes].view(dtype).view(shape)
