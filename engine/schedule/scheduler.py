"""The scheduler: from requests to plans, and from results back to requests."""

from collections import deque
from collections.abc import Sequence
from typing import Generic

from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import ZERO, TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes
from neo_desktop.engine.request import FinishReason, R, Request, RequestOutput
from neo_desktop.engine.schedule.batch_builder import BatchBuilder, SchedulerLimits
from neo_desktop.engine.schedule.iteration_builder import Decision, IterationBuilder
from neo_desktop.engine.schedule.plans import Scheduled, can_plan_ahead, plan_of, without_ended
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.schedule.request_queues import RequestQueues
from neo_desktop.engine.schedule.speculation import Speculation
from neo_desktop.engine.schedule.steady_state import SteadyStateFinder
from neo_desktop.engine.schedule.workload_stats import WorkloadStats
from neo_desktop.engine.stats import SpeculationStats

__all__ = ["Scheduler", "SchedulerLimits"]

MOST_WAITS = 16  # iterations without an async step before async decodes in flight are restarted
BUDGET_GROWTH = 1 + 1 / 32  # per iteration, after an iteration failed for lack of device memory
MOST_SHRINKS = 32  # many more than halvings down to a single token need


class Scheduler(Generic[R]):
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

    It does bookkeeping only: no tensors, and `KVCache` alone counts blocks. The engine drives it with plans
    and results; the simulator uses `decide` and `advance` alone, with requests that have lengths only.

    Args:
        kv_cache: tiers of the policy that it lacks are not used.
        num_layers: of the model; None: the cost model's.
        speculation: adds drafts to iterations; None: no drafts.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        policy: Policy,
        limits: SchedulerLimits,
        cost_model: TableCostModel | None = None,
        num_layers: int | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._cost = ZERO if cost_model is None else cost_model
        tiers = tuple(tier for tier in policy.tiers if tier in kv_cache.tiers)
        self.queues: RequestQueues[R] = RequestQueues(kv_cache, tiers, num_layers or self._cost.num_layers)
        self.counters = self.queues.counters
        self._workload_stats = WorkloadStats()
        self._kv = kv_cache
        self._policy = policy
        self._limits = limits
        self._speculation = speculation
        self._kept = None if speculation is None else speculation.kept
        self._steady_states = SteadyStateFinder(self._cost)
        self._batch_tokens: float = limits.max_batch_tokens  # less while memory is short
        self._is_behind = False  # decodes had to wait for host or bus in the last iteration
        self._under_way: deque[list[Scheduled]] = deque()  # the current iterations: one, or two
        self._ahead: Decision[R] | None = None
        self._planned: tuple[Decision[R], IterationPlan, list[Scheduled]] | None = None  # by `look_ahead`
        self._has_removed = False  # requests since that decision
        self._num_shrinks = 0  # consecutive iterations that ran out of device memory

    @property
    def is_short_of_memory(self) -> bool:
        """True if the batch limit is reduced because the device ran out of memory."""
        return self._batch_tokens < self._limits.max_batch_tokens

    @property
    def speculative(self) -> SpeculationStats | None:
        """Counters of speculation; None: no speculation."""
        return None if self._speculation is None else self._speculation.stats

    def add(self, request: R) -> None:
        self.queues.waiting.append(request)
        self._workload_stats.add(request.num_prompt_tokens)
        self._ahead = None  # otherwise the request would miss the next iteration

    def remove(self, request: R) -> None:
        self._has_removed = True
        self.queues.remove(request)
        self._workload_stats.end()

    def decide(self) -> Decision[R] | None:
        """Choose the work of the next iteration; return None if there is none.

        The next call replaces a decision that was not carried out. Its moves and admissions remain.
        """
        queues = self.queues
        self._has_removed = False
        queues.waits_for_prompt = False
        has_room = queues.make_room(self._may_spill)  # 1
        # Waiting requests take free room first, unless host or bus have more work than time.
        if has_room and (self._is_behind or not queues.waiting):
            self._promote()  # 2
        queues.check_async_groups(MOST_WAITS)
        iteration = self._new_iteration()
        iteration.join_chunks(has_room, self._limits.max_batch_requests)  # 3, 5
        iteration.join_streamed()
        if iteration.is_empty:
            if not len(queues.async_groups):
                # Nothing is running: retry admission of the requests just preempted.
                return None if has_room or not queues.waiting else self.decide()
            queues.restart_all_async()  # no iteration is left for them to join
            iteration = self._new_iteration()
        return iteration.decision()  # 4, 6

    def advance(self, decision: Decision[R]) -> list[R]:
        """Record a decision as carried out; return the requests that get a token, counted already."""
        queues, counters = self.queues, self.counters
        queues.start_moves()
        for request in decision.waiting_decodes:
            request.iterations_waited += 1
        queues.async_groups.num_waits += 1
        self._is_behind = bool(decision.waiting_decodes)
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
        for request in queues.async_groups.turn(decision.new_async) if decision.is_async_step else ():
            request.iterations_waited = 0
            request.num_computed_tokens += 1
            request.num_tokens += 1
            sampled.append(request)
            counters.num_cpu_decodes += 1
            counters.num_async_decodes += 1
        self._workload_stats.count_tokens(len(sampled))
        # A reduced batch limit doubles in 23 steps. If the memory stays short, 23 iterations pass between two
        # failures.
        self._batch_tokens = min(self._batch_tokens * BUDGET_GROWTH, self._limits.max_batch_tokens)
        return sampled

    def schedule(self: "Scheduler[Request]") -> IterationPlan | None:
        """Plan the next iteration; return None if there is nothing to do.

        From now on its tokens count as computed, and its outputs as pending. Call `update`, `fail` or
        `shrink` before the next plan.
        """
        decision, self._ahead = self._decided(), None
        if decision is not None and self._speculation is not None:
            decision = self._speculation.widened(decision, self.queues, int(self._batch_tokens))
        return None if decision is None else self.begin(decision)

    def look_ahead(self: "Scheduler[Request]", *, may_plan: bool = False) -> IterationPlan | None:
        """Decide on the next iteration during the current one, as if no request finished in it.

        Args:
            may_plan: the executor can find pending tokens on the device.

        Returns:
            The plan if it needs no more of the current iteration than these tokens; only decodes qualify.
            Prompts wait: more requests may arrive, and the start hardly matters for iterations that long.
            `begin` starts it; otherwise `schedule` returns it, unless requests come or go before.
        """
        if any(scheduled.draft for running in self._under_way for scheduled in running):
            return None  # its result decides how many tokens its requests gain
        self._ahead = decision = self._decided()
        if not may_plan or decision is None or not can_plan_ahead(decision, self.queues, self._under_way):
            return None
        if self._speculation is not None and self._speculation.awaits_tokens(decision, self.queues):
            return None
        self._planned = decision, *plan_of(decision, self.queues, is_ahead=True, kept=self._kept)
        return self._planned[1]

    def _decided(self: "Scheduler[Request]") -> Decision[Request] | None:
        """Return the decision made ahead, if there is one, or make one now."""
        ahead = self._ahead
        if ahead is not None and self._has_removed:
            ahead = without_ended(ahead, self.queues)
        return ahead or self.decide()

    def begin(self: "Scheduler[Request]", decision: Decision[Request] | None = None) -> IterationPlan:
        """Count a decision as started and return its plan; None: the decision of `look_ahead`."""
        decision, planned, self._ahead = decision or self._ahead, self._planned, None
        assert decision is not None
        if planned is None or planned[0] is not decision:
            planned = decision, *plan_of(decision, self.queues, is_ahead=False, kept=self._kept)
        _, plan, scheduled = planned
        self._under_way.append(scheduled)
        self.advance(decision)
        return plan

    def update(self: "Scheduler[Request]", result: IterationResult) -> list[Request]:
        """Apply the result of the oldest iteration; return the requests that gained a token or finished."""
        gained, counters = [], self.counters
        self.queues.end_moves()
        moving = {request.request_id for request in self.queues.moved}  # their KV is still incomplete
        states, block_size = self._kv.states, self._kv.block_size
        for scheduled in self._end_iteration():
            request, sequence, num_preemptions, is_last, is_on_its_way, draft = scheduled
            if is_on_its_way:
                continue
            request_id, start = sequence.request_id, sequence.start
            if request_id in result.failed:
                request.finish(FinishReason.ERROR, result.failed[request_id])
                self.remove(request)
                gained.append(request)
                continue
            context_len, num_accepted = start + len(sequence.token_ids), 0
            scheduled.keep_hidden(self._kept, result)
            if sequence.num_pooled:
                request.pool(result.pooled[request_id], is_first=start == 0)
            if sequence.sampling is not None:
                num_accepted = scheduled.append_tokens(result) - 1
                counters.num_output_tokens += 1 + num_accepted
                context_len += num_accepted
                counters.num_accepted += num_accepted
                counters.num_cpu_decodes += num_accepted * sequence.tier.host_attends
                if self._speculation is not None:
                    self._speculation.learn(request, len(draft), 1 + num_accepted)
                gained.append(request)
            elif is_last:
                request.finish(FinishReason.STOP)
                gained.append(request)
            is_finished, is_kept = request.is_finished, request.num_preemptions == num_preemptions
            if is_kept and states is not None:
                hashes, count = request.block_hashes(block_size), len(sequence.token_ids)
                states.settle(request_id, hashes, start, count, num_accepted)
            has_news = context_len // block_size > start // block_size  # a block is full
            if (has_news or is_finished) and is_kept and request_id not in moving:
                self._kv.commit(request_id, request.block_hashes(block_size), context_len)
                if self.queues.waits_for_prompt:  # it may wait for these blocks
                    self._ahead = None
            if is_finished:
                self.remove(request)
        self._num_shrinks = 0
        if self._speculation is not None:
            self._speculation.measure(result.timing)
        return gained

    def _end_iteration(self) -> list[Scheduled]:
        """Remove the oldest iteration; return its parts whose requests have not finished since."""
        ended = self._under_way.popleft() if self._under_way else []
        return [each for each in ended if not each.request.is_finished]

    def abort(self: "Scheduler[Request]", owner_id: str) -> list[RequestOutput]:
        """End all outputs of a request now and free their blocks; do nothing if none is left."""
        requests = [request for request in self.queues if request.owner_id == owner_id]
        return self._end(requests, FinishReason.ABORT)

    def fail(self: "Scheduler[Request]", error: str) -> list[RequestOutput]:
        """End the requests of the current iteration, which failed."""
        requests = [scheduled.request for scheduled in self._end_iteration()]
        self._ahead = None
        outputs = self._end(requests, FinishReason.ERROR, error)
        self.queues.give_up_moved()
        return outputs

    def shrink(self) -> bool:
        """Discard the current iteration, which ran out of memory, and plan smaller ones.

        Returns:
            False if no smaller iteration is possible; the caller must `fail` then.
        """
        num_tokens = sum(len(each.sequence.token_ids) + len(each.draft) for each in self._under_way[0])
        self._num_shrinks += 1
        if (num_tokens == 1 and not self.queues.has_moves) or self._num_shrinks > MOST_SHRINKS:
            return False
        self._batch_tokens = max(num_tokens // 2, 1)
        self.take_back()
        self.queues.give_up_moved()
        return True

    def lose(self, tier: KVTier) -> None:
        """Discard the current iteration and close a tier whose KV is lost.

        Its requests wait and are recomputed, in other tiers until this one is open again.
        """
        self.take_back()
        self.queues.give_up_moved()
        self.queues.close(tier)

    def open(self, tier: KVTier, num_blocks: int) -> None:
        """Reopen a lost tier, which is empty."""
        self._ahead = None
        self._kv.resize(tier, num_blocks)

    def set_limit(self, tier: KVTier, num_blocks: int) -> None:
        """Use only the first blocks of a tier; no iteration may be running.

        Requests that hold other blocks move to another tier in the next iteration, or wait to be recomputed.

        Args:
            num_blocks: whole runs, or all blocks of the tier.
        """
        assert not self._under_way
        self._ahead = None
        self.queues.set_limit(tier, num_blocks, self._may_spill)
        self.queues.refused = None

    def refuse_first(self: "Scheduler[Request]", why: str) -> list[RequestOutput]:
        """End the longest-waiting request, because no remaining tier can hold it."""
        return self._end([self.queues.waiting[0]], FinishReason.ERROR, why)

    def take_back(self) -> None:
        """Discard the newest iteration: its requests return to their state before it."""
        undone = self._under_way.pop()
        if any(scheduled.is_on_its_way for scheduled in undone):
            self.queues.restart_all_async()
        for scheduled in undone:
            if not scheduled.request.is_finished:
                scheduled.take_back(self._kv.states)
        self._ahead = None

    def _end(
        self: "Scheduler[Request]", requests: Sequence[Request], why: FinishReason, error: str | None = None
    ) -> list[RequestOutput]:
        for request in requests:
            request.finish(why, error)
            self.remove(request)
        return [request.take_output() for request in requests]

    def _new_iteration(self) -> IterationBuilder[R]:
        return IterationBuilder(self.queues, self._policy, self._builder, int(self._batch_tokens))

    def _may_spill(self, victim: R, tier: KVTier) -> bool:
        """Return True if a request may move to a less preferred tier; it must if it fits nowhere else."""
        best = self.queues.tiers[0]
        if victim.num_tokens >= self._kv.capacity_tokens(best):
            return True
        rest = [request.num_tokens for request in self.queues.running[best] if request is not victim]
        builder = self._builder({best: Decodes(len(rest), sum(rest))} if rest else {})
        return self._policy.spills(builder, tier, victim.num_tokens)

    def _promote(self) -> None:
        """Move requests to the preferred tier, while it has room and the linear stages hide the copies.

        If nothing moves, one request of the host moves to the streamed tier, if its KV can stream unnoticed.
        """
        best, *others = self.queues.tiers
        layer_ms, num_tokens = self._cost.linear_ms(self.queues.num_running), 0
        while not num_tokens or self._cost.transfer_ms(num_tokens) < layer_ms:
            request = self.queues.next_to_promote(best)
            if request is None or not self.queues.move(request, best):
                break
            num_tokens += request.num_tokens
        for tier in others:
            if tier.is_streamed and not self.queues.copies:
                request = self.queues.next_to_promote(tier)
                if request is not None and self._policy.admits(self._builder({}), tier, request.num_tokens):
                    self.queues.move(request, tier)

    def _builder(self, decodes: dict[KVTier, Decodes]) -> BatchBuilder:
        """Return a batch builder with these decodes, which the device attends for."""
        queues, stats = self.queues, self._workload_stats
        shape = BatchShape().plus(decodes)
        steady_state = None
        if self._policy.needs_steady_state:
            steady_state = self._steady_states.best(stats.workload(queues, self._limits))
        return BatchBuilder(
            self._cost,
            self._limits,
            int(self._batch_tokens) - shape.tokens,
            shape,
            moved_tokens=len(queues.copies) * self._kv.block_size,
            num_waiting=len(queues.waiting),
            mean_prompt_tokens=stats.prompt_tokens,
            num_running=queues.num_running,
            num_on_host=queues.num_on_host,
            most_on_device=stats.most_in(self._kv, queues.tiers[0]),
            num_streamed=queues.num_streamed,
            typical_decodes=lambda: queues.typical_decodes(stats.output_tokens),
            steady_state=steady_state,
        )
