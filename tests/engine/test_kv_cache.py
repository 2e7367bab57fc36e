"""No block is lost, none has two owners, and equal prefixes share their KV."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from cost_models import THIRD
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_invariants import check_kv

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.int_array import IntView
from neo_desktop.engine.kv.block_pool import BlockHash, BlockPool, extend_hashes
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.layout import BLOCKS_PER_RUN
from neo_desktop.engine.kv_tier import KVTier

BLOCK_SIZE = 4
NUM_BLOCKS = {KVTier.DEVICE: 9, KVTier.HOST: 6, THIRD: 5, KVTier.STREAMED: 6}

tiers = st.sampled_from(tuple(NUM_BLOCKS))


def hashes(token_ids: Sequence[int]) -> list[BlockHash]:
    found: list[BlockHash] = []
    extend_hashes(found, token_ids, BLOCK_SIZE)
    return found


def admit(
    kv: KVCache, request_id: str, token_ids: Sequence[int], tier: KVTier, reserve: int = 0
) -> int | None:
    return kv.admit(request_id, len(token_ids), hashes(token_ids), tier, reserve)


def commit(kv: KVCache, request_id: str, token_ids: Sequence[int]) -> None:
    kv.commit(request_id, hashes(token_ids), len(token_ids))


@dataclass
class Owner:
    token_ids: list[int]
    tier: KVTier
    num_covered: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_covered = len(self.token_ids)


class KVCacheMachine(RuleBasedStateMachine):
    """Random operations against a model that also tracks the *content* of every block.

    `content[tier][block]` is the tuple of the request's tokens up to the end of that block, as an executor
    would have computed it. A table whose blocks hold another request's tokens would give wrong answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCache(NUM_BLOCKS, BLOCK_SIZE)
        self.owners: dict[str, Owner] = {}
        self.content: dict[KVTier, dict[int, tuple[int, ...]]] = {tier: {} for tier in NUM_BLOCKS}
        self.num_requests = 0
        self.planned: list[tuple[IntView, list[int]]] = []  # block tables given to plans, with their contents
        self.copies: list[BlockCopy] = []  # pending moves, to be executed before any computation
        self.moved: set[str] = set()

    def compute(self, request_id: str, start: int) -> None:
        """Write the KV of the tokens from `start` on, like an iteration, and publish it."""
        self.carry_moves_out()
        owner = self.owners[request_id]
        table = self.kv.block_table(request_id)
        self.planned.append((table, table.tolist()))
        for index, block in enumerate(table.tolist()):
            end = min((index + 1) * BLOCK_SIZE, len(owner.token_ids))
            if end > start:
                self.content[owner.tier][block] = tuple(owner.token_ids[:end])
        commit(self.kv, request_id, owner.token_ids)

    # Two token values only, so prefixes often coincide.
    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        tier=tiers,
        reserve=st.integers(0, 2),
    )
    def admit(self, token_ids: list[int], tier: KVTier, reserve: int) -> None:
        request_id = str(self.num_requests)
        free_before = self.kv.num_free_blocks(tier)
        num_cached = admit(self.kv, request_id, token_ids, tier, reserve)
        if num_cached is None:
            assert free_before < self.kv.blocks_for(len(token_ids)) + reserve
            assert self.kv.num_free_blocks(tier) == free_before
            return
        self.num_requests += 1
        self.owners[request_id] = Owner(token_ids, tier)
        assert num_cached % BLOCK_SIZE == 0
        shared = self.kv.block_table(request_id)[: num_cached // BLOCK_SIZE].tolist()
        arriving = {copy.target_block for copy in self.copies if copy.target == tier}
        assert arriving.isdisjoint(shared), "nobody knows yet whether it arrives"
        assert num_cached < len(token_ids), "the last token must be computed, for its logits"
        assert self.kv.num_free_blocks(tier) >= reserve
        self.compute(request_id, num_cached)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), num_new=st.integers(1, 6))
    def extend(self, data: st.DataObject, num_new: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.owners)))
        owner = self.owners[request_id]
        start = len(owner.token_ids)
        table = self.kv.block_table(request_id)
        if self.kv.extend(request_id, start + num_new):
            owner.token_ids += [1] * num_new
            self.compute(request_id, start)
        else:
            assert np.array_equal(self.kv.block_table(request_id), table)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), tier=tiers)
    def move(self, data: st.DataObject, tier: KVTier) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.owners)))
        owner = self.owners[request_id]
        if owner.tier == tier:
            with pytest.raises(ValueError, match="already"):
                self.kv.move(request_id, tier, len(owner.token_ids))
            return
        # A move copies no cached block; the rest of this machine checks that both contents agree.
        copies = self.kv.move(request_id, tier, len(owner.token_ids), hashes(owner.token_ids))
        if copies is None:
            assert self.kv.num_free_blocks(tier) < self.kv.blocks_for(len(owner.token_ids))
            return
        self.copies += copies
        self.moved.add(request_id)
        owner.tier = tier

    @rule()
    def carry_moves_out(self) -> None:
        for copy in self.copies:
            self.content[copy.target][copy.target_block] = self.content[copy.source][copy.source_block]
        for request_id in self.moved & self.owners.keys():
            self.kv.arrived(request_id, hashes(self.owners[request_id].token_ids))
        self.copies, self.moved = [], set()

    @rule(tier=tiers, num_runs=st.integers(0, 3))
    def set_limit(self, tier: KVTier, num_runs: int) -> None:
        """Requests keep blocks beyond the limit, but no request gets one, not even by content."""
        limit = min(num_runs * BLOCKS_PER_RUN, NUM_BLOCKS[tier])
        is_drained = self.kv.set_limit(tier, limit)
        assert is_drained == all(self.kv.last_block(name) < limit for name in self.living_in(tier))
        assert is_drained == self.kv.is_drained(tier)
        assert self.kv.capacity_tokens(tier) == limit * BLOCK_SIZE
        coming = (copy for copy in self.copies if tier in (copy.source, copy.target))
        if is_drained and not any(coming):
            for block in range(limit, NUM_BLOCKS[tier]):
                self.content[tier].pop(block, None)
            self.kv.forget_touched(tier)

    def living_in(self, tier: KVTier) -> list[str]:
        return [name for name, owner in self.owners.items() if owner.tier == tier]

    @invariant()
    def nothing_is_written_behind_what_counts_as_touched(self) -> None:
        for tier, content in self.content.items():
            most, limit, touched = self.kv.size(tier)
            assert most == NUM_BLOCKS[tier]
            assert touched == min(touched, limit)
            assert max((block for block in content if block < limit), default=-1) < max(touched, 0)

    @rule()
    def fail_to_move(self) -> None:
        """The target blocks' contents are undefined then, so the moved requests free them."""
        for request_id in sorted(self.moved & self.owners.keys()):
            del self.owners[request_id]
            self.kv.free(request_id)
        for copy in self.copies:
            self.content[copy.target][copy.target_block] = ()
        self.copies, self.moved = [], set()

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.owners)))
        del self.owners[request_id]
        self.kv.free(request_id)

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        check_kv(self.kv)

    @invariant()
    def a_table_in_a_plan_stays_as_it_was(self) -> None:
        for table, blocks in self.planned:
            assert table.tolist() == blocks
            assert not table.flags.writeable

    @invariant()
    def every_table_holds_the_tokens_of_its_request(self) -> None:
        for request_id in self.owners.keys() - self.moved:
            owner = self.owners[request_id]
            for index, block in enumerate(self.kv.block_table(request_id).tolist()):
                end = min((index + 1) * BLOCK_SIZE, len(owner.token_ids))
                assert self.content[owner.tier][block][:end] == tuple(owner.token_ids[:end])

    def teardown(self) -> None:
        for request_id in self.owners:
            self.kv.free(request_id)
        check_kv(self.kv)
        for tier, num_blocks in NUM_BLOCKS.items():
            assert self.kv.set_limit(tier, num_blocks)
            check_kv(self.kv)
            assert self.kv.num_free_blocks(tier) == num_blocks


