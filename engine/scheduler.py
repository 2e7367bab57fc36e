"""Decides at every iteration which tokens of which requests are computed, and where their KV lives."""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from neo_desktop.engine.batch import (
    BlockCopy,
    IterationPlan,
    IterationResult,
    ScheduledSequence,
    SubBatch,
)
from neo_desktop.engine.kv_cache import KVCache
from neo_desktop.engine.placement import Place, Policy
from neo_desktop.engine.request import FinishReason, Request, RequestOutput


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on one iteration."""

    max_batch_tokens: int  # tokens in the linear stages; longer prompts are prefilled in chunks
    max_batch_requests: int  # requests that run at the same time

    def __post_init__(self) -> None:
        if self.max_batch_requests < 1 or self.max_batch_tokens < self.max_batch_requests:
            raise ValueError(
                "max_batch_requests must be at least 1 and max_batch_tokens at least max_batch_requests, got "
                f"{self.max_batch_requests} and {self.max_batch_tokens}"
            )


@dataclass(slots=True)
class SchedulerCounters:
    """What happened since the start."""

    num_preemptions: int = 0
    num_moves: int = 0  # requests whose KV was brought to another place
    num_prompt_tokens: int = 0  # computed or reused
    num_cached_tokens: int = 0  # reused
    num_output_tokens: int = 0


class Scheduler:
    """Continuous batching: requests join and leave at every iteration.

    NOTE on the algorithm. There is no prefill phase and no decode phase. A request has some tokens
    (prompt and output) and some of them have their KV computed; an iteration computes more of the rest.
    Each iteration:

    1. Running requests, oldest first, get as many of their uncomputed tokens as the token budget allows: one
       for a decode, a chunk for a prompt. A decode may need one more block. If its place has none, the
       request moves to the next place of the policy that has room; if none has, the youngest running request
       of the same place is preempted: its blocks are freed and it waits again, to be recomputed later. The
       oldest request can never be preempted by others, so every request ends.
    2. One request that lives in a less preferred place moves up when there is ample room.
    3. Waiting requests are admitted in the order of their arrival while budget and blocks last. A prompt gets
       blocks for all its tokens at once: prefills in flight never fight over memory.

    Pure bookkeeping: no tensors here, and blocks are counted by `KVCache` alone.
    """

    def __init__(self, kv_cache: KVCache, policy: Policy, limits: SchedulerLimits) -> None:
        self._kv = kv_cache
        self._policy = policy
        self._limits = limits
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()  # by arrival
        self._running: list[Request] = []  # by arrival
        self.counters = SchedulerCounters()

    @property
    def max_context_tokens(self) -> int:
        """The longest context that some place can hold alone."""
        return max(self._kv.capacity_tokens(place) for place in self._policy.places)

    @property
    def num_waiting(self) -> int:
        """Requests without KV."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that own KV."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, owner_id: str) -> list[RequestOutput]:
        """End all outputs of a request now and free their blocks; nothing happens if there are none left."""
        requests = [request for request in self._requests.values() if request.owner_id == owner_id]
        return [self._finish(request, FinishReason.ABORT) for request in requests]

    def fail(self, plan: IterationPlan, error: str) -> list[RequestOutput]:
        """End the requests of an iteration that could not be carried out."""
        requests = [self._requests[sequence.request_id] for sequence in plan.sequences]
        return [self._finish(request, FinishReason.ERROR, error) for request in requests]

    def schedule(self) -> IterationPlan | None:
        """Plan the next iteration; None when there is nothing to do."""
        budget = self._limits.max_batch_tokens
        copies: list[BlockCopy] = []
        scheduled: list[ScheduledSequence] = []

        num_preempted = self.counters.num_preemptions
        running = tuple(self._running)
        for index, request in enumerate(running):
            # A chunk of a prompt leaves a token for everybody behind it: no decode waits for a prefill.
            num_behind = len(running) - index - 1
            num_tokens = min(request.num_uncomputed_tokens, budget - num_behind)
            if self._make_room(request, request.num_computed_tokens + num_tokens, copies):
                scheduled.append(self._sequence(request, num_tokens))
                budget -= num_tokens

        if self.counters.num_preemptions == num_preempted:
            self._promote_one(copies, scheduled)
            while self._waiting and budget and len(self._running) < self._limits.max_batch_requests:
                request = self._waiting[0]
                if not self._admit(request):
                    break
                num_tokens = min(request.num_uncomputed_tokens, budget)
                scheduled.append(self._sequence(request, num_tokens))
                budget -= num_tokens

        if not scheduled:
            return None
        # One order for all readers: by place; there, prompts before decodes.
        order = {place: rank for rank, place in enumerate(self._policy.places)}
        scheduled.sort(key=lambda sequence: (order[sequence.place], sequence.is_decode))
        return IterationPlan((SubBatch(tuple(scheduled)),), tuple(copies))

    def update(self, plan: IterationPlan, result: IterationResult) -> list[RequestOutput]:
        """Take in what an iteration brought; return what each of its requests gained."""
        outputs = []
        for sequence in plan.sequences:
            request = self._requests.get(sequence.request_id)
            if request is None:  # aborted while the iteration ran
                continue
            if sequence.request_id in result.failed:
                outputs.append(self._finish(request, FinishReason.ERROR, result.failed[sequence.request_id]))
                continue
            request.num_computed_tokens = sequence.context_len
            self._kv.commit(request.request_id, request.token_ids, request.num_computed_tokens)
            if sequence.sampling is not None:
                request.append(result.sampled[sequence.request_id])
                self.counters.num_output_tokens += 1
                if request.is_finished:
                    self._forget(request)
                outputs.append(request.take_output())
        return outputs

    def _sequence(self, request: Request, num_tokens: int) -> ScheduledSequence:
        start = request.num_computed_tokens
        return ScheduledSequence(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids[start : start + num_tokens]),
            start=start,
            place=self._kv.place_of(request.request_id),
            block_table=self._kv.block_table(request.request_id),
            sampling=request.sampling_input() if start + num_tokens == request.num_tokens else None,
        )

    def _make_room(self, request: Request, num_tokens: int, copies: list[BlockCopy]) -> bool:
        """Make the request's table cover `num_tokens`; False when the request is preempted instead."""
        while request.request_id in self._kv:
            if self._kv.extend(request.request_id, num_tokens):
                return True
            place = self._kv.place_of(request.request_id)
            for other in self._policy.places:
                if other is not place and self._move(request, other, num_tokens, copies):
                    return True
            # The running requests are in order of arrival, and those after this one are not planned yet.
            self._preempt(next(r for r in reversed(self._running) if self._place(r) is place))
        return False

    def _promote_one(self, copies: list[BlockCopy], scheduled: list[ScheduledSequence]) -> None:
        """Move the oldest request that lives in a less preferred place up, if there is ample room.

        Ample is a quarter of the place left free after the move: it will not be moved back soon. Requests
        that wait for admission would take the room at once, so while there are any, nobody moves.
        """
        best = self._policy.places[0]
        if self._waiting:
            return
        for index, sequence in enumerate(scheduled):
            if sequence.place is best:
                continue
            request = self._requests[sequence.request_id]
            num_left = self._kv.num_free_blocks(best) - self._kv.blocks_for(request.num_tokens)
            if num_left * self._kv.block_size >= self._kv.capacity_tokens(best) // 4:
                self._move(request, best, sequence.context_len, copies)
                scheduled[index] = self._sequence(request, len(sequence.token_ids))
            return

    def _move(self, request: Request, place: Place, num_tokens: int, copies: list[BlockCopy]) -> bool:
        moved = self._kv.move(request.request_id, place, num_tokens)
        if moved is None:
            return False
        copies.extend(moved)
        self.counters.num_moves += 1
        return True

    def _admit(self, request: Request) -> bool:
        """Give the oldest waiting request blocks in the first place that has room for it."""
        for place in self._policy.places:
            # Each request there may need one more block soon: admitting the last block away would only
            # preempt somebody in the next iteration.
            num_neighbours = sum(self._place(other) is place for other in self._running)
            num_cached = self._kv.admit(request.request_id, request.token_ids, place, num_neighbours)
            if num_cached is not None:
                break
        else:
            return False
        self._waiting.popleft()
        insort(self._running, request, key=attrgetter("arrival"))
        request.num_computed_tokens = num_cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
            self.counters.num_prompt_tokens += len(request.prompt_token_ids)
            self.counters.num_cached_tokens += num_cached
        return True

    def _preempt(self, request: Request) -> None:
        """Free a request's blocks and let it wait, before everybody who came later."""
        self._kv.free(request.request_id)
        self._running.remove(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        insort(self._waiting, request, key=attrgetter("arrival"))

    def _place(self, request: Request) -> Place:
        return self._kv.place_of(request.request_id)

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestOutput:
        request.finish(reason, error)
        self._forget(request)
        return request.take_output()

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.request_id in self._kv:
            self._running.remove(request)
            self._kv.free(request.request_id)
        else:
            self._waiting.remove(request)
