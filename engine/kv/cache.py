"""The only owner of block counts and block tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.int_array import IntArray, IntView
from neo_desktop.engine.kv.block_pool import BlockHash, BlockPool
from neo_desktop.engine.kv.states import StateCache
from neo_desktop.engine.kv_tier import KVTier

if TYPE_CHECKING:
    from neo_desktop.engine.kv.disk_cache import DiskCache


@dataclass(slots=True)
class _Table:
    """The blocks of one request, in the order of its tokens."""

    tier: KVTier
    blocks: IntArray  # int32, the kernels' type
    capacity_tokens: int  # tokens that fit into the blocks.
    num_published: int = 0  # leading blocks that are full, computed and findable by their hash
    num_arriving: int = 0  # leading blocks to publish once the copies of a move are done
    is_moving: bool = False  # the copies of a move are not done


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Block counts of one tier: usable, in use, and unused but kept for reuse by content."""

    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_given_back_blocks: int = 0  # blocks above the limit, with memory given back to the system


class PoolSize(NamedTuple):
    """Block counts of one tier."""

    most: int  # blocks that its memory was taken for
    limit: int  # blocks that may be used now
    touched: int  # leading usable blocks; no later block has been written


class KVCache:
    """Block tables over one pool per tier.

    Mappings: `request_id -> (tier, [block, ...])`, where block `i` holds tokens
    `i * block_size .. (i + 1) * block_size - 1`. A request lives in one tier at a time. Full blocks
    with computed KV may be shared between requests with the same prefix; they are never written again.
    The last, partly filled block always belongs to one request alone.

    Args:
        num_blocks: `tier -> size of its pool`.
        num_states: slots for states of recurrent layers; None: the model has no recurrent layers.
    """

    def __init__(
        self, num_blocks: Mapping[KVTier, int], block_size: int, num_states: int | None = None
    ) -> None:
        self.block_size = block_size
        self.states = None if num_states is None else StateCache(num_states, block_size)
        self._pools = {tier: _pool(tier, count) for tier, count in num_blocks.items()}
        self._tables: dict[str, _Table] = {}
        self.disk: DiskCache | None = None  # keeps blocks that leave the caches

    @property
    def tiers(self) -> tuple[KVTier, ...]:
        return tuple(self._pools)

    def is_moving(self, request_id: str) -> bool:
        """Return True if the request's KV is not in its tier before the next iteration."""
        return self._tables[request_id].is_moving

    def last_block(self, request_id: str) -> int:
        return int(np.max(self._tables[request_id].blocks.view(), initial=0))

    def capacity_tokens(self, tier: KVTier) -> int:
        """Return the number of tokens that the tier can hold now when it is empty."""
        return self._pools[tier].limit * self.block_size

    def size(self, tier: KVTier) -> PoolSize:
        """Return the block counts that decide how much memory to give back."""
        pool = self._pools[tier]
        return PoolSize(pool.num_blocks, pool.limit, min(pool.num_touched, pool.limit))

    def set_limit(self, tier: KVTier, num_blocks: int) -> bool:
        """Allocate only the first blocks of a tier from now on; see `BlockPool.set_limit`."""
        return self._pools[tier].set_limit(num_blocks)

    def is_drained(self, tier: KVTier) -> bool:
        pool = self._pools[tier]
        return not pool.is_used_from(pool.limit)

    def forget_touched(self, tier: KVTier) -> None:
        """Mark the blocks above the limit as unwritten: their memory has been given back."""
        pool = self._pools[tier]
        pool.num_touched = min(pool.num_touched, pool.limit)

    def resize(self, tier: KVTier, num_blocks: int) -> None:
        """Replace the pool of a tier without requests; all cached content is lost."""
        assert all(table.tier != tier for table in self._tables.values())
        self._pools[tier] = _pool(tier, num_blocks)

    def num_free_blocks(self, tier: KVTier) -> int:
        return self._pools[tier].num_free_blocks

    def num_used_blocks(self, tier: KVTier) -> int:
        return self._pools[tier].num_used_blocks

    def usage(self) -> dict[KVTier, PoolUsage]:
        return {
            tier: PoolUsage(
                pool.limit, pool.num_used_blocks, pool.num_cached_blocks, pool.num_blocks - pool.limit
            )
            for tier, pool in self._pools.items()
        }

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def tier_of(self, request_id: str) -> KVTier:
        return self._tables[request_id].tier

    def block_table(self, request_id: str) -> IntView:
        """Return the request's blocks; later changes to the request do not change the array."""
        return self._tables[request_id].blocks.view()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(
        self,
        request_id: str,
        num_tokens: int,
        hashes: Sequence[BlockHash],
        tier: KVTier,
        reserve_blocks: int = 0,
    ) -> int | None:
        """Allocate blocks for all tokens of a new request, and reuse the computed KV of an equal prefix.

        The last token is always recomputed, since its logits are needed.

        Args:
            hashes: The known hashes of its leading full blocks.
            reserve_blocks: Blocks that must remain free afterwards.

        Returns:
            The leading tokens with reused KV; None, without any change, if the tier is too full.
        """
        pool = self._pools[tier]
        shared = _leading(pool, hashes[: (num_tokens - 1) // self.block_size])
        if self.states is not None:
            if not self.states.has_room:
                return None
            del shared[self.states.longest(hashes[: len(shared)]) :]
        if not self._allocate(request_id, shared, self.blocks_for(num_tokens), hashes, tier, reserve_blocks):
            return None
        if self.states is not None:
            self.states.admit(request_id, hashes[: len(shared)])
        return len(shared) * self.block_size

    def expect(
        self, name: str, hashes: Sequence[BlockHash], tier: KVTier, reserve_blocks: int = 0
    ) -> int | None:
        """Allocate blocks under a name for content that comes from disk, after the cached blocks.

        Returns:
            The number of cached blocks; None, without any change, if the tier is too full.
        """
        shared = _leading(self._pools[tier], hashes)
        is_done = self._allocate(name, shared, len(hashes), hashes, tier, reserve_blocks)
        return len(shared) if is_done else None

    def _allocate(
        self, name: str, shared: list[int], num_all: int, hashes: Sequence[BlockHash], tier: KVTier, rest: int
    ) -> bool:
        pool, num_new = self._pools[tier], num_all - len(shared)
        num_revived = sum(not pool.is_used(block) for block in shared)
        if num_new + num_revived + rest > pool.num_free_blocks:
            return False
        blocks = _with_shared(shared, num_new, pool)
        for block, block_hash in zip(
            blocks.view()[len(shared) :].tolist(), hashes[len(shared) :], strict=False
        ):
            pool.announce(block, block_hash)
        self._tables[name] = _Table(tier, blocks, len(blocks) * self.block_size, len(shared))
        return True

    def is_mostly_coming(self, num_tokens: int, hashes: Sequence[BlockHash], tier: KVTier) -> bool:
        """Return True if most of a new request's missing KV is being computed, or comes from disk."""
        pool = self._pools[tier]
        num_there = num_coming = 0
        for block_hash in hashes[: (num_tokens - 1) // self.block_size]:
            if pool.find(block_hash) is None:
                if not pool.is_coming(block_hash):
                    break
                num_coming += 1
            elif num_coming:
                break
            else:
                num_there += 1
        if 2 * num_coming * self.block_size > num_tokens - num_there * self.block_size:
            return True
        return self.disk is not None and self.disk.brings(num_tokens, hashes, tier)

    def num_leading(self, hashes: Sequence[BlockHash], tier: KVTier) -> int:
        """Return the length of the longest prefix that the tier holds, in blocks."""
        return len(_leading(self._pools[tier], hashes))

    def hold(self, name: str, hashes: Sequence[BlockHash], tier: KVTier) -> dict[BlockHash, int]:
        """Keep blocks in a tier until `let_go`; return `hash -> block` without missing ones."""
        pool = self._pools[tier]
        found = {each: block for each in hashes if (block := pool.find(each)) is not None}
        blocks = _with_shared(list(found.values()), 0, pool)
        self._tables[name] = _Table(tier, blocks, len(blocks) * self.block_size, len(blocks))
        return found

    def room(self, request_id: str) -> int:
        """Return the number of tokens that fit into the request's blocks."""
        return self._tables[request_id].capacity_tokens

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Extend the table to `num_tokens`; return False, without any change, if the tier is too full."""
        table = self._tables[request_id]
        if num_tokens <= table.capacity_tokens:
            return True
        num_new = self.blocks_for(num_tokens) - len(table.blocks)
        pool = self._pools[table.tier]
        if num_new > pool.num_free_blocks:
            return False
        _extend(table.blocks, num_new, pool)
        table.capacity_tokens += num_new * self.block_size
        return True

    def move(
        self,
        request_id: str,
        tier: KVTier,
        num_tokens: int,
        hashes: Sequence[BlockHash] = (),
        reserve_blocks: int = 0,
    ) -> list[BlockCopy] | None:
        """Allocate blocks for `num_tokens` in another tier, where `reserve_blocks` must stay free.

        Leading computed blocks are shared, not copied, if the target tier has or expects the same content.
        So the n outputs of a prompt copy the prompt once.

        Args:
            hashes: The known hashes of the request's leading full blocks.

        Returns:
            The copies of its KV, to be carried out in order before the next computation; None, without any
            change, if the tier is too full. The old blocks are free at once, because their next owner writes
            after the copies. Call `arrived` after the copies. If they fail, all moved requests must be freed.

        Raises:
            ValueError: The request is in that tier already.
        """
        table = self._tables[request_id]
        if table.tier == tier:
            raise ValueError(f"request {request_id!r} is in tier {tier} already")
        source, target = self._pools[table.tier], self._pools[tier]
        num_blocks = max(self.blocks_for(num_tokens), len(table.blocks))
        known = hashes[: max(table.num_published, table.num_arriving)]
        shared = _leading(target, known, with_arriving=True)
        num_revived = sum(not target.is_used(block) for block in shared)
        if num_blocks - len(shared) + num_revived + reserve_blocks > target.num_free_blocks:
            return None
        blocks = _with_shared(shared, num_blocks - len(shared), target)
        pairs = list(zip(table.blocks.view().tolist(), blocks.view().tolist(), strict=False))
        copies = [BlockCopy(table.tier, old, tier, new) for old, new in pairs[len(shared) :]]
        for (_, block), block_hash in zip(pairs[len(shared) :], known[len(shared) :], strict=False):
            target.expect(block, block_hash)
        _release(table.blocks, source)
        num_published = len(_leading(target, known))
        self._tables[request_id] = _Table(
            tier,
            blocks,
            len(blocks) * self.block_size,
            num_published,
            num_arriving=len(known),
            is_moving=True,
        )
        return copies

    def arrived(self, request_id: str, hashes: Sequence[BlockHash]) -> None:
        """Publish again the blocks that were published before the move; the copies have been carried out."""
        table = self._tables[request_id]
        self.commit(request_id, hashes, table.num_arriving * self.block_size)
        table.num_arriving, table.is_moving = 0, False

    def commit(self, request_id: str, hashes: Sequence[BlockHash], num_computed_tokens: int) -> None:
        """Publish the full blocks among the computed tokens, so that later requests can reuse them."""
        table = self._tables[request_id]
        begin, end = table.num_published, min(num_computed_tokens // self.block_size, len(hashes))
        if begin >= end:
            return
        pool = self._pools[table.tier]
        for block, block_hash in zip(table.blocks.view()[begin:end].tolist(), hashes[begin:end], strict=True):
            pool.publish(block, block_hash)
        table.num_published = end

    def free(self, request_id: str) -> None:
        """Release all blocks of a request, whose content may go to disk."""
        table = self._tables[request_id]
        pool = self._pools[table.tier]
        hashes = [pool.hash_of(block) for block in table.blocks.view()[: table.num_published].tolist()]
        self.let_go(request_id)
        if self.states is not None:
            self.states.free(request_id)
        if self.disk is not None:
            self.disk.keep(table.tier, [each for each in hashes if each is not None])

    def let_go(self, name: str) -> None:
        table = self._tables.pop(name)
        _release(table.blocks, self._pools[table.tier])


def _leading(pool: BlockPool, hashes: Sequence[BlockHash], *, with_arriving: bool = False) -> list[int]:
    """Return the blocks of the longest prefix that the pool holds, or that copies fill before it computes."""
    blocks = []
    for block_hash in hashes:
        block = pool.find(block_hash)
        if block is None and with_arriving:
            block = pool.find_arriving(block_hash)
        if block is None:
            break
        blocks.append(block)
    return blocks


def _with_shared(shared: Sequence[int], num_new: int, pool: BlockPool) -> IntArray:
    """Return a table of shared blocks followed by new ones."""
    for block in shared:
        pool.share(block)
    blocks = IntArray(shared)
    _extend(blocks, num_new, pool)
    return blocks


def _extend(blocks: IntArray, num_new: int, pool: BlockPool) -> None:
    """Append new blocks, contiguous in memory where possible."""
    last = int(blocks.view()[-1]) if blocks else None
    for _ in range(num_new):
        last = pool.allocate(after=last)
        blocks.append(last)


def _release(blocks: IntArray, pool: BlockPool) -> None:
    """Release blocks, the last one first, since the end of a prefix is least likely to be reused."""
    for block in reversed(blocks.view().tolist()):
        pool.release(block)


def _pool(tier: KVTier, num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, stays_low=tier.is_streamed)