TestKVCache = KVCacheMachine.TestCase
TestKVCache.settings = settings(stateful_step_count=40)


def test_an_equal_beginning_is_reused_but_the_last_token_is_computed_anew() -> None:
    kv = KVCache(NUM_BLOCKS, BLOCK_SIZE)
    prompt = list(range(12))
    assert admit(kv, "a", prompt, KVTier.DEVICE) == 0
    commit(kv, "a", prompt)
    assert admit(kv, "b", prompt, KVTier.DEVICE) == 8
    (*shared_a, own_a), (*shared_b, own_b) = kv.block_table("a"), kv.block_table("b")
    assert shared_a == shared_b
    assert own_a != own_b


def test_a_finished_request_leaves_its_kv_for_the_next_one() -> None:
    kv = KVCache(NUM_BLOCKS, BLOCK_SIZE)
    admit(kv, "a", range(9), KVTier.DEVICE)
    commit(kv, "a", range(9))
    kv.free("a")
    assert kv.usage()[KVTier.DEVICE].num_cached_blocks == 2
    assert admit(kv, "b", range(9), KVTier.DEVICE) == 8


def test_kv_is_not_shared_before_it_is_computed() -> None:
    kv = KVCache(NUM_BLOCKS, BLOCK_SIZE)
    admit(kv, "a", range(9), KVTier.DEVICE)
    assert admit(kv, "b", range(9), KVTier.DEVICE) == 0


