"""Host memory that transfers go through: pinned, if it can be, and used again."""

import math

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_memory


class HostBuffer:
    """Host memory that transfers go through, see `cuda.copies`; grows, and is not given back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the memory as a tensor. All views share it: the caller must know that no other is in use."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._bytes):
            size = max(num_bytes, 2 * len(self._bytes))
            self._bytes = host_memory(
                lambda pin: torch.empty(size, dtype=torch.uint8, pin_memory=pin), self._device
            )
        return self._bytes[:num_bytes].view(dtype).view(shape)
