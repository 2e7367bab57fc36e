"""Request queues: admission, moves between KV tiers, preemption."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Generic

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.estimate import Decodes
from neo_desktop.engine.request import R
from neo_desktop.engine.schedule.async_groups import AsyncGroups


@dataclass(slots=True)
class SchedulerCounters:
    """Counters since the start."""

    num_preemptions: int = 0
    num_moves: int = 0  # moves of a request's KV to another tier
    num_prompt_tokens: int = 0  # computed or reused
    num_cached_tokens: int = 0  # reused
    num_output_tokens: int = 0
    num_accepted: int = 0  # output tokens that were drafted
    num_cpu_decodes: int = 0  # output tokens whose attention the host computed
    num_async_decodes: int = 0  # the async decodes among them
    num_double_iterations: int = 0  # with two sub-batches


class RequestQueues(Generic[R]):
    """Waiting requests, and running requests per KV tier, each in order of arrival.

    The oldest request is never preempted, so every request finishes.

    Args:
        tiers: in order of preference.
        num_layers: of the model.
    """

    def __init__(self, kv_cache: KVCache, tiers: tuple[KVTier, ...], num_layers: int) -> None:
        self.kv = kv_cache
        self.tiers = tiers
        self.waiting: deque[R] = deque()
        self.running: dict[KVTier, list[R]] = {tier: [] for tier in tiers}
        self.copies: list[BlockCopy] = []  # block copies for the next iteration
        self.moved: list[R] = []  # requests moved by `copies`
        self._moving: list[R] = []  # requests whose block copies run in the current iteration
        self.refused: tuple[int, ...] | None = None  # cache key of the last admission the policy refused
        self.waits_for_prompt = False  # True if a request waits for a prefix that another request computes
        self.async_groups: AsyncGroups[R] = AsyncGroups(num_layers)
        self.counters = SchedulerCounters()

    def __iter__(self) -> Iterator[R]:
        return chain(self.waiting, *self.running.values())

    @property
    def num_running(self) -> int:
        """Requests that own KV."""
        return sum(map(len, self.running.values()))

    @property
    def num_on_host(self) -> int:
        """Running requests whose decode attention runs on the host or workers."""
        return sum(len(requests) for tier, requests in self.running.items() if tier.host_attends)

    @property
    def num_streamed(self) -> int:
        """Running requests whose KV is streamed to the device."""
        return sum(len(requests) for tier, requests in self.running.items() if tier.is_streamed)

    @property
    def has_moves(self) -> bool:
        """True if the current iteration contains moves."""
        return bool(self._moving)

    @property
    def placed(self) -> list[tuple[KVTier, R]]:
        return [(tier, request) for tier, requests in self.running.items() for request in requests]

    @property
    def max_context_tokens(self) -> int:
        """The longest context that some tier can hold alone."""
        return max(self.kv.capacity_tokens(tier) for tier in self.tiers)

    def typical_decodes(self, output_tokens: float) -> dict[KVTier, Decodes]:
        """Return the running requests per tier as decodes, each at least halfway through a mean output."""
        half = int(output_tokens / 2)
        return {
            tier: Decodes(len(running), sum(max(r.num_tokens, r.num_prompt_tokens + half) for r in running))
            for tier, running in self.running.items()
            if running
        }

    @property
    def less_preferred(self) -> list[KVTier]:
        """All tiers except the first, in order of preference; the worker with the least KV comes first."""
        return sorted(
            self.tiers[1:], key=lambda tier: 1 + self.kv.num_used_blocks(tier) if tier.is_remote else 0
        )

    def tier_of(self, request: R) -> KVTier:
        return self.kv.tier_of(request.request_id)

    def remove(self, request: R) -> None:
        """Remove a request and free its blocks."""
        if request.request_id in self.kv:
            self.running[self.tier_of(request)].remove(request)
            self.kv.free(request.request_id)
        else:
            self.waiting.remove(request)
        self.async_groups.drop(request)

    def check_async_groups(self, most_waits: int) -> None:
        """Restart async decodes whose KV moved; restart all after `most_waits` iterations without a step."""
        if self.async_groups.num_waits >= most_waits:
            self.restart_all_async()
        moved = {request.request_id for request in self.moved}
        for request in list(self.async_groups):
            if request.request_id not in self.kv or request.request_id in moved:
                self._restart_async(request)

    def restart_all_async(self) -> None:
        """Restart every async decode: its token must be computed from layer 0."""
        for request in list(self.async_groups):
            self._restart_async(request)
        self.async_groups.clear()

    def _restart_async(self, request: R) -> None:
        self.async_groups.drop(request)
        states, request_id = self.kv.states, request.request_id
        if states is not None and request_id in self.kv and states.is_planned(request_id):
            states.take_back(request_id)

    def start_moves(self) -> None:
        """Assign the pending moves to the iteration that starts now; moves of the last one are complete."""
        self._moving = self.moved
        self.copies, self.moved = [], []

    def end_moves(self) -> None:
        """Mark the KV moved by the current iteration, which succeeded, as complete and shareable."""
        moved_again = {request.request_id for request in self.moved}
        for request in self._moving:
            if request.request_id in self.kv and request.request_id not in moved_again:
                self.kv.arrived(request.request_id, request.block_hashes(self.kv.block_size))
        self._moving = []

    def make_room(self, may_spill: Callable[[R, KVTier], bool]) -> bool:
        """Allocate blocks for all tokens of every running request; evict the youngest where a tier is full.

        An evicted request moves to another tier that has room, or is preempted.

        Args:
            may_spill: returns True if the request may move to the given, less preferred tier.

        Returns:
            True if no request had to be preempted.
        """
        num_preemptions = self.counters.num_preemptions
        has_evicted = False
        for tier in self.tiers:
            for request in tuple(self.running[tier]):
                if request.is_complete:
                    continue
                # An eviction for an earlier request may have moved or preempted this one.
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

    def move(self, request: R, tier: KVTier) -> bool:
        """Move a request to another tier if one free block per running request remains there.

        Admission requires the same. The request then stays for at least `block_size` iterations.
        """
        source = self.tier_of(request)
        if source.host_attends and tier.host_attends:
            return False  # a copy has the device at one end
        hashes, reserve_blocks = request.block_hashes(self.kv.block_size), len(self.running[tier])
        copies = self.kv.move(request.request_id, tier, request.num_tokens, hashes, reserve_blocks)
        if copies is None:
            return False
        self.running[source].remove(request)
        insort(self.running[tier], request, key=attrgetter("arrival"))
        self.copies.extend(copies)
        self.moved.append(request)
        self.counters.num_moves += 1
        return True

    def may_have_room(self, request: R) -> bool:
        """Return False if no tier has room for a waiting request; True is a quick, optimistic guess."""
        num_blocks = self.kv.blocks_for(request.num_tokens)
        return any(
            num_blocks + len(self.running[tier]) <= self.kv.num_free_blocks(tier) for tier in self.tiers
        ) or bool(request.block_hashes(self.kv.block_size))

    def is_mostly_coming(self, tier: KVTier) -> bool:
        """True if another request is computing most of the prefix of the longest-waiting request.

        Waiting pays off then: the n outputs of a prompt arrive together and share the prefix.
        """
        request = self.waiting[0]
        hashes = request.block_hashes(self.kv.block_size)
        return self.kv.is_mostly_coming(request.num_tokens, hashes, tier)

    def admit(self, tier: KVTier) -> bool:
        """Allocate blocks for the longest-waiting request in a tier; return False if there are too few."""
        request = self.waiting[0]
        num_cached = self.kv.admit(
            request.request_id,
            request.num_tokens,
            request.block_hashes(self.kv.block_size),
            tier,
            # Each request in the tier may need one more block soon. If admission took the last one,
            # the next iteration would preempt a request.
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
        """Preempt all requests that a failed iteration was moving: their KV may be incomplete."""
        for request in (*self._moving, *self.moved):
            if request.request_id in self.kv:
                self._preempt(request)
        self.copies, self.moved, self._moving = [], [], []

    def close(self, tier: KVTier) -> None:
        """Close a tier: its KV is lost and its requests wait."""
        for request in tuple(self.running[tier]):
            self._preempt(request)
        self.kv.resize(tier, 0)

    def set_limit(self, tier: KVTier, num_blocks: int, may_spill: Callable[[R, KVTier], bool]) -> None:
        """Use only the first blocks of a tier; move or preempt the requests that hold others."""
        if self.kv.set_limit(tier, num_blocks):
            return
        for request in reversed(tuple(self.running[tier])):
            if self.kv.last_block(request.request_id) >= num_blocks:
                self._evict(request, may_spill)

    def is_drained(self, tier: KVTier) -> bool:
        """True if no request and no pending move uses blocks beyond the limit."""
        num_blocks = self.kv.size(tier).limit
        return self.kv.is_drained(tier) and not any(
            (copy.source == tier and copy.source_block >= num_blocks)
            or (copy.target == tier and copy.target_block >= num_blocks)
            for copy in self.copies
        )

    def least_blocks(self, tier: KVTier) -> int:
        """Return the number of blocks a tier must keep so that the oldest request can continue.

        That request is never preempted. The number includes some room to grow.
        """
        oldest = min(self, key=attrgetter("arrival"), default=None)
        if oldest is None:
            return 0
        num_blocks = self.kv.blocks_for(oldest.num_tokens)
        room_to_grow = num_blocks // 4 + 1
        if oldest.request_id in self.kv:
            is_here = self.tier_of(oldest) == tier
            return self.kv.last_block(oldest.request_id) + 1 + room_to_grow if is_here else 0
        largest = max(self.kv.tiers, key=lambda each: self.kv.size(each).most)
        return num_blocks + room_to_grow if tier == largest else 0

    def _evict(self, victim: R, may_spill: Callable[[R, KVTier], bool]) -> None:
        tier = self.tier_of(victim)
        for other in (self.tiers[0], *self.less_preferred):
            if other == tier or (other != self.tiers[0] and not may_spill(victim, other)):
                continue
            if self.move(victim, other):
                return
        self._preempt(victim)

    def _preempt(self, request: R) -> None:
        """Free a request's blocks and put it back into the waiting queue, in order of arrival."""
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.running[self.tier_of(request)].remove(request)
        self.kv.free(request.request_id)
        request.num_computed_tokens = 0
        request.iterations_waited = 0
        insort(self.waiting, request, key=attrgetter("arrival"))
