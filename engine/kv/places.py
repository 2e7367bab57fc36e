"""The memories from which KV goes to disk: blocks of a tier, and checkpoints of recurrent states."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.kv.block_bytes import BlockBytes, Bytes
from neo_desktop.engine.kv.block_pool import BlockHash
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.states import StateCache
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.kv_tier import KVTier

PIECE, PIECE_BYTES = 16, 32 << 20  # the most to copy at a time.
MOST_HELD = 256  # blocks that wait to be written and cannot be evicted


class Place(Protocol):
    """A memory of items, which are found by hash. Only `take` and `put` belong to the disk's thread."""

    num_bytes: int  # of an item
    piece: int  # items to copy at a time

    def num_more(self, num_held: int) -> int:
        """Return how many items may be held in addition."""

    def hold(self, name: str, hashes: Sequence[BlockHash]) -> dict[BlockHash, int]:
        """Keep items until `let_go`; return `hash -> index` without missing ones."""

    def let_go(self, name: str) -> None:
        """Release all items under a name."""

    def take(self, items: Sequence[int], out: Bytes) -> None:
        """Copy items to `out`, [items, num_bytes]."""

    def put(self, items: Sequence[int], content: Bytes) -> None:
        """Copy `content`, [items, num_bytes], to items."""


class Blocks(BlockBytes):
    """The blocks of a tier."""

    def __init__(self, kv_cache: KVCache, tier: KVTier, pool: KVPool) -> None:
        super().__init__(pool)
        self.piece = max(min(PIECE, PIECE_BYTES // self.num_bytes), 1)
        self._kv, self._tier = kv_cache, tier

    def num_more(self, num_held: int) -> int:
        # At least half of the free blocks stay free.
        return min(MOST_HELD - num_held, (self._kv.num_free_blocks(self._tier) - num_held + 1) // 2)

    def hold(self, name: str, hashes: Sequence[BlockHash]) -> dict[BlockHash, int]:
        return self._kv.hold(name, hashes, self._tier)

    def let_go(self, name: str) -> None:
        self._kv.let_go(name)


class Checkpoints:
    """The states of recurrent layers, one after the other.

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
        """Copy slots to `out`, [slots, num_bytes]."""
        for there, here in self._pairs(items, out):
            here[:] = there.cpu().view(-1).view(torch.uint8).numpy()

    def put(self, items: Sequence[int], content: Bytes) -> None:
        """Copy `content`, [slots, num_bytes], to slots."""
        for there, here in self._pairs(items, content):
            there.copy_(torch.from_numpy(np.array(here)).view(there.dtype).view(there.shape))

    def _pairs(self, items: Sequence[int], content: Bytes) -> list[tuple[Tensor, Bytes]]:
        parts = np.split(content, np.cumsum([state[0].nbytes for state in self._states])[:-1], axis=1)
        return [
            (state[item], part[row])
            for state, part in zip(self._states, parts, strict=True)
            for row, item in enumerate(items)
        ]