def test_who_comes_while_another_computes_most_of_it_is_told_so() -> None:
    kv, prompt, tier = KVCache(NUM_BLOCKS, BLOCK_SIZE), list(range(18)), KVTier.DEVICE

    def is_mostly_coming(token_ids: Sequence[int], where: KVTier = tier) -> bool:
        return kv.is_mostly_coming(len(token_ids), hashes(token_ids), where)

    assert not is_mostly_coming(prompt)
    admit(kv, "first", prompt, tier)
    assert is_mostly_coming(prompt)
    assert not is_mostly_coming(prompt, KVTier.HOST)  # each tier has its own KV
    assert is_mostly_coming([*prompt[:12], 99, 98, 97])
    assert not is_mostly_coming([*prompt[:4], *range(50, 70)])  # a small part is not worth the wait
    commit(kv, "first", prompt[:8])
    assert is_mostly_coming(prompt)  # 8 of the other 10 tokens
    commit(kv, "first", prompt)
    assert not is_mostly_coming(prompt)  # already cached
    assert admit(kv, "second", prompt, tier) == 16


def test_nobody_waits_for_one_who_has_gone() -> None:
    kv, prompt = KVCache(NUM_BLOCKS, BLOCK_SIZE), list(range(18))
    admit(kv, "first", prompt, KVTier.DEVICE)
    kv.free("first")
    assert not kv.is_mostly_coming(18, hashes(prompt), KVTier.DEVICE)
    check_kv(kv)


def test_a_move_shares_what_is_there_already() -> None:
    kv, prompt = KVCache(NUM_BLOCKS, BLOCK_SIZE), list(range(10))
    for name, tier in (("there", KVTier.HOST), ("moves", KVTier.DEVICE)):
        admit(kv, name, prompt, tier)
        commit(kv, name, prompt)
    copies = kv.move("moves", KVTier.HOST, 10, hashes(prompt))
    assert copies is not None
    assert [copy.source for copy in copies] == [KVTier.DEVICE]  # only the last, partly filled block
    assert kv.usage()[KVTier.HOST].num_used_blocks == 4
    check_kv(kv)


def test_those_who_move_together_bring_what_they_share_once() -> None:
    kv, prompt = KVCache({KVTier.DEVICE: 40, KVTier.HOST: 40}, BLOCK_SIZE), list(range(18))
    for number in range(4):
        admit(kv, f"{number}", [*prompt, number], KVTier.DEVICE)
        commit(kv, f"{number}", [*prompt, number])
    moved = [kv.move(f"{n}", KVTier.HOST, 19, hashes([*prompt, n])) for n in range(4)]
    assert [len(copies or ()) for copies in moved] == [5, 1, 1, 1]
    assert kv.usage()[KVTier.HOST].num_used_blocks == 4 + 4
    assert admit(kv, "too early", [*prompt, 9], KVTier.HOST) == 0  # the copies can still fail
    for number in range(4):
        kv.arrived(f"{number}", hashes([*prompt, number]))
    assert admit(kv, "later", [*prompt, 8], KVTier.HOST) == 16
    check_kv(kv)


