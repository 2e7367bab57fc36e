"""Assertions that no block and no slot is lost or owned twice."""

from collections.abc import Sequence

from neo_desktop.engine.kv.block_pool import BlockPool
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.states import NO_SLOT, StateCache


def check_kv(kv_cache: KVCache) -> None:
    """Check every pool against the block tables."""
    for tier, pool in kv_cache._pools.items():
        num_owners = [0] * pool.num_blocks
        for table in kv_cache._tables.values():
            if table.tier == tier:
                for block in table.blocks.view():
                    num_owners[block] += 1
        check_pool(pool, num_owners)
    if kv_cache.states is not None:
        check_states(kv_cache.states)


def check_states(states: StateCache) -> None:
    """Check the slots against their owners."""
    num_owners = [0] * states.num_slots
    held = [slot for slots in states._held.values() for slot in slots]
    for owned in states._owned.values():
        held += [owned.current] if owned.mark is None else [owned.current, owned.mark[0]]
        held += [slot for each in owned.planned for slot in (each.source, each.checkpoint, *each.drafts)]
    for slot in held:
        if slot != NO_SLOT:
            num_owners[slot] += 1
    check_pool(states._pool, num_owners)


def check_pool(pool: BlockPool, num_owners: Sequence[int]) -> None:
    """Check a pool; `num_owners` is `block -> number of block tables that hold it`."""
    assert list(num_owners) == pool._num_references, "reference counts differ from block tables"
    free, cached = pool._free, set(pool._cached)
    used = {block for block, count in enumerate(pool._num_references) if count}
    withheld = set(range(pool.limit, pool.num_blocks)) - used
    states = free, cached, used, withheld
    assert sum(map(len, states)) == pool.num_blocks, "a block is lost or in two states"
    assert set().union(*states) == set(range(pool.num_blocks)), "a block is lost or in two states"
    assert len(used) == pool.num_used_blocks, "the number of used blocks is wrong"
    assert max(free | cached, default=-1) < pool.limit, "a free block is at or above the limit"
    assert max(pool._hash_of_block, default=-1) < pool.limit, "a block at or above the limit has a hash"
    assert {h: b for b, h in pool._hash_of_block.items()} == pool._block_of_hash, "hash maps differ"
    assert cached <= pool._hash_of_block.keys(), "a cached block has no hash"
    assert not free & pool._hash_of_block.keys(), "a free block has a hash"
    assert {h: b for b, h in pool._hash_to_come.items()} == pool._block_to_come, "announcements differ"
    assert pool._hash_to_come.keys() >= pool._arriving, "an arriving block is not announced"
    assert used >= pool._hash_to_come.keys(), "an announced block is unused"
    runs = range(-(-pool.limit // pool._run))
    idle = {run for run in runs if used.isdisjoint(pool._blocks(run))}
    assert idle == pool._idle_runs.keys(), "runs without a used block differ from the idle ones"
