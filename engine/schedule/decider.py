"""What an iteration does: which tokens of whom it computes, where their KV lies, in which sub-batch."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from neo_desktop.engine.batch import MAX_ASYNC_DECODES, BlockCopy, IterationTiming
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import CostModel, ZeroCostModel
from neo_desktop.engine.predict.estimate import NO_DECODES, BatchShape, Decodes, predict, timing_of
from neo_desktop.engine.predict.estimate import joined as joined_decodes
from neo_desktop.engine.request import RequestState
from neo_desktop.engine.schedule.async_groups import AsyncGroups
from neo_desktop.engine.schedule.batch_builder import BatchBuilder, HostQueue, SchedulerLimits
from neo_desktop.engine.schedule.partition import Partition
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.schedule.request_queues import RequestQueues
from neo_desktop.engine.schedule.steady_state import SteadyState, SteadyStateFinder, Workload
from neo_desktop.engine.schedule.workload_stats import WorkloadStats

TIMEOUT = 128  # iterations that a decode on the host waits before it joins at any price
MOST_WAITS = 16  # iterations that take nobody along who goes at their own pace; then their tokens begin again
USED_SHARE = 0.95  # of a tier's memory: requests leave room for others to grow
BUDGET_GROWTH = 1 + 1 / 32  # of the tokens of an iteration, after the device had no memory for more

R = TypeVar("R", bound=RequestState)


@dataclass(slots=True)
class Decision(Generic[R]):
    """What one iteration is to do, in terms of requests."""

    sub_batches: list[list[tuple[R, int]]]  # (request, how many tokens of it)
    host_decodes: list[R]  # those of them that the host attends for
    waiting_decodes: list[R]  # that neither host nor bus had time for: they wait for the next iteration
    copies: list[BlockCopy]
    shapes: tuple[BatchShape, ...]  # of the sub-batches
    moved_tokens: int  # whose KV crosses the bus beside them
    predicted: IterationTiming
    new_async: list[R] = field(default_factory=list)  # who begins to go at his own pace
    async_decodes: Mapping[KVTier, Decodes] = field(default_factory=dict)  # all who go on by a layer

    @property
    def is_async_step(self) -> bool:
        """Whether anybody does."""
        return bool(self.async_decodes)


@dataclass(slots=True)
class _Chosen(Generic[R]):
    """Those who take part, or may."""

    decodes: list[R] = field(default_factory=list)  # that the device attends for
    queue: list[R] = field(default_factory=list)  # that the host attends for, who waited longest first
    streamed: list[R] = field(default_factory=list)  # whose KV comes to the device: who may join, as above
    unfinished: list[R] = field(default_factory=list)  # prompts that live somewhere
    chunks: list[tuple[R, int]] = field(default_factory=list)  # of prompts, old and new


class Decider(Generic[R]):
    """Continuous batching over several tiers, as in NEO (section 3.2).

    NOTE on the algorithm. There is no prefill phase and no decode phase: a request has some tokens (prompt
    and output), some of them have their KV computed, and an iteration computes more of the rest. Each one:

    1. Room: every decode needs a slot for its new token. Where a tier is full, its youngest request moves
       to another tier that has room, or is preempted: its blocks are freed and it waits again, to be
       recomputed.
    2. The decodes that the device attends for join sub-batch 0. If there is ample room in the preferred
       tier, the oldest requests of others move there, as many as the bus can bring behind the linear stages,
       at least one.
    3. Prompts join sub-batch 0, in the order of their arrival, cut into chunks by the token budget. Their KV
       stays in the preferred tier if it fits, else it goes to another one layer by layer.
       So do decodes whose KV lies in host memory, if it comes to the device behind the layers' work.
    4. Decodes that the host attends for join sub-batch 0 or 1, run asynchronously (`AsyncGroups`) or wait.
       The decodes that waited longest come first.
    5. As long as the host has more decodes than it can do, no prompt joins it.
    6. The plan is compared with others by predicted throughput: the device alone, a single batch, …

    What is not the same for all is up to the `Policy`: who moves in step 1, how much of the prompts joins in
    step 3, steps 4 to 6.

    Pure bookkeeping: no tensors here, and blocks are counted by `KVCache` alone. `Scheduler` gives it the
    form that executors need; the simulator uses it as it is.

    Args:
        kv_cache: has memory in the places of the policy; what it does not know of is not used.
        num_layers: of the model; None: as many as the cost model was measured with.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        policy: Policy,
        limits: SchedulerLimits,
        cost_model: CostModel | None = None,
        num_layers: int | None = None,
    ) -> None:
        self._cost: CostModel = ZeroCostModel() if cost_model is None else cost_model
        tiers = tuple(tier for tier in policy.tiers if tier in kv_cache.tiers)
        self.queues: RequestQueues[R] = RequestQueues(kv_cache, tiers)
        self.async_groups: AsyncGroups[R] = AsyncGroups(num_layers or self._cost.num_layers)
        self._workload_stats = WorkloadStats()
        self._kv = kv_cache
        self._policy = policy
        self._limits = limits
        self._steady_states = SteadyStateFinder(self._cost)
        self._batch_tokens: float = limits.max_batch_tokens  # less while memory is short
        self._refused: tuple[int, ...] | None = None  # whom the policy admits nowhere, and in which situation
        self.waits_for_prompt = (
            False  # whether a request waits for what another computes, which it will share
        )
        self._is_behind = False  # whether decodes had to wait for host or bus in the last iteration

    @property
    def is_short_of_memory(self) -> bool:
        """Whether iterations are smaller than they may be, since the device had no memory for more."""
        return self._batch_tokens < self._limits.max_batch_tokens

    def add(self, request: R) -> None:
        """Let a request wait for memory."""
        self.queues.add(request)
        self._workload_stats.add(request.num_prompt_tokens)

    def remove(self, request: R) -> None:
        """Forget a request that has ended, and free its blocks."""
        self.queues.remove(request)
        self.async_groups.drop(request)
        self._workload_stats.end()

    def set_limit(self, tier: KVTier, num_blocks: int) -> None:
        """Use only the first blocks of a tier."""
        self.queues.set_limit(tier, num_blocks, self._may_spill)
        self._refused = None

    def shrink_to(self, num_tokens: int) -> None:
        """Make iterations smaller for a while: the device had no memory for more."""
        self._batch_tokens = max(num_tokens, 1)

    def decide(self) -> Decision[R] | None:
        """Choose what the next iteration does; None when there is nothing to do.

        A decision that is not carried out is replaced by the next one: moves and admissions stay.
        """
        queues = self.queues
        self.waits_for_prompt = False
        has_room = queues.make_room(self._may_spill)  # 1
        # Requests that wait take free room first, unless host or bus have more to do than they can.
        if has_room and (self._is_behind or not queues.waiting):
            self._promote()  # 2
        self._check_async_groups()
        chosen, builder = self._collect_decodes()
        self._join_chunks(chosen, builder, may_admit=has_room)  # 3, 5
        self._join_streamed(chosen, builder)
        if not builder.shape.tokens and not chosen.queue:
            if not len(self.async_groups):
                # Who had to give way for want of room begins again, if nobody else is there.
                return None if has_room or not self.queues.waiting else self.decide()
            self.async_groups.clear()  # nothing is left that they could go along with
            chosen, builder = self._collect_decodes()
        return self._decision(chosen, builder, self._policy.partition(builder))  # 4, 6

    def advance(self, decision: Decision[R]) -> list[R]:
        """Book an iteration as carried out; return those who get their next token by it, already counted."""
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
        """Let tokens begin again of those whose KV is elsewhere now, or of all if nobody takes them along."""
        if self.async_groups.num_waits >= MOST_WAITS:
            self.async_groups.clear()
        moved = {request.request_id for request in self.queues.moved}
        for request in list(self.async_groups):
            if request.request_id not in self._kv or request.request_id in moved:
                self.async_groups.drop(request)

    def _steady_state(self) -> SteadyState:
        """Return what is best in the long run for requests like those that there were."""
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
        """Return how many requests like those that came a tier has memory for."""
        if tier is None or not self._kv.capacity_tokens(tier):
            return 0
        return max(int(USED_SHARE * self._kv.capacity_tokens(tier) / self._workload_stats.context_tokens), 1)

    def _num_on_host(self) -> int:
        running = self.queues.running
        return sum(len(requests) for tier, requests in running.items() if tier.host_attends)

    def _may_spill(self, victim: R, tier: KVTier) -> bool:
        """Whether a request may go on in a less preferred tier; one that fits nowhere else must."""
        best = self.queues.tiers[0]
        if victim.num_tokens >= self._kv.capacity_tokens(best):
            return True
        rest = [request.num_tokens for request in self.queues.running[best] if request is not victim]
        builder = self._builder({best: Decodes(len(rest), sum(rest))} if rest else {})
        builder.residents = self.queues.typical_decodes(self._workload_stats.output_tokens)
        return self._policy.spills(builder, tier, victim.num_tokens)

    def _promote(self) -> None:
        """Move requests to the preferred tier, if it has room, as long as that hides their way there.

        If nothing moves, one that the host attends for moves to where KV is swapped, if it will hide there.
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
        """Return an iteration with decodes that the device attends for."""
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
        """Step 2: sub-batch 0 gets what the device attends for; the rest of what can be decoded queues up."""
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
        """Let those swapped decodes join whose KV comes while the device is busy.

        Those at the front of the memory come first, once nobody has waited too long: so the blocks that come
        lie together, and few copies bring them.
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
        """Step 3: chunks of running prompts, then of waiting ones."""
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
        """Let the request that waited longest live in the first place that has room for it."""
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
        """Let it live there, unless another is about to compute its beginning there or in a tier before."""
        self.waits_for_prompt = self.waits_for_prompt or self.queues.is_mostly_coming(tier)
        return not self.waits_for_prompt and self.queues.admit(tier)

    def _decision(self, chosen: _Chosen[R], builder: BatchBuilder, partition: Partition) -> Decision[R]:
        first, second = ([chosen.queue[i] for i in part] for part in (partition.first, partition.second))
        joined = {*partition.first, *partition.second}
        rest = [request for i, request in enumerate(chosen.queue) if i not in joined]
        num_first_chunks = len(chosen.chunks) - partition.num_chunks_second
        chunks, second_chunks = chosen.chunks[:num_first_chunks], chosen.chunks[num_first_chunks:]
        sub_batches = [chunks + [(r, 1) for r in chosen.decodes] + [(r, 1) for r in first]]
        if second or second_chunks:
            sub_batches.append(second_chunks + [(r, 1) for r in second])
        # What a prompt's last token is asked for may be more than the next one.
        may_begin = [request for request in rest if request.num_tokens > request.num_prompt_tokens]
        new_async = self._new_async(may_begin, partition, builder.async_decodes)
        async_decodes = NO_DECODES
        if partition.num_async:
            async_decodes = joined_decodes(builder.async_decodes, self._decodes_of(new_async))
        shapes = partition.shapes
        return Decision(
            new_async=new_async,
            async_decodes=async_decodes,
            sub_batches=sub_batches,
            host_decodes=[*second, *first],
            waiting_decodes=[request for request in rest if request not in new_async] + chosen.streamed,
            copies=self.queues.copies,
            shapes=shapes,
            moved_tokens=builder.moved_tokens,
            predicted=self._predicted(partition, builder, async_decodes),
        )

    def _predicted(
        self, partition: Partition, builder: BatchBuilder, async_decodes: Mapping[KVTier, Decodes]
    ) -> IterationTiming:
        """Predict it as it is: a split reckons with as many at their own pace as there could be."""
        if async_decodes:
            return predict(
                self._cost, *partition.shapes, moved_tokens=builder.moved_tokens, async_decodes=async_decodes
            )
        return timing_of(self._cost, partition.predicted_ms, partition.shapes)

    def _new_async(
        self, requests: Iterable[R], partition: Partition, under_way: Mapping[KVTier, Decodes]
    ) -> list[R]:
        """Return who joins those at their own pace, so that all layers have about as many of them."""
        room = {
            tier: count - under_way[tier].requests if tier in under_way else count
            for tier, count in partition.async_decodes.items()
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
        found: dict[KVTier, Decodes] = {}
        for request in requests:
            tier = self.queues.tier_of(request)
            count, context_tokens = found.get(tier, (0, 0))
            found[tier] = Decodes(count + 1, context_tokens + request.num_tokens)
        return found

    def _grow_budget(self) -> None:
        """After memory was short, return to the full budget: in 23 steps to twice as much.

        If the memory does not come back, so many iterations pass between two that fail.
        """
        self._batch_tokens = min(self._batch_tokens * BUDGET_GROWTH, self._limits.max_batch_tokens)


def _iterations_waited(item: tuple[KVTier, RequestState]) -> int:
    return item[1].iterations_waited
