"""Blocks of a pool as bytes: the same from all memories with one dtype of KV."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import slots_of
from neo_desktop.engine.kv.storage import KVPool

Bytes = NDArray[np.uint8]


class BlockBytes:
    """Copies blocks of a pool to bytes and back, exactly.

    A block's bytes are its layers in order, in each of them K and V, of KV in 8 bits also their scales.
    Tokens come first: `[block_size, kv_heads, ...]`.

    Args:
        pool: A pool in this computer.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        heads, dim = pool.row_shape
        self._is_exact = pool.dtype is torch.int8  # rows would be converted
        self._parts: list[tuple[torch.dtype, tuple[int, ...]]] = [(pool.dtype, (heads, dim))] * 2
        if self._is_exact:
            scale = torch.float32, (heads,)
            self._parts = [(torch.int8, (heads, dim // 2, 2)), (torch.int8, (heads, dim)), scale, scale]
        row_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._parts)
        self._layer_bytes = row_bytes * pool.block_size
        self.block_bytes = self._layer_bytes * pool.num_layers

    def empty(self, num_blocks: int) -> Bytes:
        """Return memory for blocks, [num_blocks, block_bytes]."""
        return np.empty((num_blocks, self.block_bytes), np.uint8)

    def take(self, blocks: Sequence[int], out: Bytes) -> None:
        """Copy blocks of the pool to `out`, [blocks, block_bytes]."""
        self._copy(blocks, out, to_pool=False)

    def put(self, blocks: Sequence[int], content: Bytes) -> None:
        """Copy `content`, [blocks, block_bytes], to blocks of the pool."""
        self._copy(blocks, content, to_pool=True)

    def _copy(self, blocks: Sequence[int], content: Bytes, *, to_pool: bool) -> None:
        pool = self._pool
        slots = slots_of(torch.tensor(blocks), pool.block_size)
        rows = pool.rows_at(slots)
        shape = 2, len(slots), *pool.row_shape
        here = torch.empty(0 if self._is_exact else shape, dtype=pool.dtype)
        there = here if pool.device.type == "cpu" else torch.empty_like(here, device=pool.device)
        for index in range(pool.num_layers):
            layer = pool.layer(index)
            part = content[:, index * self._layer_bytes : (index + 1) * self._layer_bytes]
            if self._is_exact:
                assert isinstance(layer, HostLayer)
                if to_pool:
                    layer.store_exactly(slots, self._tensors(part))
                else:
                    _fill(part, layer.stored(slots))
            elif to_pool:
                for row, values in zip(here, self._tensors(part), strict=True):
                    row.copy_(values)
                if there is not here:
                    there.copy_(here)
                rows.write(index, there)
            else:
                rows.read(index, there)
                if there is not here:
                    here.copy_(there)
                _fill(part, here.unbind())

    def _tensors(self, content: Bytes) -> list[Tensor]:
        """Return the parts of a layer's bytes, [blocks, layer_bytes]."""
        tensors, begin = [], 0
        for dtype, shape in self._parts:
            end = begin + self._pool.block_size * dtype.itemsize * math.prod(shape)
            part = torch.from_numpy(np.ascontiguousarray(content[:, begin:end]))
            tensors.append(part.view(dtype).view(-1, *shape))
            begin = end
        return tensors


def _fill(content: Bytes, parts: Sequence[Tensor]) -> None:
    """Copy the parts of a layer to its bytes, [blocks, layer_bytes]."""
    begin = 0
    for part in parts:
        values = part.contiguous().view(torch.uint8).numpy().reshape(len(content), -1)
        end = begin + values.shape[1]
        content[:, begin:end] = values
        begin = end
