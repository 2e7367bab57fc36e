"""The load-aware scheduler: which tokens of which requests an iteration computes, and in which sub-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from neo_desktop.engine.batch import BlockCopy
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.placement import Batching, Place, Policy
from neo_desktop.engine.predict.cost_model import CostModel, ZeroCostModel
from neo_desktop.engine.predict.estimate import Load, costs_of, cpu_ms, device_attention_ms, iteration_ms
from neo_desktop.engine.request import RequestState
from neo_desktop.engine.schedule.balance import Balance, CpuQueue, Split, asymmetric, symmetric
from neo_desktop.engine.schedule.residency import Residency

PATIENCE = 128  # iterations that a CPU decode waits before it joins at any price
SMALLEST_CHUNK_TOKENS = 64  # of a prompt, where CPU decodes set the pace
BUDGET_GROWTH = 1 + 1 / 32  # of the tokens of an iteration, after the device had no memory for more
MAX_REREAD_SHARE = 0.12  # of an iteration with prompts that reading the weights again may take

R = TypeVar("R", bound=RequestState)


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
class Decision(Generic[R]):
    """What one iteration is to do, in terms of requests."""

    sub_batches: list[list[tuple[R, int]]]  # (request, how many tokens of it)
    cpu_decodes: list[R]  # those of them that the CPU attends for
    waiting_decodes: list[R]  # those that it could not: they wait for the next iteration
    copies: list[BlockCopy]
    split: Split
    load: Load  # sub-batch 0 without its CPU decodes
    predicted_ms: float
    predicted_cpu_ms: float  # of it, CPU attention of all layers
    is_graph: bool  # whether that is what a graph takes


@dataclass(slots=True)
class _Draft(Generic[R]):
    """An iteration in the making."""

    budget: int  # tokens that may still be added
    decodes: list[R] = field(default_factory=list)  # on the device
    chunks: list[tuple[R, int]] = field(default_factory=list)  # of prompts, in any place
    admitted: list[R] = field(default_factory=list)  # of those, new in the CPU-cache
    queue: list[R] = field(default_factory=list)  # decodes on the CPU, those that waited longest first
    load: Load = field(default_factory=Load)


class LoadAwareScheduler(Generic[R]):
    """Continuous batching over several places, as in NEO (section 3.2).

    NOTE on the algorithm. There is no prefill phase and no decode phase: a request has some tokens (prompt
    and output), some of them have their KV computed, and an iteration computes more of the rest. Each one:

    1. Room: every decode needs a slot for its new token. Where a place is full, its youngest request moves
       to another place that has room, or is preempted: its blocks are freed and it waits again, to be
       recomputed.
    2. The decodes of the device join sub-batch 0. If there is ample room on the device, the oldest requests
       of the CPU-cache move there, as many as the bus can bring behind the linear stages, at least one.
    3. Prompts join sub-batch 0, in the order of their arrival, cut into chunks by the token budget. Their KV
       stays on the device if it fits, else it goes to the CPU-cache layer by layer.
    4. CPU decodes join sub-batch 0 or 1, or wait: how many and where depends on the policy (`balance.py`).
       Those that waited longest come first.
    5. As long as the CPU has more decodes than it can do, no prompt joins the CPU-cache.
    6. The plan is compared with others by predicted throughput: the device alone, a single batch, …

    Pure bookkeeping: no tensors here, and blocks are counted by `KVCache` alone. `Scheduler` gives it the
    form that executors need; the simulator uses it as it is.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        policy: Policy,
        limits: SchedulerLimits,
        cost_model: CostModel | None = None,
    ) -> None:
        self._kv = kv_cache
        self._policy = policy
        self._limits = limits
        self._cost: CostModel = ZeroCostModel() if cost_model is None else cost_model
        self._residency: Residency[R] = Residency(kv_cache, policy.places)
        self._batch_tokens: float = limits.max_batch_tokens  # less while memory is short
        self._cpu_is_loaded = False  # whether CPU decodes had to wait in the last iteration
        self.counters = self._residency.counters

    @property
    def max_context_tokens(self) -> int:
        """The longest context that some place can hold alone."""
        return max(self._kv.capacity_tokens(place) for place in self._policy.places)

    @property
    def num_waiting(self) -> int:
        """Requests without KV."""
        return len(self._residency.waiting)

    @property
    def num_running(self) -> int:
        """Requests that own KV."""
        return self._residency.num_running

    @property
    def num_running_at(self) -> dict[Place, int]:
        """Requests that own KV, by where it lives."""
        return {place: len(requests) for place, requests in self._residency.running.items()}

    @property
    def running(self) -> list[tuple[Place, R]]:
        """Requests that own KV, and where it lives."""
        running = self._residency.running
        return [(place, request) for place, requests in running.items() for request in requests]

    def add(self, request: R) -> None:
        """Queue a request."""
        self._residency.waiting.append(request)

    def remove(self, request: R) -> None:
        """Forget a request and free its blocks."""
        self._residency.remove(request)

    def decide(self) -> Decision[R] | None:
        """Choose what the next iteration does; None when there is nothing to do.

        A decision that is not carried out is replaced by the next one: moves and admissions stay.
        """
        residency = self._residency
        has_room = residency.make_room(self._may_spill)
        # Requests that wait take free room first, unless the CPU has more to do than it can.
        if has_room and (self._cpu_is_loaded or not residency.waiting):
            self._promote()
        draft = self._draft_decodes()
        self._join_chunks(draft, may_admit=has_room)
        if not draft.load.tokens and not draft.queue:
            return None
        split = self._divide(draft)
        return self._decision(draft, split)

    def advance(self, decision: Decision[R]) -> list[R]:
        """Book an iteration as carried out; return those who get their next token by it, already counted."""
        self._residency.start_moves()
        for request in decision.waiting_decodes:
            request.num_skipped += 1
        for request in decision.cpu_decodes:
            request.num_skipped = 0
        self._cpu_is_loaded = bool(decision.waiting_decodes)
        self.counters.num_cpu_decodes += len(decision.cpu_decodes)
        self.counters.num_double_iterations += len(decision.sub_batches) == 2
        sampled = []
        for batch in decision.sub_batches:
            for request, num_tokens in batch:
                request.num_computed_tokens += num_tokens
                if request.num_computed_tokens == request.num_tokens:
                    request.num_tokens += 1
                    sampled.append(request)
        self._grow_budget()
        return sampled

    def _promote(self) -> None:
        """Move requests to the device, where there is room, for as long as that hides their way there."""
        layer_ms = self._cost.linear_ms(self.num_running)
        num_tokens = more = self._residency.promote_one()
        while more and self._cost.transfer_ms(num_tokens) < layer_ms:
            more = self._residency.promote_one()
            num_tokens += more

    def _draft_decodes(self) -> _Draft[R]:
        """Collect what can be decoded; sub-batch 0 gets what is on the device."""
        draft: _Draft[R] = _Draft(int(self._batch_tokens))
        for place, running in self._residency.running.items():
            decodes = [r for r in running if r.num_uncomputed_tokens == 1 and not r.is_complete]
            if place == Place.HOST:
                draft.queue = decodes
            else:
                draft.decodes = decodes[: draft.budget]
        if any(request.num_skipped for request in draft.queue):
            draft.queue.sort(key=attrgetter("num_skipped"), reverse=True)  # stable: then by arrival
        num_decodes = len(draft.decodes)
        draft.queue = draft.queue[: draft.budget - num_decodes]
        draft.budget -= num_decodes + len(draft.queue)
        draft.load = _decode_load([r.num_tokens for r in draft.decodes])
        return draft

    def _join_chunks(self, draft: _Draft[R], may_admit: bool) -> None:
        """Step 3: chunks of running prompts, then of waiting ones."""
        unfinished = [
            request
            for running in self._residency.running.values()
            for request in running
            if request.num_uncomputed_tokens > 1
        ]
        unfinished.sort(key=attrgetter("arrival"))
        residency = self._residency
        may_admit = may_admit and bool(residency.waiting) and residency.may_have_room(residency.waiting[0])
        if not unfinished and not may_admit:
            return
        if self._policy.batching is Batching.BEST and draft.queue:
            draft.budget = self._pace(draft)
        for request in unfinished:
            self._join_chunk(draft, request)
        while may_admit and draft.budget and residency.waiting:
            if self.num_running >= self._limits.max_batch_requests:
                break
            admitted = self._admit(draft)
            if admitted is None:
                break
            self._join_chunk(draft, admitted)

    def _join_chunk(self, draft: _Draft[R], request: R) -> None:
        num_tokens = min(request.num_uncomputed_tokens, draft.budget)
        if num_tokens == 0:
            return
        draft.budget -= num_tokens
        draft.chunks.append((request, num_tokens))
        self._add_chunk(draft.load, request, num_tokens)

    def _add_chunk(self, load: Load, request: R, num_tokens: int) -> None:
        start = request.num_computed_tokens
        load.tokens += num_tokens
        load.rows += num_tokens == request.num_uncomputed_tokens
        if num_tokens > 1:
            load.prefill_ms += self._cost.prefill_attention_ms(num_tokens, start)
        elif self._residency.place_of(request) == Place.HOST:  # for the kernels, a single token is a decode
            load.cpu_requests += 1
            load.cpu_context_tokens += start + 1
        else:
            load.gpu_requests += 1
            load.gpu_context_tokens += start + 1

    def _admit(self, draft: _Draft[R]) -> R | None:
        """Let the request that waited longest live in the first place that has room for it."""
        residency = self._residency
        request = residency.waiting[0]
        best, *others = residency.places
        if residency.admit(best):
            return request
        can_wait = request.num_tokens < self._kv.capacity_tokens(best)
        for place in others:
            if (not can_wait or self._cpu_has_time(draft, request)) and residency.admit(place):
                draft.admitted.append(request)
                return request
        return None

    def _cpu_has_time(self, draft: _Draft[R], request: R) -> bool:
        """Step 5 for `auto`: whether the CPU could hide one more decode, this prompt's, and whether it pays.

        What it hides behind is an iteration with a chunk of a prompt if more prompts wait, without one
        otherwise. Nothing is gained either if the bus takes longer for the prompt than the device does.
        """
        if self._policy.batching is not Batching.BEST:
            return True
        on_cpu, on_device = [r.num_tokens for r in draft.queue], [r.num_tokens for r in draft.decodes]
        for prompt, _ in draft.chunks:
            soon = on_cpu if self._residency.place_of(prompt) == Place.HOST else on_device
            soon.append(prompt.num_tokens)
        on_cpu.append(request.num_tokens)
        load = _decode_load(on_device)
        num_chunk_tokens = self._least_chunk_tokens() if len(self._residency.waiting) > 1 else 0
        load.tokens += num_chunk_tokens
        cost = costs_of(self._cost, load.with_cpu_decodes(len(on_cpu), sum(on_cpu)))
        space_ms = cost.linear_ms(load.tokens) + cost.linear_ms(len(on_cpu)) + device_attention_ms(cost, load)
        needed_ms = cpu_ms(cost, Load(cpu_requests=len(on_cpu), cpu_context_tokens=sum(on_cpu)))
        num_tokens = min(request.num_tokens, draft.budget)
        bus_ms = self._cost.transfer_ms(num_tokens + self._swapped_tokens(draft))
        if needed_ms > space_ms or bus_ms > self._cost.linear_ms(draft.load.tokens + num_tokens):
            return False
        return self._cpu_pays(load, num_chunk_tokens, on_cpu)

    def _cpu_pays(self, load: Load, num_chunk_tokens: int, contexts: Sequence[int]) -> bool:
        """Whether the best plan takes the decodes of a CPU that is as full as the device hides.

        A few decodes alone never make up for reading the weights a second time, but they must come before
        the many.
        """
        mean = sum(contexts) // len(contexts)
        cost = costs_of(self._cost, load.with_cpu_decodes(len(contexts), sum(contexts)))
        space_ms = 2 * cost.linear_ms(load.tokens) + device_attention_ms(cost, load)
        one_ms = cpu_ms(cost, Load(cpu_requests=1, cpu_context_tokens=mean))
        num_full = int(space_ms / one_ms) if one_ms else self._limits.max_batch_requests
        num_full = min(max(num_full, len(contexts)), self._limits.max_batch_requests)
        worth_ms = self._chunks_worth_ms(num_chunk_tokens, 0.0)
        split, _ = self._balance(load, mean).best(load, worth_ms, CpuQueue([mean] * num_full))
        return bool(split.first or split.second)

    def _may_spill(self, victim: R) -> bool:
        """Whether a request for which the device has no room may go to the CPU-cache, rather than wait."""
        best = self._policy.places[0]
        if self._policy.batching is not Batching.BEST or victim.num_tokens >= self._kv.capacity_tokens(best):
            return True
        load = _decode_load([r.num_tokens for r in self._residency.running[best] if r is not victim])
        return self._cpu_pays(load, 0, [victim.num_tokens])

    def _least_chunk_tokens(self) -> int:
        """Return how many prompt tokens should join at least beside CPU decodes.

        A second sub-batch reads the weights once more: next to a large chunk that costs little.
        """
        token_ms = self._token_ms()
        if token_ms <= 0:
            return self._limits.max_batch_tokens
        return min(int(self._cost.linear_ms(1) / token_ms / MAX_REREAD_SHARE), self._limits.max_batch_tokens)

    def _pace(self, draft: _Draft[R]) -> int:
        """Return how many prompt tokens join beside CPU decodes.

        A large chunk makes CPU decodes wait for the device; a small one makes the device read its weights
        for little work. So: as many as keep the device busy for as long as the CPU is, but not so few that
        the weights are most of the work.
        """
        tokens = self._least_chunk_tokens()
        num_decodes, num_cpu = len(draft.decodes), len(draft.queue)
        context_tokens = sum(request.num_tokens for request in draft.queue)
        missing_ms = (
            cpu_ms(self._cost, Load(cpu_requests=num_cpu, cpu_context_tokens=context_tokens))
            - self._cost.linear_ms(num_cpu)
            - device_attention_ms(self._cost, draft.load)
        )
        while tokens < draft.budget and self._cost.linear_ms(num_decodes + tokens) < missing_ms:
            tokens += SMALLEST_CHUNK_TOKENS
        return min(tokens, draft.budget)

    def _divide(self, draft: _Draft[R]) -> Split:
        """Steps 4 to 6."""
        queue = CpuQueue([request.num_tokens for request in draft.queue])
        swapped = self._swapped_tokens(draft)
        match self._policy.batching:
            case Batching.ONE:
                return Split((), tuple(range(len(queue))), iteration_ms(self._cost, draft.load), False)
            case Batching.SYMMETRIC:
                return symmetric(self._cost, draft.load, queue, swapped)
            case Batching.ASYMMETRIC:
                return self._divide_asymmetric(draft, queue, swapped)
            case Batching.BEST:
                must_decode = bool(draft.queue) and draft.queue[0].num_skipped >= PATIENCE
                balance = self._balance(draft.load, draft.queue[0].num_tokens if draft.queue else 1)
                num_chunk_tokens = sum(tokens for _, tokens in draft.chunks)
                worth_ms = self._chunks_worth_ms(num_chunk_tokens, draft.load.prefill_ms)
                return balance.best(draft.load, worth_ms, queue, swapped, must_decode)[0]

    def _divide_asymmetric(self, draft: _Draft[R], queue: CpuQueue, swapped: int) -> Split:
        is_due = [request.num_skipped >= PATIENCE for request in draft.queue]
        split = asymmetric(self._cost, draft.load, queue, is_due, swapped)

        def num_decodes(of: Split) -> int:
            return len(of.first) + len(of.second)

        # Step 5: the CPU has enough to do; fewer prompts join it as long as it hides all the same.
        while draft.admitted and num_decodes(split) < len(queue):
            request = draft.admitted.pop()
            chunks = [chunk for chunk in draft.chunks if chunk[0] is not request]
            shorter = _decode_load([r.num_tokens for r in draft.decodes])
            for chunk in chunks:
                self._add_chunk(shorter, *chunk)
            new_split = asymmetric(self._cost, shorter, queue, is_due, swapped)
            if num_decodes(new_split) < num_decodes(split):
                break
            draft.load, draft.chunks, split = shorter, chunks, new_split
            self._residency.withdraw(request)

        # Step 6, with NEO's measure: requests over time.
        if num_decodes(split) and draft.load.tokens and not any(is_due):
            alone_ms = iteration_ms(self._cost, draft.load, None, swapped)
            num_alone = len(draft.decodes) + len(draft.chunks)
            if num_alone * split.predicted_ms > (num_alone + num_decodes(split)) * alone_ms:
                return Split((), (), alone_ms, False)
        if not num_decodes(split) and not draft.load.tokens:
            # Nothing for the CPU to hide behind: waiting would not help anybody.
            return symmetric(self._cost, draft.load, queue, swapped)
        return split

    def _swapped_tokens(self, draft: _Draft[R]) -> int:
        """Tokens whose KV crosses the bus in this iteration, beside that of CPU decodes."""
        moved = len(self._residency.copies) * self._kv.block_size
        return moved + sum(tokens for r, tokens in draft.chunks if self._residency.place_of(r) == Place.HOST)

    def _balance(self, load: Load, other_context_tokens: int) -> Balance:
        """What a decode is worth: its share of an iteration of the device's decodes alone.

        Args:
            other_context_tokens: the context of the single decode in it where the device has none.
        """
        requests = load.gpu_requests
        alone = Load(requests, requests, 0.0, requests, load.gpu_context_tokens)
        if not requests:
            alone = Load(1, 1, 0.0, 1, other_context_tokens)
        return Balance(self._cost, iteration_ms(self._cost, alone) / alone.gpu_requests)

    def _chunks_worth_ms(self, num_tokens: int, prefill_ms: float) -> float:
        """What prompt tokens are worth: the time that they add to a large batch on the device."""
        return self._cost.num_layers * (num_tokens * self._token_ms() + prefill_ms)

    def _token_ms(self) -> float:
        """What one more token adds to the linear stages of a layer in a large batch."""
        large = self._limits.max_batch_tokens
        return (self._cost.linear_ms(large) - self._cost.linear_ms(large // 2)) / (large - large // 2)

    def _decision(self, draft: _Draft[R], split: Split) -> Decision[R]:
        first = [draft.queue[i] for i in split.first]
        second = [draft.queue[i] for i in split.second]
        sub_batches = [draft.chunks + [(r, 1) for r in draft.decodes] + [(r, 1) for r in first]]
        if second:
            sub_batches.append([(r, 1) for r in second])
        joined = {*split.first, *split.second}
        contexts = [(len(part), sum(r.num_tokens for r in part)) for part in (first, second)]
        other = Load().with_cpu_decodes(*contexts[1]) if second else None
        load = draft.load.with_cpu_decodes(*contexts[0])
        cost = costs_of(self._cost, load, other, self._swapped_tokens(draft))
        attention_ms = sum(cost.cpu_attention_ms(*each) for each in contexts)
        return Decision(
            sub_batches=sub_batches,
            cpu_decodes=[*second, *first],
            waiting_decodes=[request for i, request in enumerate(draft.queue) if i not in joined],
            copies=self._residency.copies,
            split=split,
            load=draft.load,
            predicted_ms=split.predicted_ms,
            predicted_cpu_ms=attention_ms * self._cost.num_layers,
            is_graph=cost is not self._cost,
        )

    def _grow_budget(self) -> None:
        """After memory was short, return to the full budget: in 23 steps to twice as much.

        If the memory does not come back, so many iterations pass between two that fail.
        """
        self._batch_tokens = min(self._batch_tokens * BUDGET_GROWTH, self._limits.max_batch_tokens)


def _decode_load(contexts: Sequence[int]) -> Load:
    """Return the load of decodes on the device."""
    num = len(contexts)
    return Load(tokens=num, rows=num, gpu_requests=num, gpu_context_tokens=sum(contexts))