def test_blocks_of_a_request_follow_each_other_also_when_several_grow_at_once() -> None:
    kv = KVCache({KVTier.HOST: 40 * BLOCKS_PER_RUN}, BLOCK_SIZE)
    names = [str(i) for i in range(10)]
    generations = 4
    for generation in range(generations):
        for name in names:
            assert admit(kv, name, [generation, *map(ord, name)] * 5, KVTier.HOST) is not None
        for num_tokens in range(11, 4 * BLOCKS_PER_RUN * BLOCK_SIZE // 2):
            for name in names:
                assert kv.extend(name, num_tokens)
                if num_tokens % BLOCK_SIZE == 0:  # unique tokens: no other request reuses these blocks
                    commit(kv, name, [generation, *map(ord, name), *range(num_tokens)][:num_tokens])
        for name in names:
            table = kv.block_table(name)
            for start in range(0, len(table), BLOCKS_PER_RUN):
                run = table[start : start + BLOCKS_PER_RUN]
                assert run.tolist() == list(range(run[0], run[0] + len(run)))
        for name in names:
            kv.free(name)
        check_kv(kv)


def test_room_that_was_left_for_a_request_to_grow_is_given_to_others_when_they_need_it() -> None:
    pool = BlockPool(3 * BLOCKS_PER_RUN)
    first = [pool.allocate() for _ in range(3)]
    assert len({block // BLOCKS_PER_RUN for block in first}) == 3
    rest = [pool.allocate(after=first[0]) for _ in range(3 * BLOCKS_PER_RUN - 3)]
    assert sorted(first + rest) == list(range(3 * BLOCKS_PER_RUN))


def test_what_is_unused_for_longest_is_given_up_first_a_run_at_a_time() -> None:
    pool = BlockPool(2 * BLOCKS_PER_RUN)
    blocks = [pool.allocate() for _ in range(2)]
    while pool.num_free_blocks:
        blocks.append(pool.allocate(after=blocks[-2]))
    for block in blocks:
        pool.publish(block, bytes([block]))
    for block in sorted(blocks, reverse=True):  # the second run becomes the oldest
        pool.release(block)
    assert pool.num_cached_blocks == 2 * BLOCKS_PER_RUN
    assert pool.allocate() == BLOCKS_PER_RUN
    assert all(pool.find(bytes([block])) == block for block in range(BLOCKS_PER_RUN))
    assert pool.num_cached_blocks == BLOCKS_PER_RUN
    assert pool.num_free_blocks == 2 * BLOCKS_PER_RUN - 1


@pytest.mark.parametrize("tier", [KVTier.STREAMED, KVTier.DEVICE])
def test_what_is_swapped_lies_at_the_front_whatever_was_there_before(tier: KVTier) -> None:
    """Other tiers keep cached contents and use up all blocks first."""
    num_blocks, size = 64 * BLOCKS_PER_RUN, 4
    kv = KVCache({tier: num_blocks}, size)
    highest = 0
    for number in range(100):
        name, tokens = str(number), [1000 * number + i for i in range(3 * BLOCKS_PER_RUN * size)]
        hashes: list[bytes] = []
        extend_hashes(hashes, tokens, size)
        assert kv.admit(name, len(tokens), hashes, tier) == 0
        highest = max(highest, *kv.block_table(name))
        kv.commit(name, hashes, len(tokens))
        kv.free(name)
    assert (highest < 3 * BLOCKS_PER_RUN) == tier.is_streamed


def test_held_blocks_stay_until_they_are_let_go() -> None:
    kv, prompt, tier = KVCache(NUM_BLOCKS, BLOCK_SIZE), list(range(18)), KVTier.DEVICE
    admit(kv, "a", prompt, tier)
    commit(kv, "a", prompt)
    kv.free("a")
    found = kv.hold("writer", hashes(prompt)[1:3], tier)
    assert list(found) == hashes(prompt)[1:3]
    assert kv.num_free_blocks(tier) == NUM_BLOCKS[tier] - 2
    admit(kv, "b", [99] * (NUM_BLOCKS[tier] - 2) * BLOCK_SIZE, tier)
    assert kv.hold("another", hashes(prompt), tier) == found
    check_kv(kv)
    for name in ("writer", "another", "b"):
        kv.let_go(name)
    assert kv.num_used_blocks(tier) == 0
    check_kv(kv)


def test_expected_blocks_are_found_once_they_have_arrived() -> None:
    kv, prompt, tier = KVCache(NUM_BLOCKS, BLOCK_SIZE), list(range(18)), KVTier.DEVICE
    admit(kv, "a", prompt[:9], tier)
    commit(kv, "a", prompt[:9])
    assert kv.expect("reader", hashes(prompt), tier, reserve_blocks=6) is None, "too few blocks"
    assert kv.expect("reader", hashes(prompt), tier) == 2
    assert kv.num_leading(hashes(prompt), tier) == 2
    assert kv.is_mostly_coming(len(prompt), hashes(prompt), tier) == (2 * 2 * BLOCK_SIZE > 18 - 8)
    kv.commit("reader", hashes(prompt), 3 * BLOCK_SIZE)
    kv.let_go("reader")
    assert kv.num_leading(hashes(prompt), tier) == 3
    check_kv(kv)
