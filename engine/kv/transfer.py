"""Ways between host and device memory; on a GPU through pinned memory, which is reused.

Without a GPU both are the same memory, and the same functions run on it.
"""

import math

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
    """Brings tensors to the other memory, one at a time; used by one thread, on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = HostBuffer(device)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor in host memory, to be used before the next call."""
        if tensor.device.type == "cpu":
            return tensor
        staged = self._buffer.view(tuple(tensor.shape), tensor.dtype)
        staged.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        return staged

    def blocks(self, cache: Tensor, blocks: Tensor, device: torch.device) -> Tensor:
        """Return some blocks of one layer of a cache on a device, to be used before the next call.

        Args:
            cache: [num_blocks, kv_heads, block_size, head_dim]
            blocks: [n] int64, on the cache's device.

        Returns:
            [n, kv_heads, block_size, head_dim]
        """
        if device.type == "cpu" or cache.device.type != "cpu":
            chosen = cache.index_select(0, blocks)
            return self.to_host(chosen) if device.type == "cpu" else chosen
        staged = self._buffer.view((len(blocks), *cache.shape[1:]), cache.dtype)
        torch.index_select(cache, 0, blocks, out=staged)
        there = staged.to(device, non_blocking=True)
        torch.cuda.current_stream(device).synchronize()  # `staged` is about to be written again
        return there
