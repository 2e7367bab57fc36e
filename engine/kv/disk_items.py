"""Memories whose items go to disk, as bytes: the blocks of a tier, and checkpoints of recurrent states.

Only `take` and `put` belong to the disk's thread.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop.engine.kv.block_pool import BlockHash
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import slots_of
from neo_desktop.engine.kv.states import StateCache
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.kv_tier import KVTier

Bytes = NDArray[np.uint8]  # [items, bytes of an item]

PIECE, PIECE_BYTES = 16, 32 << 20  # the most to copy at a time
MOST_HELD = 256  # blocks that wait to be written and cannot be evicted


class Blocks:
    """The blocks of a tier, copied to bytes and back exactly.

    A block's bytes are its layers in order: K, then V, and with KV in 8 bits also their scales. Tokens come
    first: `[block_size, kv_heads, ...]`. So they are the same from all memories with one dtype of KV.
    """

    def __init__(self, kv_cache: KVCache, tier: KVTier, pool: KVPool) -> None:
        self._kv, self._tier, self._pool = kv_cache, tier, pool
        row_bytes = sum(part.nbytes for part in self._access(torch.arange(1)).parts)
        self.num_bytes = row_bytes * pool.block_size * pool.num_layers  # of a block
        self.piece = max(min(PIECE, PIECE_BYTES // self.num_bytes), 1)  # items to copy at a time
        self.let_go = kv_cache.let_go

    def num_more(self, num_held: int) -> int:
        """Return how many items may be held in addition; at least half of the free blocks stay free."""
        return min(MOST_HELD - num_held, (self._kv.num_free_blocks(self._tier) - num_held + 1) // 2)

    def hold(self, name: str, hashes: Sequence[BlockHash]) -> dict[BlockHash, int]:
        """Keep items until `let_go`; return `hash -> index` without missing ones."""
        return self._kv.hold(name, hashes, self._tier)

    def take(self, blocks: Sequence[int], out: Bytes) -> None:
        access = self._access(slots_of(torch.tensor(blocks), self._pool.block_size))
        for layer, pairs in enumerate(self._pairs(access.parts, out)):
            access.read(layer)
            for part, there in pairs:
                there[:] = part

    def put(self, blocks: Sequence[int], content: Bytes) -> None:
        access = self._access(slots_of(torch.tensor(blocks), self._pool.block_size))
        for layer, pairs in enumerate(self._pairs(access.parts, content)):
            for part, there in pairs:
                part[:] = there
            access.write(layer)

    def _access(self, slots: Tensor) -> "_Rows | _Stored":
        return (_Stored if self._pool.dtype is torch.int8 else _Rows)(self._pool, slots)

    def _pairs(self, parts: Sequence[Tensor], content: Bytes) -> Iterator[list[tuple[Bytes, Bytes]]]:
        """Yield per layer the bytes of its parts, and their place in `content`."""
        views = [part.view(torch.uint8).numpy().reshape(len(content), -1) for part in parts]
        sizes = [view.shape[1] for view in views] * self._pool.num_layers
        places = np.split(content, np.cumsum(sizes)[:-1], axis=1)
        for begin in range(0, len(places), len(views)):
            yield list(zip(views, places[begin : begin + len(views)], strict=True))


class _Rows:
    """Rows of one layer at a time, in host memory."""

    def __init__(self, pool: KVPool, slots: Tensor) -> None:
        self._rows = pool.rows_at(slots)
        self._here = torch.empty(pool.rows_shape(len(slots)), dtype=pool.dtype)
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
        self.parts = self._layer(0).empty_parts(len(slots))

    def _layer(self, index: int) -> HostLayer:
        layer = self._pool.layer(index)
        assert isinstance(layer, HostLayer)
        return layer

    def read(self, layer: int) -> None:
        self._layer(layer).load_exactly(self._slots, self.parts)

    def write(self, layer: int) -> None:
        self._layer(layer).store_exactly(self._slots, self.parts)


class Checkpoints:
    """The states of recurrent layers, one after the other, with the interface of `Blocks`.

    Args:
        states: per recurrent operator, [slots, ...].
    """

    piece = 1

    def __init__(self, cache: StateCache, states: Sequence[Tensor]) -> None:
        self._states = states
        self.hold, self.let_go = cache.hold, cache.let_go
        self.num_bytes = sum(state[0].nbytes for state in states)

    def num_more(self, num_held: int) -> int:
        return 1 - num_held

    def take(self, items: Sequence[int], out: Bytes) -> None:
        for there, here in self._pairs(items, out):
            here[:] = there.cpu().view(-1).view(torch.uint8).numpy()

    def put(self, items: Sequence[int], content: Bytes) -> None:
        for there, here in self._pairs(items, content):
            there.copy_(torch.from_numpy(np.array(here)).view(there.dtype).view(there.shape))

    def _pairs(self, items: Sequence[int], content: Bytes) -> list[tuple[Tensor, Bytes]]:
        parts = np.split(content, np.cumsum([state[0].nbytes for state in self._states])[:-1], axis=1)
        return [
            (state[item], part[row])
            for state, part in zip(self._states, parts, strict=True)
            for row, item in enumerate(items)
        ]
