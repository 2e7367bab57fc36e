"""Decisions of the scheduler: tokens, KV tiers and sub-batches per iteration."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from neo_desktop.engine.batch import MAX_ASYNC_DECODES, BlockCopy, IterationTiming
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import ZERO, TableCostModel
from neo_desktop.engine.predict.estimate import (
    NO_DECODES,
    BatchShape,
    Decodes,
    IterationShape,
    joined,
    predict,
)
from neo_desktop.engine.request import RequestState
from neo_desktop.engine.schedule.async_groups import AsyncGroups
from neo_desktop.engine.schedule.batch_builder import BatchBuilder, HostQueue, SchedulerLimits
from neo_desktop.engine.schedule.partition import Partition
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.schedule.request_queues import RequestQueues
from neo_desktop.engine.schedule.steady_state import SteadyState, SteadyStateFinder, Workload
from neo_desktop.engine.schedule.workload_stats import WorkloadStats

TIMEOUT = 128  # iterations that a host decode waits before it joins at any cost
MOST_WAITS = 16  # iterations without an async step before async decodes in flight are restarted
USED_SHARE = 0.95  # of a tier's memory; the rest lets requests grow
BUDGET_GROWTH = 1 + 1 / 32  # per iteration, after an iteration failed for lack of device memory

R = TypeVar("R", bound=RequestState)


@dataclass(slots=True)
class Decision(Generic[R]):
    """The content of one iteration, in terms of requests."""

    sub_batches: list[list[tuple[R, int]]]  # (request, tokens to compute)
    host_decodes: list[R]  # scheduled decodes attended by the host
    waiting_decodes: list[R]  # decodes without host or bus time, left for the next iteration
    copies: list[BlockCopy]
    shape: IterationShape
    predicted: IterationTiming
    new_async: list[R] = field(default_factory=list)  # decodes that become async decodes
    is_async_step: bool = False  # async decodes advance by a layer


@dataclass(slots=True)
class _Chosen(Generic[R]):
    """Candidates for the iteration, and those chosen."""

    decodes: list[R] = field(default_factory=list)  # attended by the device
    queue: list[R] = field(default_factory=list)  # attended by the host, longest wait first
    streamed: list[R] = field(default_factory=list)  # candidates with streamed KV, longest wait first
    unfinished: list[R] = field(default_factory=list)  # running requests with prompt tokens left
    chunks: list[tuple[R, int]] = field(default_factory=list)  # of prompts, running and new


class Decider(Generic[R]):
    """Continuous batching over several tiers, as in NEO (section 3.2).

    NOTE on the algorithm. There is no prefill phase and no decode phase: a request has tokens (prompt and
    output), the KV of some is computed, and an iteration computes more of the rest. Each iteration:

    1. Room: every decode needs a slot for its new token. If a tier is full, its youngest request moves to
       another tier with room, or is preempted: its blocks are freed, and it waits to be recomputed.
    2. Decodes attended by the device join sub-batch 0. If the preferred tier has ample room, the oldest
       requests of other tiers move there: as many as the bus can transfer behind the linear stages, but at
       least one.
    3. Prompts join sub-batch 0 in order of arrival, cut into chunks by the token budget. Their KV stays in
       the preferred tier if it fits. Otherwise it goes to another tier, layer by layer. Streamed decodes join
       sub-batch 0 if the bus can transfer their KV behind the layers' work.
    4. Decodes attended by the host join sub-batch 0 or 1, run asynchronously (`AsyncGroups`) or wait. The
       decodes that waited longest come first.
    5. While the host has more decodes than it has time for, no prompt is admitted to its tier.
    6. The plan competes with others by predicted throughput: the device alone, a single batch, …

    The `Policy` decides what differs between papers: victims in step 1, prefill tokens in step 3, steps 4-6.

    The decider does bookkeeping only: no tensors, and `KVCache` alone counts blocks. `Scheduler` turns
    decisions into plans for executors; the simulator uses them directly.

    Args:
        kv_cache: tiers of the policy that it lacks are not used.
        num_layers: of the model; None: the cost model's.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        policy: Policy,
        limits: SchedulerLimits,
        cost_model: TableCostModel | None = None,
        num_layers: int | None = None,
    ) -> None:
        self._cost: TableCostModel = ZERO if cost_model is None else cost_model
        tiers = tuple(tier for tier in policy.tiers if tier in kv_cache.tiers)
        self.queues: RequestQueues[R] = RequestQueues(kv_cache, tiers)
        self.async_groups: AsyncGroups[R] = AsyncGroups(num_layers or self._cost.num_layers)
        self._workload_stats = WorkloadStats()
        self._kv = kv_cache
        self._policy = policy
        self._limits = limits
        self._steady_states = SteadyStateFinder(self._cost)
        self._batch_tokens: float = limits.max_batch_tokens  # less while memory is short
        self._refused: tuple[int, ...] | None = None  # cache key of the last admission the policy refused
        # True if a request waits for a prefix that another request computes.
        self.waits_for_prompt = False
        self._is_behind = False  # decodes had to wait for host or bus in the last iteration

    @property
    def is_short_of_memory(self) -> bool:
        """True if the batch limit is reduced because the device ran out of memory."""
        return self._batch_tokens < self._limits.max_batch_tokens

    def add(self, request: R) -> None:
        self.queues.add(request)
        self._workload_stats.add(request.num_prompt_tokens)

    def remove(self, request: R) -> None:
        """Remove a finished request and free its blocks."""
        self.queues.remove(request)
        self.async_groups.drop(request)
        self._workload_stats.end()

    def set_limit(self, tier: KVTier, num_blocks: int) -> None:
        self.queues.set_limit(tier, num_blocks, self._may_spill)
        self._refused = None

    def shrink_to(self, num_tokens: int) -> None:
        """Reduce the batch limit for a while, because the device ran out of memory."""
        self._batch_tokens = max(num_tokens, 1)

    def decide(self) -> Decision[R] | None:
        """Choose the work of the next iteration; return None if there is none.

        The next call replaces a decision that was not carried out. Its moves and admissions remain.
        """
        queues = self.queues
        self.waits_for_prompt = False
        has_room = queues.make_room(self._may_spill)  # 1
        # Waiting requests take free room first, unless host or bus have more work than time.
        if has_room and (self._is_behind or not queues.waiting):
            self._promote()  # 2
        self._check_async_groups()
        chosen, builder = self._collect_decodes()
        self._join_chunks(chosen, builder, may_admit=has_room)  # 3, 5
        self._join_streamed(chosen, builder)
        if not builder.shape.tokens and not chosen.queue:
            if not len(self.async_groups):
                # Nothing is running: retry admission of the requests just preempted.
                return None if has_room or not self.queues.waiting else self.decide()
            self.async_groups.clear()  # no iteration is left for them to join
            chosen, builder = self._collect_decodes()
        return self._decision(chosen, builder, self._policy.partition(builder))  # 4, 6

    def advance(self, decision: Decision[R]) -> list[R]:
        """Record a decision as carried out; return the requests that get a token, counted already."""
        self.queues.start_moves()
        for request in decision.waiting_decodes:
            request.iterations_waited += 1
        self.async_groups.num_waits += 1
        self._is_behind = bool(decision.waiting_decodes)
        counters = self.queues.counters
        counters.num_cpu_decodes += len(decision.host_decodes)
        counters.num_double_iterations += len(decision.sub_batches) == 2
        sampled = []
        for batch in decision.sub_batches:
            for request, num_tokens in batch:
                request.iterations_waited = 0
                request.num_computed_tokens += num_tokens
                if request.num_computed_tokens == request.num_tokens:
                    request.num_tokens += 1
                    sampled.append(request)
        for request in self.async_groups.turn(decision.new_async) if decision.is_async_step else ():
            request.iterations_waited = 0
            request.num_computed_tokens += 1
            request.num_tokens += 1
            sampled.append(request)
            counters.num_cpu_decodes += 1
            counters.num_async_decodes += 1
        self._workload_stats.count_tokens(len(sampled))
        self._grow_budget()
        return sampled

    def _check_async_groups(self) -> None:
        """Restart async decodes whose KV moved; restart all after `MOST_WAITS` iterations without a step."""
        if self.async_groups.num_waits >= MOST_WAITS:
            self.async_groups.clear()
        moved = {request.request_id for request in self.queues.moved}
        for request in list(self.async_groups):
            if request.request_id not in self._kv or request.request_id in moved:
                self.async_groups.drop(request)

    def _steady_state(self) -> SteadyState:
        """Return the best steady state for requests of average length."""
        queues, most = self.queues, self._most_in
        context_tokens = self._workload_stats.context_tokens
        there = min(queues.num_running + len(queues.waiting), self._limits.max_batch_requests)
        device = next((tier for tier in queues.tiers if not tier.host_attends), None)
        host = next((tier for tier in queues.tiers if tier.cpu_attends), None)
        workers = [tier for tier in queues.tiers if tier.is_remote]
        streamed = next((tier for tier in queues.tiers if tier.is_streamed and tier != device), None)
        most_on_device = min(most(device), there)
        return self._steady_states.best(
            Workload(
                device,
                host,
                most_on_device,
                min(most(host), there - most_on_device),
                self._workload_stats.prompt_tokens,
                context_tokens,
                self._workload_stats.prompt_tokens / self._workload_stats.output_tokens,
                self._limits.max_batch_tokens,
                self._limits.max_token_ms,
                tuple(
                    (tier, count) for tier in workers if (count := min(most(tier), there - most_on_device))
                ),
                most_streamed=min(most(streamed), there - most_on_device),
                most_elsewhere=there - most_on_device,
            )
        )

    def _most_in(self, tier: KVTier | None) -> int:
        """Return how many requests of average length a tier has memory for."""
        if tier is None or not self._kv.capacity_tokens(tier):
            return 0
        return max(int(USED_SHARE * self._kv.capacity_tokens(tier) / self._workload_stats.context_tokens), 1)

    def _num_on_host(self) -> int:
        running = self.queues.running
        return sum(len(requests) for tier, requests in running.items() if tier.host_attends)

    def _may_spill(self, victim: R, tier: KVTier) -> bool:
        """Return True if a request may move to a less preferred tier; it must if it fits nowhere else."""
        best = self.queues.tiers[0]
        if victim.num_tokens >= self._kv.capacity_tokens(best):
            return True
        rest = [request.num_tokens for request in self.queues.running[best] if request is not victim]
        builder = self._builder({best: Decodes(len(rest), sum(rest))} if rest else {})
        builder.residents = self.queues.typical_decodes(self._workload_stats.output_tokens)
        return self._policy.spills(builder, tier, victim.num_tokens)

    def _promote(self) -> None:
        """Move requests to the preferred tier, while it has room and the linear stages hide the copies.

        If nothing moves, one request of the host moves to the streamed tier, if its KV can stream unnoticed.
        """
        best, *others = self.queues.tiers
        layer_ms, num_tokens = self._cost.linear_ms(self.queues.num_running), 0
        while not num_tokens or self._cost.transfer_ms(num_tokens) < layer_ms:
            request = self.queues.next_to_promote(best)
            if request is None or not self.queues.promote(request, best):
                break
            num_tokens += request.num_tokens
        for tier in others:
            if tier.is_streamed and not self.queues.copies:
                request = self.queues.next_to_promote(tier)
                if request is not None and self._may_stream(request, tier):
                    self.queues.promote(request, tier)

    def _may_stream(self, request: R, tier: KVTier) -> bool:
        builder = self._builder({})
        builder.residents = self.queues.typical_decodes(self._workload_stats.output_tokens)
        return self._policy.admits(builder, tier, request.num_tokens)

    def _builder(self, decodes: dict[KVTier, Decodes]) -> BatchBuilder:
        """Return a batch builder with these decodes, which the device attends for."""
        shape = BatchShape().plus(decodes)
        moved_tokens = len(self.queues.copies) * self._kv.block_size
        return BatchBuilder(
            self._cost,
            self._limits,
            int(self._batch_tokens) - shape.tokens,
            shape,
            moved_tokens=moved_tokens,
            num_waiting=len(self.queues.waiting),
            mean_prompt_tokens=self._workload_stats.prompt_tokens,
            num_running=self.queues.num_running,
            num_on_host=self._num_on_host(),
            most_on_device=self._most_in(self.queues.tiers[0]),
            num_streamed=sum(len(r) for tier, r in self.queues.running.items() if tier.is_streamed),
            steady_state=self._steady_state() if self._policy.needs_steady_state else None,
        )

    def _collect_decodes(self) -> tuple[_Chosen[R], BatchBuilder]:
        """Step 2: decodes attended by the device join sub-batch 0, all other decodes queue up."""
        chosen: _Chosen[R] = _Chosen()
        queue: list[tuple[KVTier, R]] = []
        streamed: list[R] = []
        at_device: dict[KVTier, Decodes] = {}
        for tier, running in self.queues.running.items():
            decodes = [r for r in running if r.num_tokens - r.num_computed_tokens == 1 and not r.is_complete]
            if len(decodes) < len(running):
                chosen.unfinished += [r for r in running if r.num_uncomputed_tokens > 1]
            if tier.host_attends:
                queue += [(tier, r) for r in decodes if r not in self.async_groups]
            elif tier.is_streamed:
                streamed += decodes
            elif decodes:
                decodes = decodes[: int(self._batch_tokens) - len(chosen.decodes)]
                chosen.decodes += decodes
                at_device[tier] = Decodes(len(decodes), sum([request.num_tokens for request in decodes]))
        builder = self._builder(at_device)
        builder.async_decodes = self._decodes_of(self.async_groups)
        queue.sort(key=_iterations_waited, reverse=True)  # stable
        del queue[builder.budget :]
        chosen.queue = [request for _, request in queue]
        builder.queue = HostQueue([(tier, request.num_tokens) for tier, request in queue])
        builder.num_starved = bisect_right(queue, -TIMEOUT, key=lambda item: -_iterations_waited(item))
        builder.budget -= len(queue)
        streamed.sort(key=lambda request: -request.iterations_waited)
        chosen.streamed = streamed[: builder.budget]
        builder.budget -= len(chosen.streamed)
        return chosen, builder

    def _join_streamed(self, chosen: _Chosen[R], builder: BatchBuilder) -> None:
        """Add the streamed decodes whose KV the bus can transfer while the device is busy.

        Starved requests come first, then requests in order of their last block. The streamed blocks are thus
        close together in memory, and few copies transfer them.
        """
        if not chosen.streamed:
            return
        num_starved = bisect_right(chosen.streamed, -TIMEOUT, key=lambda request: -request.iterations_waited)
        last_block = {id(r): self._kv.last_block(r.request_id) for r in chosen.streamed}
        chosen.streamed[num_starved:] = sorted(chosen.streamed[num_starved:], key=lambda r: last_block[id(r)])
        decodes = [(self.queues.tier_of(r), r.num_tokens) for r in chosen.streamed]
        positions = set(self._policy.swap(builder, decodes, num_starved))
        builder.shape = builder.shape.plus(HostQueue(decodes).decodes(sorted(positions)))
        chosen.decodes += [request for i, request in enumerate(chosen.streamed) if i in positions]
        chosen.streamed = [request for i, request in enumerate(chosen.streamed) if i not in positions]

    def _join_chunks(self, chosen: _Chosen[R], builder: BatchBuilder, may_admit: bool) -> None:
        """Step 3: add chunks of running prompts, then of waiting ones."""
        queues = self.queues
        chosen.unfinished.sort(key=attrgetter("arrival"))
        may_admit = may_admit and bool(queues.waiting) and queues.may_have_room(queues.waiting[0])
        if not chosen.unfinished and not may_admit:
            return
        builder.budget = self._policy.prefill_budget(builder)
        for request in chosen.unfinished:
            self._join_chunk(chosen, builder, request)
        while may_admit and builder.budget and queues.waiting:
            request = queues.waiting[0]
            if queues.num_running >= self._limits.max_batch_requests or not self._admit(builder, request):
                break
            self._join_chunk(chosen, builder, request)

    def _join_chunk(self, chosen: _Chosen[R], builder: BatchBuilder, request: R) -> None:
        num_tokens = min(request.num_uncomputed_tokens, builder.budget)
        if builder.most_per_prompt is not None:
            num_tokens = min(num_tokens, builder.most_per_prompt)
        if num_tokens:
            chosen.chunks.append((request, num_tokens))
            tier = self.queues.tier_of(request)
            builder.add_chunk(tier, num_tokens, request.num_computed_tokens, request.num_tokens)

    def _admit(self, builder: BatchBuilder, request: R) -> bool:
        """Admit the longest-waiting request to the first tier that has room."""
        builder.num_waiting = len(self.queues.waiting)
        builder.num_on_host = self._num_on_host()
        best = self.queues.tiers[0]
        if self._admit_to(best):
            return True
        if self.waits_for_prompt:
            return False
        others = self.queues.less_preferred
        if request.num_tokens < self._kv.capacity_tokens(best):  # it can wait
            state = request.arrival, self.queues.num_running, len(builder.queue), len(builder.chunks)
            if state == self._refused:
                return False
            if any(tier.is_streamed for tier in others):
                builder.residents = self.queues.typical_decodes(self._workload_stats.output_tokens)
            others = [tier for tier in others if self._policy.admits(builder, tier, request.num_tokens)]
            self._refused = None if others else state
        return any(self._admit_to(tier) for tier in others)

    def _admit_to(self, tier: KVTier) -> bool:
        """Admit to this tier, unless another request is computing the prefix there or in an earlier tier."""
        self.waits_for_prompt = self.waits_for_prompt or self.queues.is_mostly_coming(tier)
        return not self.waits_for_prompt and self.queues.admit(tier)

    def _decision(self, chosen: _Chosen[R], builder: BatchBuilder, partition: Partition) -> Decision[R]:
        first, second = ([chosen.queue[i] for i in part] for part in (partition.first, partition.second))
        taken = {*partition.first, *partition.second}
        rest = [request for i, request in enumerate(chosen.queue) if i not in taken]
        num_first_chunks = len(chosen.chunks) - partition.num_chunks_second
        chunks, second_chunks = chosen.chunks[:num_first_chunks], chosen.chunks[num_first_chunks:]
        sub_batches = [chunks + [(r, 1) for r in chosen.decodes] + [(r, 1) for r in first]]
        if second or second_chunks:
            sub_batches.append(second_chunks + [(r, 1) for r in second])
        # The last token of a prompt may need more than the next token, for example log-probabilities.
        may_begin = [request for request in rest if request.num_tokens > request.num_prompt_tokens]
        new_async = self._new_async(may_begin, partition, builder.async_decodes)
        # A partition assumes the highest possible number of async decodes.
        async_decodes = NO_DECODES
        if partition.num_async:
            async_decodes = joined(builder.async_decodes, self._decodes_of(new_async))
        shape = partition.shape._replace(async_decodes=async_decodes)
        return Decision(
            new_async=new_async,
            is_async_step=bool(async_decodes),
            sub_batches=sub_batches,
            host_decodes=[*second, *first],
            waiting_decodes=[request for request in rest if request not in new_async] + chosen.streamed,
            copies=self.queues.copies,
            shape=shape,
            predicted=predict(self._cost, shape),
        )

    def _new_async(
        self, requests: Iterable[R], partition: Partition, under_way: Mapping[KVTier, Decodes]
    ) -> list[R]:
        """Return the decodes that become async decodes, spread evenly over the layers."""
        room = {
            tier: count - under_way[tier].requests if tier in under_way else count
            for tier, (count, _) in partition.shape.async_decodes.items()
        }
        most = min(-(-partition.num_async // self.async_groups.num_layers), MAX_ASYNC_DECODES)
        new_async: list[R] = []
        for request in requests:
            if len(new_async) >= most:
                break
            tier = self.queues.tier_of(request)
            if room.get(tier, 0) > 0:
                room[tier] -= 1
                new_async.append(request)
        return new_async

    def _decodes_of(self, requests: Iterable[R]) -> Mapping[KVTier, Decodes]:
        decodes: dict[KVTier, Decodes] = {}
        for request in requests:
            tier = self.queues.tier_of(request)
            count, context_tokens = decodes.get(tier, (0, 0))
            decodes[tier] = Decodes(count + 1, context_tokens + request.num_tokens)
        return decodes

    def _grow_budget(self) -> None:
        """Raise a reduced batch limit again: it doubles in 23 steps.

        If the memory stays short, 23 iterations pass between two failures.
        """
        self._batch_tokens = min(self._batch_tokens * BUDGET_GROWTH, self._limits.max_batch_tokens)


def _iterations_waited(item: tuple[KVTier, RequestState]) -> int:
    return item[1].iterations_waited
