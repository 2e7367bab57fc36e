"""The scheduler: from requests to plans, and from results back to requests."""

from collections import deque
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from neo_desktop.engine.batch import (
    UNKNOWN_TOKEN,
    AsyncGroup,
    IterationPlan,
    IterationResult,
    ScheduledSequence,
    SubBatch,
)
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.request import FinishReason, Request, RequestOutput
from neo_desktop.engine.schedule.batch_builder import SchedulerLimits
from neo_desktop.engine.schedule.decider import Decider, Decision
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.schedule.request_queues import RequestQueues

__all__ = ["Scheduler", "SchedulerLimits"]

MOST_SHRINKS = 32  # many more than halvings down to a single token need


class _Scheduled(NamedTuple):
    """A request's share of a running iteration."""

    request: Request
    sequence: ScheduledSequence
    num_preemptions: int  # of the request, when the iteration started
    is_last: bool  # it computes the request's last known token: a token or the pooled states follow
    is_on_its_way: bool  # its async decode continues in later iterations


class Scheduler:
    """Turns the decisions of a `Decider` into plans, and applies results to requests."""

    def __init__(
        self,
        kv_cache: KVCache,
        policy: Policy,
        limits: SchedulerLimits,
        cost_model: TableCostModel | None = None,
        num_layers: int | None = None,
    ) -> None:
        self._kv = kv_cache
        self._decider: Decider[Request] = Decider(kv_cache, policy, limits, cost_model, num_layers)
        self._queues: RequestQueues[Request] = self._decider.queues
        self.counters = self._queues.counters
        self._requests: dict[str, Request] = {}
        self._under_way: deque[list[_Scheduled]] = deque()  # the current iterations: one, or two
        self._stays_on_device = False  # the newest one
        self._ahead: Decision[Request] | None = None
        self._num_shrinks = 0  # consecutive iterations that ran out of device memory

    @property
    def is_short_of_memory(self) -> bool:
        """True if the batch limit is reduced because the device ran out of memory."""
        return self._decider.is_short_of_memory

    @property
    def max_context_tokens(self) -> int:
        """The longest context that some tier can hold alone."""
        return self._queues.max_context_tokens

    @property
    def num_waiting(self) -> int:
        """Requests without KV."""
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        """Requests that own KV."""
        return self._queues.num_running

    @property
    def num_running_at(self) -> dict[KVTier, int]:
        """Number of running requests per KV tier."""
        return self._queues.num_running_at

    @property
    def running(self) -> list[tuple[KVTier, Request]]:
        """Running requests with their KV tiers."""
        running = self._queues.running
        return [(tier, request) for tier, requests in running.items() for request in requests]

    @property
    def async_request_ids(self) -> frozenset[str]:
        """IDs of the requests with an async decode in flight."""
        return frozenset(request.request_id for request in self._decider.async_groups)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._decider.add(request)
        self._ahead = None  # otherwise the request would miss the next iteration

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._decider.remove(request)

    def schedule(self) -> IterationPlan | None:
        """Plan the next iteration; return None if there is nothing to do.

        From now on its tokens count as computed, and its outputs as pending. Call `update`, `fail` or
        `shrink` before the next plan.
        """
        decision, self._ahead = self._without_ended(self._ahead), None
        decision = decision or self._decider.decide()
        return None if decision is None else self._plan(decision, is_ahead=False)

    def look_ahead(self, *, may_start: bool = False) -> IterationPlan | None:
        """Decide on the next iteration during the current one, as if no request finished in it.

        Args:
            may_start: the next iteration may start before the current one ends, if both run on the device
                alone and no sampler needs a pending token.

        Returns:
            The plan if the iteration is to start now; only decodes qualify. Prompts wait: more requests may
            arrive, and the start hardly matters for iterations that long. Requests that turn out to have
            finished are computed in vain.
        """
        self._ahead = decision = self._without_ended(self._ahead) or self._decider.decide()
        if not may_start or decision is None or len(self._under_way) != 1 or not self._can_start(decision):
            return None
        self._ahead = None
        return self._plan(decision, is_ahead=True)

    def _can_start(self, decision: Decision[Request]) -> bool:
        members = [item for batch in decision.sub_batches for item in batch]
        under_way = {scheduled.request.request_id for scheduled in self._under_way[0]}
        return (
            self._stays_on_device
            and not decision.copies
            and not decision.is_async_step
            and all(
                num_tokens == 1
                and request.num_uncomputed_tokens == 1
                and self._queues.tier_of(request).stays_on_device
                and not (request.needs_tokens and request.request_id in under_way)
                for request, num_tokens in members
            )
        )

    def _plan(self, decision: Decision[Request], *, is_ahead: bool) -> IterationPlan:
        plan = IterationPlan(
            tuple(SubBatch(tuple(self._sequences(batch))) for batch in decision.sub_batches),
            tuple(decision.copies),
            decision.predicted,
            is_ahead,
            self._async_decodes(decision) if decision.is_async_step else (),
        )
        on_their_way = {
            each.request_id for stage in plan.async_decodes[:-1] for each in stage if each is not None
        }
        requests = [self._requests[sequence.request_id] for sequence in plan.all_sequences]
        self._under_way.append(
            [
                _Scheduled(
                    request,
                    sequence,
                    request.num_preemptions,
                    is_last=sequence.sampling is not None
                    or (sequence.num_pooled > 0 and sequence.context_len == request.num_tokens),
                    is_on_its_way=sequence.request_id in on_their_way,
                )
                for request, sequence in zip(requests, plan.all_sequences, strict=True)
            ]
        )
        self._stays_on_device = plan.stays_on_device
        self._decider.advance(decision)
        return plan

    def _without_ended(self, decision: Decision[Request] | None) -> Decision[Request] | None:
        """Remove finished requests from a decision; return None if nothing remains."""
        if decision is None:
            return None
        batches = [[item for item in batch if not item[0].is_finished] for batch in decision.sub_batches]
        decision.sub_batches = [batch for batch in batches if batch]
        decision.host_decodes = [request for request in decision.host_decodes if not request.is_finished]
        decision.new_async = [request for request in decision.new_async if not request.is_finished]
        if not decision.new_async and not len(self._decider.async_groups):
            decision.is_async_step = False
        if not decision.sub_batches and decision.is_async_step:
            decision.sub_batches = [[]]
        return decision if decision.sub_batches else None

    def _async_decodes(self, decision: Decision[Request]) -> tuple[AsyncGroup, ...]:
        """Return the decodes that advance by a layer, grouped by the linear stage that they join."""
        stages = self._decider.async_groups.stages(decision.new_async)
        return tuple(
            tuple(
                None if request is None else self._sequence(request, 1, is_sampled=stage is stages[-1])
                for request in stage
            )
            for stage in stages
        )

    def _sequences(self, batch: Iterable[tuple[Request, int]]) -> Iterator[ScheduledSequence]:
        """Yield a sub-batch in the order that all readers expect: by tier, then prompts before decodes."""
        rank = {tier: index for index, tier in enumerate(self._queues.tiers)}
        placed = [(self._queues.tier_of(request), request, num_tokens) for request, num_tokens in batch]
        placed.sort(key=lambda item: (rank[item[0]], item[2] == 1))
        for _, request, num_tokens in placed:
            is_last = request.num_computed_tokens + num_tokens == request.num_tokens
            yield self._sequence(request, num_tokens, is_sampled=is_last and not request.is_pooled)

    def _sequence(self, request: Request, num_tokens: int, *, is_sampled: bool) -> ScheduledSequence:
        start = request.num_computed_tokens
        is_known = start + num_tokens <= len(request.token_ids)
        token_ids = request.token_ids[start : start + num_tokens]
        return ScheduledSequence(
            request_id=request.request_id,
            token_ids=tuple(token_ids) if is_known else (*token_ids, UNKNOWN_TOKEN),
            start=start,
            tier=self._queues.tier_of(request),
            block_table=self._kv.block_table(request.request_id),
            sampling=request.sampling_input() if is_sampled else None,
            num_pooled=request.num_pooled(num_tokens) if request.is_pooled else 0,
        )

    def update(self, result: IterationResult) -> list[Request]:
        """Apply the result of the oldest iteration; return the requests that gained a token or finished."""
        gained = []
        self._queues.end_moves()
        moving = {request.request_id for request in self._queues.moved}  # their KV is still incomplete
        block_size = self._kv.block_size
        for request, sequence, num_preemptions, is_last, is_on_its_way in self._end_iteration():
            if is_on_its_way:
                continue
            if sequence.request_id in result.failed:
                self._finish(request, FinishReason.ERROR, result.failed[sequence.request_id])
                gained.append(request)
                continue
            if sequence.sampling is not None:
                request.append(result.sampled[sequence.request_id])
                self.counters.num_output_tokens += 1
                gained.append(request)
            if sequence.num_pooled:
                request.pool(result.pooled[sequence.request_id], is_first=sequence.start == 0)
            if is_last and sequence.sampling is None:
                request.finish(FinishReason.STOP)
                gained.append(request)
            has_news = sequence.context_len // block_size > sequence.start // block_size  # a block is full
            is_there = request.num_preemptions == num_preemptions and request.request_id not in moving
            if is_there and (has_news or request.is_finished):
                self._kv.commit(request.request_id, request.block_hashes(block_size), sequence.context_len)
                if self._decider.waits_for_prompt:  # it may wait for these blocks
                    self._ahead = None
            if request.is_finished:
                self.remove(request)
        self._num_shrinks = 0
        return gained

    def _end_iteration(self) -> "list[_Scheduled]":
        """Remove the oldest iteration; return its parts whose requests have not finished since."""
        ended = self._under_way.popleft() if self._under_way else []
        return [scheduled for scheduled in ended if not scheduled.request.is_finished]

    def abort(self, owner_id: str) -> list[RequestOutput]:
        """End all outputs of a request now and free their blocks; do nothing if none is left."""
        requests = [request for request in self._requests.values() if request.owner_id == owner_id]
        for request in requests:
            self._finish(request, FinishReason.ABORT)
        return [request.take_output() for request in requests]

    def fail(self, error: str) -> list[RequestOutput]:
        """End the requests of the current iteration, which failed."""
        requests = [scheduled.request for scheduled in self._end_iteration()]
        for request in requests:
            self._finish(request, FinishReason.ERROR, error)
        self._give_up_moves()
        return [request.take_output() for request in requests]

    def shrink(self) -> bool:
        """Discard the current iteration, which ran out of memory, and plan smaller ones.

        Returns:
            False if no smaller iteration is possible; the caller must `fail` then.
        """
        num_tokens = sum(len(scheduled.sequence.token_ids) for scheduled in self._under_way[0])
        self._num_shrinks += 1
        if (num_tokens == 1 and not self._queues.has_moves) or self._num_shrinks > MOST_SHRINKS:
            return False
        self._decider.shrink_to(num_tokens // 2)
        self.take_back()
        self._give_up_moves()
        return True

    def lose(self, tier: KVTier) -> None:
        """Discard the current iteration and close a tier whose KV is lost.

        Its requests wait and are recomputed, in other tiers until this one is open again.
        """
        self.take_back()
        self._give_up_moves()
        self._queues.close(tier)

    def open(self, tier: KVTier, num_blocks: int) -> None:
        """Reopen a lost tier, which is empty."""
        self._ahead = None
        self._queues.open(tier, num_blocks)

    def set_limit(self, tier: KVTier, num_blocks: int) -> None:
        """Use only the first blocks of a tier; no iteration may be running.

        Requests that hold other blocks move to another tier in the next iteration, or wait to be recomputed.

        Args:
            num_blocks: whole runs, or all blocks of the tier.
        """
        assert not self._under_way
        self._ahead = None
        self._decider.set_limit(tier, num_blocks)

    def is_drained(self, tier: KVTier) -> bool:
        """True if the blocks beyond the limit are unused; no iteration may be running."""
        return self._queues.is_drained(tier, self._kv.size(tier).limit)

    def least_blocks(self, tier: KVTier) -> int:
        """Return the number of blocks a tier must keep so that the oldest request can continue.

        That request is never preempted. The number includes some room to grow.
        """
        oldest = min(self._requests.values(), key=attrgetter("arrival"), default=None)
        if oldest is None:
            return 0
        num_blocks = self._kv.blocks_for(oldest.num_tokens)
        room_to_grow = num_blocks // 4 + 1
        if oldest.request_id in self._kv:
            is_here = self._queues.tier_of(oldest) == tier
            return self._kv.last_block(oldest.request_id) + 1 + room_to_grow if is_here else 0
        largest = max(self._kv.tiers, key=lambda each: self._kv.size(each).most)
        return num_blocks + room_to_grow if tier == largest else 0

    def refuse_first(self, why: str) -> list[RequestOutput]:
        """End the longest-waiting request, because no remaining tier can hold it."""
        request = self._queues.waiting[0]
        self._finish(request, FinishReason.ERROR, why)
        return [request.take_output()]

    def take_back(self) -> None:
        """Discard the newest iteration: its requests return to their state before it."""
        undone = self._under_way.pop()
        if any(scheduled.is_on_its_way for scheduled in undone):
            self._decider.async_groups.clear()
        for request, sequence, num_preemptions, is_last, _ in undone:
            if is_last:
                request.num_tokens -= 1
            if request.num_preemptions == num_preemptions:
                request.num_computed_tokens = sequence.start
        self._ahead = None

    def _give_up_moves(self) -> None:
        self._ahead = None
        self._queues.give_up_moved()

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        request.finish(reason, error)
        self.remove(request)
