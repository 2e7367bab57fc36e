"""Blocks of a pool as bytes: the same from all memories with one dtype of KV."""

from collections.abc import Iterator, Sequence

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

    A block's bytes are its layers in order: K, then V, and with KV in 8 bits also their scales.
    Tokens come first: `[block_size, kv_heads, ...]`.

    Args:
        pool: A pool in this computer.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        row_bytes = sum(part.nbytes for part in self._access(torch.arange(1)).parts)
        self.num_bytes = row_bytes * pool.block_size * pool.num_layers

    def empty(self, num_blocks: int) -> Bytes:
        """Return memory for blocks, [num_blocks, num_bytes]."""
        return np.empty((num_blocks, self.num_bytes), np.uint8)

    def take(self, blocks: Sequence[int], out: Bytes) -> None:
        """Copy blocks of the pool to `out`, [blocks, num_bytes]."""
        layers = self._access(self._slots(blocks))
        for index, pairs in enumerate(self._pairs(layers, out)):
            layers.read(index)
            for part, there in pairs:
                there[:] = part

    def put(self, blocks: Sequence[int], content: Bytes) -> None:
        """Copy `content`, [blocks, num_bytes], to blocks of the pool."""
        layers = self._access(self._slots(blocks))
        for index, pairs in enumerate(self._pairs(layers, content)):
            for part, there in pairs:
                part[:] = there
            layers.write(index)

    def _slots(self, blocks: Sequence[int]) -> Tensor:
        return slots_of(torch.tensor(blocks), self._pool.block_size)

    def _access(self, slots: Tensor) -> "_Rows | _Stored":
        return (_Stored if self._pool.dtype is torch.int8 else _Rows)(self._pool, slots)

    def _pairs(self, layers: "_Rows | _Stored", content: Bytes) -> Iterator[list[tuple[Bytes, Bytes]]]:
        """Yield per layer the bytes of its parts, and their place in `content`."""
        parts = [part.view(torch.uint8).numpy().reshape(len(content), -1) for part in layers.parts]
        sizes = [part.shape[1] for part in parts] * self._pool.num_layers
        places = np.split(content, np.cumsum(sizes)[:-1], axis=1)
        for begin in range(0, len(places), len(parts)):
            yield list(zip(parts, places[begin : begin + len(parts)], strict=True))


class _Rows:
    """Rows of one layer at a time, in host memory."""

    def __init__(self, pool: KVPool, slots: Tensor) -> None:
        self._rows = pool.rows_at(slots)
        self._here = torch.empty(2, len(slots), *pool.row_shape, dtype=pool.dtype)
        self._there = self._here.to(pool.device)  # the same tensor if that is the CPU
        self.parts: Sequence[Tensor] = self._here.unbind()

    def read(self, layer: int) -> None:
        self._rows.read(layer, self._there)
        self._here.copy_(self._there)

    def write(self, layer: int) -> None:
        self._there.copy_(self._here)
        self._rows.write(layer, self._there)


class _Stored:
    """KV in 8 bits of one layer at a time, without conversion."""

    def __init__(self, pool: KVPool, slots: Tensor) -> None:
        self._pool, self._slots = pool, slots
        heads, dim = pool.row_shape
        rows = len(slots), heads
        keys, values = (torch.empty(*rows, *shape, dtype=torch.int8) for shape in ((dim // 2, 2), (dim,)))
        self.parts: Sequence[Tensor] = keys, values, torch.empty(rows), torch.empty(rows)

    def _layer(self, index: int) -> HostLayer:
        layer = self._pool.layer(index)
        assert isinstance(layer, HostLayer)
        return layer

    def read(self, layer: int) -> None:
        self._layer(layer).load_exactly(self._slots, self.parts)

    def write(self, layer: int) -> None:
        self._layer(layer).store_exactly(self._slots, self.parts)
