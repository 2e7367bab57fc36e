"""Ways between host and device memory; on a GPU through pinned memory, which is reused.

Without a GPU both are the same memory, and the same functions run on it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class HostBuffer:
    """Host memory that transfers go through: pinned where there is a GPU; grows, and is not given back."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the memory as a tensor. All views share it, and whoever takes one must know them unused."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._bytes):
            size = max(num_bytes, 2 * len(self._bytes))
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._bytes[:num_bytes].view(dtype).view(shape)


class Carrier:
    """Brings tensors to the other memory, some at a time; used by one thread, on its current stream.

    What a call returns is to be used before the next call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[HostBuffer] = []

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors, all of one memory, in host memory."""
        if tensors[0].device.type == "cpu":
            return tuple(tensors)
        staged = self._views([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        for target, source in zip(staged, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return staged

    def blocks(self, caches: Sequence[Tensor], blocks: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """Return a copy of some blocks of caches in host memory on a device.

        Args:
            caches: [num_blocks, ...] each.
            blocks: [n] int64.

        Returns:
            [n, ...] of each.
        """
        staged = self._views([((len(blocks), *cache.shape[1:]), cache.dtype) for cache in caches])
        for target, cache in zip(staged, caches, strict=True):
            torch.index_select(cache, 0, blocks, out=target)
        if device.type == "cpu":
            return staged
        there = tuple(tensor.to(device, non_blocking=True) for tensor in staged)
        torch.cuda.current_stream(device).synchronize()  # `staged` is about to be written again
        return there

    def _views(self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[Tensor, ...]:
        """Return a tensor of each shape and dtype, in memory that is used again and again."""
        while len(self._buffers) < len(wanted):
            self._buffers.append(HostBuffer(self._device))
        return tuple(
            buffer.view(shape, dtype) for buffer, (shape, dtype) in zip(self._buffers, wanted, strict=False)
        )
