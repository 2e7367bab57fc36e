"""What an iteration does: which tokens of whom it computes, where their KV lies, in which sub-batch."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from neo_desktop.engine.batch import MAX_STAGGERED, BlockCopy, IterationTiming
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.placement import Place
from neo_desktop.engine.predict.cost_model import CostModel, ZeroCostModel
from neo_desktop.engine.predict.estimate import NO_DECODES, Decodes, Load, predict, timing_of
from neo_desktop.engine.predict.estimate import joined as joined_decodes
from neo_desktop.engine.request import RequestState
from neo_desktop.engine.schedule.cohorts import Cohorts
from neo_desktop.engine.schedule.draft import Draft, HostQueue, SchedulerLimits
from neo_desktop.engine.schedule.mix import Mix
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.schedule.regime import Demand, Regime, RegimeFinder
from neo_desktop.engine.schedule.residency import Residency
from neo_desktop.engine.schedule.split import Split

PATIENCE = 128  # iterations that a decode on the host waits before it joins at any price
MOST_WAITS = 16  # iterations that take nobody along who goes at their own pace; then their tokens begin again
USED_SHARE = 0.95  # of a place's memory: requests leave room for others to grow
BUDGET_GROWTH = 1 + 1 / 32  # of the tokens of an iteration, after the device had no memory for more

R = TypeVar("R", bound=RequestState)


@dataclass(slots=True)
class Decision(Generic[R]):
    """What one iteration is to do, in terms of requests."""

    sub_batches: list[list[tuple[R, int]]]  # (request, how many tokens of it)
    host_decodes: list[R]  # those of them that the host attends for
    waiting_decodes: list[R]  # that neither host nor bus had time for: they wait for the next iteration
    copies: list[BlockCopy]
    loads: tuple[Load, ...]  # of the sub-batches
    moved_tokens: int  # whose KV crosses the bus beside them
    predicted: IterationTiming
    beginners: list[R] = field(default_factory=list)  # who begins to go at his own pace
    staggered: Mapping[Place, Decodes] = field(default_factory=dict)  # all who go on by a layer

    @property
    def is_turn(self) -> bool:
        """Whether anybody does."""
        return bool(self.staggered)


@dataclass(slots=True)
class _Chosen(Generic[R]):
    """Those who take part, or may."""

    decodes: list[R] = field(default_factory=list)  # that the device attends for
    queue: list[R] = field(default_factory=list)  # that the host attends for, who waited longest first
    swapped: list[R] = field(default_factory=list)  # whose KV comes to the device: who may join, as above
    unfinished: list[R] = field(default_factory=list)  # prompts that live somewhere
    chunks: list[tuple[R, int]] = field(default_factory=list)  # of prompts, old and new


class Decider(Generic[R]):
    """Continuous batching over several places, as in NEO (section 3.2).

    NOTE on the algorithm. There is no prefill phase and no decode phase: a request has some tokens (prompt
    and output), some of them have their KV computed, and an iteration computes more of the rest. Each one:

    1. Room: every decode needs a slot for its new token. Where a place is full, its youngest request moves
       to another place that has room, or is preempted: its blocks are freed and it waits again, to be
       recomputed.
    2. The decodes that the device attends for join sub-batch 0. If there is ample room in the preferred
       place, the oldest requests of others move there, as many as the bus can bring behind the linear stages,
       at least one.
    3. Prompts join sub-batch 0, in the order of their arrival, cut into chunks by the token budget. Their KV
       stays in the preferred place if it fits, else it goes to another one layer by layer.
       So do decodes whose KV lies in host memory, if it comes to the device behind the layers' work.
    4. Decodes that the host attends for join sub-batch 0 or 1, or go on at their own pace (see `Cohorts`), or
       wait. Those that waited longest come first.
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
        places = tuple(place for place in policy.places if place in kv_cache.places)
        self.residency: Residency[R] = Residency(kv_cache, places)
        self.cohorts: Cohorts[R] = Cohorts(num_layers or self._cost.num_layers)
        self._mix = Mix()
        self._kv = kv_cache
        self._policy = policy
        self._limits = limits
        self._regimes = RegimeFinder(self._cost)
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
        self.residency.add(request)
        self._mix.add(request.num_prompt_tokens)

    def remove(self, request: R) -> None:
        """Forget a request that has ended, and free its blocks."""
        self.residency.remove(request)
        self.cohorts.drop(request)
        self._mix.end()

    def set_limit(self, place: Place, num_blocks: int) -> None:
        """Use only the first blocks of a place."""
        self.residency.set_limit(place, num_blocks, self._may_spill)
        self._refused = None

    def shrink_to(self, num_tokens: int) -> None:
        """Make iterations smaller for a while: the device had no memory for more."""
        self._batch_tokens = max(num_tokens, 1)

    def decide(self) -> Decision[R] | None:
        """Choose what the next iteration does; None when there is nothing to do.

        A decision that is not carried out is replaced by the next one: moves and admissions stay.
        """
        residency = self.residency
        self.waits_for_prompt = False
        has_room = residency.make_room(self._may_spill)  # 1
        # Requests that wait take free room first, unless host or bus have more to do than they can.
        if has_room and (self._is_behind or not residency.waiting):
            self._promote()  # 2
        self._check_cohorts()
        chosen, draft = self._collect_decodes()
        self._join_chunks(chosen, draft, may_admit=has_room)  # 3, 5
        self._join_swapped(chosen, draft)
        if not draft.load.tokens and not chosen.queue:
            if not len(self.cohorts):
                # Who had to give way for want of room begins again, if nobody else is there.
                return None if has_room or not self.residency.waiting else self.decide()
            self.cohorts.clear()  # nothing is left that they could go along with
            chosen, draft = self._collect_decodes()
        return self._decision(chosen, draft, self._policy.divide(draft))  # 4, 6

    def advance(self, decision: Decision[R]) -> list[R]:
        """Book an iteration as carried out; return those who get their next token by it, already counted."""
        self.residency.start_moves()
        for request in decision.waiting_decodes:
            request.num_skipped += 1
        self.cohorts.num_waits += 1
        self._is_behind = bool(decision.waiting_decodes)
        counters = self.residency.counters
        counters.num_cpu_decodes += len(decision.host_decodes)
        counters.num_double_iterations += len(decision.sub_batches) == 2
        sampled = []
        for batch in decision.sub_batches:
            for request, num_tokens in batch:
                request.num_skipped = 0
                request.num_computed_tokens += num_tokens
                if request.num_computed_tokens == request.num_tokens:
                    request.num_tokens += 1
                    sampled.append(request)
        for request in self.cohorts.turn(decision.beginners) if decision.is_turn else ():
            request.num_skipped = 0
            request.num_computed_tokens += 1
            request.num_tokens += 1
            sampled.append(request)
            counters.num_cpu_decodes += 1
            counters.num_staggered_decodes += 1
        self._mix.count_tokens(len(sampled))
        self._grow_budget()
        return sampled

    def _check_cohorts(self) -> None:
        """Let tokens begin again of those whose KV is elsewhere now, or of all if nobody takes them along."""
        if self.cohorts.num_waits >= MOST_WAITS:
            self.cohorts.clear()
        moved = {request.request_id for request in self.residency.moved}
        for request in list(self.cohorts):
            if request.request_id not in self._kv or request.request_id in moved:
                self.cohorts.drop(request)

    def _regime(self) -> Regime:
        """Return what is best in the long run for requests like those that there were."""
        residency, most = self.residency, self._most_in
        context_tokens = self._mix.context_tokens
        there = min(residency.num_running + len(residency.waiting), self._limits.max_batch_requests)
        device = next((place for place in residency.places if not place.host_attends), None)
        host = next((place for place in residency.places if place.cpu_attends), None)
        workers = [place for place in residency.places if place.is_remote]
        swapped = next((place for place in residency.places if place.is_swapped and place != device), None)
        most_on_device = min(most(device), there)
        return self._regimes.best(
            Demand(
                device,
                host,
                most_on_device,
                min(most(host), there - most_on_device),
                self._mix.prompt_tokens,
                context_tokens,
                self._mix.prompt_tokens / self._mix.output_tokens,
                self._limits.max_batch_tokens,
                self._limits.max_token_ms,
                tuple(
                    (place, count) for place in workers if (count := min(most(place), there - most_on_device))
                ),
                most_swapped=min(most(swapped), there - most_on_device),
                most_elsewhere=there - most_on_device,
            )
        )

    def _most_in(self, place: Place | None) -> int:
        """Return how many requests like those that came a place has memory for."""
        if place is None or not self._kv.capacity_tokens(place):
            return 0
        return max(int(USED_SHARE * self._kv.capacity_tokens(place) / self._mix.context_tokens), 1)

    def _num_on_host(self) -> int:
        running = self.residency.running
        return sum(len(requests) for place, requests in running.items() if place.host_attends)

    def _may_spill(self, victim: R, place: Place) -> bool:
        """Whether a request may go on in a less preferred place; one that fits nowhere else must."""
        best = self.residency.places[0]
        if victim.num_tokens >= self._kv.capacity_tokens(best):
            return True
        rest = [request.num_tokens for request in self.residency.running[best] if request is not victim]
        draft = self._draft({best: Decodes(len(rest), sum(rest))} if rest else {})
        draft.residents = self.residency.typical_decodes(self._mix.output_tokens)
        return self._policy.spills(draft, place, victim.num_tokens)

    def _promote(self) -> None:
        """Move requests to the preferred place, if it has room, as long as that hides their way there.

        If nothing moves, one that the host attends for moves to where KV is swapped, if it will hide there.
        """
        best, *others = self.residency.places
        layer_ms, num_tokens = self._cost.linear_ms(self.residency.num_running), 0
        while not num_tokens or self._cost.transfer_ms(num_tokens) < layer_ms:
            request = self.residency.next_to_promote(best)
            if request is None or not self.residency.promote(request, best):
                break
            num_tokens += request.num_tokens
        for place in others:
            if place.is_swapped and not self.residency.copies:
                request = self.residency.next_to_promote(place)
                if request is not None and self._may_swap(request, place):
                    self.residency.promote(request, place)

    def _may_swap(self, request: R, place: Place) -> bool:
        draft = self._draft({})
        draft.residents = self.residency.typical_decodes(self._mix.output_tokens)
        return self._policy.admits(draft, place, request.num_tokens)

    def _draft(self, decodes: dict[Place, Decodes]) -> Draft:
        """Return an iteration with decodes that the device attends for."""
        load = Load().plus(decodes)
        moved_tokens = len(self.residency.copies) * self._kv.block_size
        return Draft(
            self._cost,
            self._limits,
            int(self._batch_tokens) - load.tokens,
            load,
            moved_tokens=moved_tokens,
            num_waiting=len(self.residency.waiting),
            mean_prompt_tokens=self._mix.prompt_tokens,
            num_running=self.residency.num_running,
            num_on_host=self._num_on_host(),
            most_on_device=self._most_in(self.residency.places[0]),
            num_swapped=sum(len(r) for place, r in self.residency.running.items() if place.is_swapped),
            regime=self._regime() if self._policy.needs_regime else None,
        )

    def _collect_decodes(self) -> tuple[_Chosen[R], Draft]:
        """Step 2: sub-batch 0 gets what the device attends for; the rest of what can be decoded queues up."""
        chosen: _Chosen[R] = _Chosen()
        queue: list[tuple[Place, R]] = []
        swapped: list[R] = []
        at_device: dict[Place, Decodes] = {}
        for place, running in self.residency.running.items():
            decodes = [r for r in running if r.num_tokens - r.num_computed_tokens == 1 and not r.is_complete]
            if len(decodes) < len(running):
                chosen.unfinished += [r for r in running if r.num_uncomputed_tokens > 1]
            if place.host_attends:
                queue += [(place, r) for r in decodes if r not in self.cohorts]
            elif place.is_swapped:
                swapped += decodes
            elif decodes:
                decodes = decodes[: int(self._batch_tokens) - len(chosen.decodes)]
                chosen.decodes += decodes
                at_device[place] = Decodes(len(decodes), sum([request.num_tokens for request in decodes]))
        draft = self._draft(at_device)
        draft.staggered = self._decodes_of(self.cohorts)
        queue.sort(key=_num_skipped, reverse=True)  # stable
        del queue[draft.budget :]
        chosen.queue = [request for _, request in queue]
        draft.queue = HostQueue([(place, request.num_tokens) for place, request in queue])
        draft.num_due = bisect_right(queue, -PATIENCE, key=lambda item: -_num_skipped(item))
        draft.budget -= len(queue)
        swapped.sort(key=lambda request: -request.num_skipped)
        chosen.swapped = swapped[: draft.budget]
        draft.budget -= len(chosen.swapped)
        return chosen, draft

    def _join_swapped(self, chosen: _Chosen[R], draft: Draft) -> None:
        """Let those swapped decodes join whose KV comes while the device is busy.

        Those at the front of the memory come first, once nobody has waited too long: so the blocks that come
        lie together, and few copies bring them.
        """
        if not chosen.swapped:
            return
        num_due = bisect_right(chosen.swapped, -PATIENCE, key=lambda request: -request.num_skipped)
        last_block = {id(r): self._kv.last_block(r.request_id) for r in chosen.swapped}
        chosen.swapped[num_due:] = sorted(chosen.swapped[num_due:], key=lambda r: last_block[id(r)])
        decodes = [(self.residency.place_of(r), r.num_tokens) for r in chosen.swapped]
        positions = set(self._policy.swap(draft, decodes, num_due))
        draft.load = draft.load.plus(HostQueue(decodes).decodes(sorted(positions)))
        chosen.decodes += [request for i, request in enumerate(chosen.swapped) if i in positions]
        chosen.swapped = [request for i, request in enumerate(chosen.swapped) if i not in positions]

    def _join_chunks(self, chosen: _Chosen[R], draft: Draft, may_admit: bool) -> None:
        """Step 3: chunks of running prompts, then of waiting ones."""
        residency = self.residency
        chosen.unfinished.sort(key=attrgetter("arrival"))
        may_admit = may_admit and bool(residency.waiting) and residency.may_have_room(residency.waiting[0])
        if not chosen.unfinished and not may_admit:
            return
        draft.budget = self._policy.pace(draft)
        for request in chosen.unfinished:
            self._join_chunk(chosen, draft, request)
        while may_admit and draft.budget and residency.waiting:
            request = residency.waiting[0]
            if residency.num_running >= self._limits.max_batch_requests or not self._admit(draft, request):
                break
            self._join_chunk(chosen, draft, request)

    def _join_chunk(self, chosen: _Chosen[R], draft: Draft, request: R) -> None:
        num_tokens = min(request.num_uncomputed_tokens, draft.budget)
        if draft.most_per_prompt is not None:
            num_tokens = min(num_tokens, draft.most_per_prompt)
        if num_tokens:
            chosen.chunks.append((request, num_tokens))
            place = self.residency.place_of(request)
            draft.add_chunk(place, num_tokens, request.num_computed_tokens, request.num_tokens)

    def _admit(self, draft: Draft, request: R) -> bool:
        """Let the request that waited longest live in the first place that has room for it."""
        draft.num_waiting = len(self.residency.waiting)
        draft.num_on_host = self._num_on_host()
        best = self.residency.places[0]
        if self._admit_to(best):
            return True
        if self.waits_for_prompt:
            return False
        others = self.residency.less_preferred
        if request.num_tokens < self._kv.capacity_tokens(best):  # it can wait
            state = request.arrival, self.residency.num_running, len(draft.queue), len(draft.chunks)
            if state == self._refused:
                return False
            if any(place.is_swapped for place in others):
                draft.residents = self.residency.typical_decodes(self._mix.output_tokens)
            others = [place for place in others if self._policy.admits(draft, place, request.num_tokens)]
            self._refused = None if others else state
        return any(self._admit_to(place) for place in others)

    def _admit_to(self, place: Place) -> bool:
        """Let it live there, unless another is about to compute its beginning there or in a place before."""
        self.waits_for_prompt = self.waits_for_prompt or self.residency.is_mostly_coming(place)
        return not self.waits_for_prompt and self.residency.admit(place)

    def _decision(self, chosen: _Chosen[R], draft: Draft, split: Split) -> Decision[R]:
        first, second = ([chosen.queue[i] for i in part] for part in (split.first, split.second))
        joined = {*split.first, *split.second}
        rest = [request for i, request in enumerate(chosen.queue) if i not in joined]
        num_first_chunks = len(chosen.chunks) - split.num_chunks_second
        chunks, second_chunks = chosen.chunks[:num_first_chunks], chosen.chunks[num_first_chunks:]
        sub_batches = [chunks + [(r, 1) for r in chosen.decodes] + [(r, 1) for r in first]]
        if second or second_chunks:
            sub_batches.append(second_chunks + [(r, 1) for r in second])
        # What a prompt's last token is asked for may be more than the next one.
        may_begin = [request for request in rest if request.num_tokens > request.num_prompt_tokens]
        beginners = self._beginners(may_begin, split, draft.staggered)
        staggered = NO_DECODES
        if split.num_staggered:
            staggered = joined_decodes(draft.staggered, self._decodes_of(beginners))
        loads = split.loads
        return Decision(
            beginners=beginners,
            staggered=staggered,
            sub_batches=sub_batches,
            host_decodes=[*second, *first],
            waiting_decodes=[request for request in rest if request not in beginners] + chosen.swapped,
            copies=self.residency.copies,
            loads=loads,
            moved_tokens=draft.moved_tokens,
            predicted=self._predicted(split, draft, staggered),
        )

    def _predicted(self, split: Split, draft: Draft, staggered: Mapping[Place, Decodes]) -> IterationTiming:
        """Predict it as it is: a split reckons with as many at their own pace as there could be."""
        if staggered:
            return predict(self._cost, *split.loads, moved_tokens=draft.moved_tokens, staggered=staggered)
        return timing_of(self._cost, split.predicted_ms, split.loads)

    def _beginners(self, requests: Iterable[R], split: Split, under_way: Mapping[Place, Decodes]) -> list[R]:
        """Return who joins those at their own pace, so that all layers have about as many of them."""
        room = {
            place: count - under_way[place].requests if place in under_way else count
            for place, count in split.staggered.items()
        }
        most = min(-(-split.num_staggered // self.cohorts.num_layers), MAX_STAGGERED)
        beginners: list[R] = []
        for request in requests:
            if len(beginners) >= most:
                break
            place = self.residency.place_of(request)
            if room.get(place, 0) > 0:
                room[place] -= 1
                beginners.append(request)
        return beginners

    def _decodes_of(self, requests: Iterable[R]) -> Mapping[Place, Decodes]:
        found: dict[Place, Decodes] = {}
        for request in requests:
            place = self.residency.place_of(request)
            count, context_tokens = found.get(place, (0, 0))
            found[place] = Decodes(count + 1, context_tokens + request.num_tokens)
        return found

    def _grow_budget(self) -> None:
        """After memory was short, return to the full budget: in 23 steps to twice as much.

        If the memory does not come back, so many iterations pass between two that fail.
        """
        self._batch_tokens = min(self._batch_tokens * BUDGET_GROWTH, self._limits.max_batch_tokens)


def _num_skipped(item: tuple[Place, RequestState]) -> int:
    return item[1].num_skipped
