"""Which requests wait and which live where: admission, moves, preemption."""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.estimate import Decodes
from neo_desktop.engine.request import RequestState

R = TypeVar("R", bound=RequestState)


@dataclass(slots=True)
class SchedulerCounters:
    """What happened since the start."""

    num_preemptions: int = 0
    num_moves: int = 0  # requests whose KV was brought to another tier
    num_prompt_tokens: int = 0  # computed or reused
    num_cached_tokens: int = 0  # reused
    num_output_tokens: int = 0
    num_cpu_decodes: int = 0  # output tokens whose attention the host computed
    num_async_decodes: int = 0  # those of them that came at their own pace
    num_double_iterations: int = 0  # with two sub-batches


class RequestQueues(Generic[R]):
    """A queue of requests that wait for memory, and those that live in each tier, all by arrival.

    The oldest request is never preempted for others, so every request ends.

    Args:
        tiers: the most preferred one first.
    """

    def __init__(self, kv_cache: KVCache, tiers: tuple[KVTier, ...]) -> None:
        self.kv = kv_cache
        self.tiers = tiers
        self.waiting: deque[R] = deque()
        self.running: dict[KVTier, list[R]] = {tier: [] for tier in tiers}
        self.copies: list[BlockCopy] = []  # that the moves need which are in no iteration yet
        self.moved: list[R] = []  # whom they concern
        self._moving: list[R] = []  # whom those concern that are part of the iteration under way
        self.counters = SchedulerCounters()

    @property
    def num_running(self) -> int:
        """Requests that own KV."""
        return sum(map(len, self.running.values()))

    @property
    def has_moves(self) -> bool:
        """Whether moves are part of the iteration under way."""
        return bool(self._moving)

    @property
    def num_running_at(self) -> dict[KVTier, int]:
        """Requests that own KV, by where it lives."""
        return {tier: len(requests) for tier, requests in self.running.items()}

    @property
    def max_context_tokens(self) -> int:
        """The longest context that some tier can hold alone."""
        return max(self.kv.capacity_tokens(tier) for tier in self.tiers)

    def typical_decodes(self, output_tokens: float) -> dict[KVTier, Decodes]:
        """Return who lives where as decodes, each with half of such an output at least."""
        half = int(output_tokens / 2)
        return {
            tier: Decodes(len(running), sum(max(r.num_tokens, r.num_prompt_tokens + half) for r in running))
            for tier, running in self.running.items()
            if running
        }

    @property
    def less_preferred(self) -> list[KVTier]:
        """All tiers but the most preferred one: in order, but of workers the one with the least KV first."""
        return sorted(self.tiers[1:], key=self._fullness)

    def _fullness(self, tier: KVTier) -> int:
        return 1 + self.kv.num_used_blocks(tier) if tier.is_remote else 0

    def add(self, request: R) -> None:
        """Let a request wait for memory."""
        self.waiting.append(request)

    def tier_of(self, request: R) -> KVTier:
        """Return where the request's KV lives."""
        return self.kv.tier_of(request.request_id)

    def remove(self, request: R) -> None:
        """Forget a request and free its blocks."""
        if request.request_id in self.kv:
            self.running[self.tier_of(request)].remove(request)
            self.kv.free(request.request_id)
        else:
            self.waiting.remove(request)

    def start_moves(self) -> None:
        """Book the moves so far as part of an iteration that starts now; those of the last one have ended."""
        self._moving = self.moved
        self.copies, self.moved = [], []

    def end_moves(self) -> None:
        """Take in that the iteration under way has ended well: what moved can be shared by anybody."""
        moved_again = {request.request_id for request in self.moved}
        for request in self._moving:
            if request.request_id in self.kv and request.request_id not in moved_again:
                self.kv.arrived(request.request_id, request.block_hashes(self.kv.block_size))
        self._moving = []

    def make_room(self, may_spill: Callable[[R, KVTier], bool]) -> bool:
        """Give every request blocks for all its tokens, at the cost of the youngest where a tier is full.

        The youngest moves to another tier that has room, or is preempted.

        Args:
            may_spill: whether it may move to a less preferred tier.

        Returns:
            Whether nobody had to be preempted.
        """
        num_preemptions = self.counters.num_preemptions
        has_evicted = False
        for tier in self.tiers:
            for request in tuple(self.running[tier]):
                if request.is_complete:
                    continue
                # One behind others may have been moved or preempted for their sake.
                while (not has_evicted or request.request_id in self.kv) and not self.kv.extend(
                    request.request_id, request.num_tokens
                ):
                    self._evict(self.running[self.tier_of(request)][-1], may_spill)
                    has_evicted = True
        return self.counters.num_preemptions == num_preemptions

    def next_to_promote(self, tier: KVTier) -> R | None:
        """Return the oldest request of the tiers that are less preferred than this one."""
        others = self.tiers[self.tiers.index(tier) + 1 :]
        oldest = (running[0] for other in others if (running := self.running[other]))
        return min(oldest, key=attrgetter("arrival"), default=None)

    def promote(self, request: R, tier: KVTier) -> bool:
        """Move a request to a more preferred tier, if there is ample room.

        Ample is a block left for everybody there, so that it will not have to go back within the next
        `block_size` iterations; it is what admission asks for, too.
        """
        return self._move(request, tier, reserve_blocks=len(self.running[tier]))

    def may_have_room(self, request: R) -> bool:
        """Whether some tier may have room for a waiting request; quick, and wrong on the hopeful side."""
        num_blocks = self.kv.blocks_for(request.num_tokens)
        return any(
            num_blocks + len(self.running[tier]) <= self.kv.num_free_blocks(tier) for tier in self.tiers
        ) or bool(request.block_hashes(self.kv.block_size))

    def is_mostly_coming(self, tier: KVTier) -> bool:
        """Whether the request that waited longest had better wait until another has computed its beginning.

        The n answers of a prompt come one after the other, and share what the first of them computes.
        """
        request = self.waiting[0]
        hashes = request.block_hashes(self.kv.block_size)
        return self.kv.is_mostly_coming(request.num_tokens, hashes, tier)

    def admit(self, tier: KVTier) -> bool:
        """Give the request that waited longest blocks in a tier; False if there are not enough."""
        request = self.waiting[0]
        num_cached = self.kv.admit(
            request.request_id,
            request.num_tokens,
            request.block_hashes(self.kv.block_size),
            tier,
            # Each request there may need one more block soon: admitting the last block away would only
            # preempt somebody in the next iteration.
            reserve_blocks=len(self.running[tier]),
        )
        if num_cached is None:
            return False
        self.waiting.popleft()
        insort(self.running[tier], request, key=attrgetter("arrival"))
        request.num_computed_tokens = num_cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
            self.counters.num_prompt_tokens += request.num_prompt_tokens
            self.counters.num_cached_tokens += num_cached
        return True

    def give_up_moved(self) -> None:
        """After a failed iteration nobody knows whether moved KV has arrived: it is computed again."""
        for request in (*self._moving, *self.moved):
            if request.request_id in self.kv:
                self._preempt(request)
        self.copies, self.moved, self._moving = [], [], []

    def close(self, tier: KVTier) -> None:
        """Give a tier up: what it held is lost, and who lived there waits."""
        for request in tuple(self.running[tier]):
            self._preempt(request)
        self.kv.resize(tier, 0)

    def set_limit(self, tier: KVTier, num_blocks: int, may_spill: Callable[[R, KVTier], bool]) -> None:
        """Use only the first blocks of a tier: who has others moves to another tier, or is preempted."""
        if self.kv.set_limit(tier, num_blocks):
            return
        for request in reversed(tuple(self.running[tier])):
            if self.kv.last_block(request.request_id) >= num_blocks:
                self._evict(request, may_spill)

    def is_drained(self, tier: KVTier, num_blocks: int) -> bool:
        """Whether nobody needs what lies behind the first blocks, no move that is to come either."""
        return self.kv.is_drained(tier) and not any(
            (copy.source == tier and copy.source_block >= num_blocks)
            or (copy.target == tier and copy.target_block >= num_blocks)
            for copy in self.copies
        )

    def open(self, tier: KVTier, num_blocks: int) -> None:
        """Let requests live in a tier that nobody lives in."""
        self.kv.resize(tier, num_blocks)

    def _evict(self, victim: R, may_spill: Callable[[R, KVTier], bool]) -> None:
        tier = self.tier_of(victim)
        for other in (self.tiers[0], *self.less_preferred):
            if other == tier or (other != self.tiers[0] and not may_spill(victim, other)):
                continue
            if self._move(victim, other, reserve_blocks=len(self.running[other])):
                return
        self._preempt(victim)

    def _move(self, request: R, tier: KVTier, reserve_blocks: int) -> bool:
        source = self.tier_of(request)
        if source.host_attends and tier.host_attends:
            return False  # rows go to the device or come from there
        hashes = request.block_hashes(self.kv.block_size)
        copies = self.kv.move(request.request_id, tier, request.num_tokens, hashes, reserve_blocks)
        if copies is None:
            return False
        self.running[source].remove(request)
        insort(self.running[tier], request, key=attrgetter("arrival"))
        self.copies.extend(copies)
        self.moved.append(request)
        self.counters.num_moves += 1
        return True

    def _preempt(self, request: R) -> None:
        """Free a request's blocks and let it wait, before everybody who came later."""
        self._release(request)
        request.num_preemptions += 1
        self.counters.num_preemptions += 1

    def _release(self, request: R) -> None:
        self.running[self.tier_of(request)].remove(request)
        self.kv.free(request.request_id)
        request.num_computed_tokens = 0
        request.iterations_waited = 0
        insort(self.waiting, request, key=attrgetter("arrival"))
