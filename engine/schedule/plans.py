"""From the scheduler's decisions to plans for executors."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from neo_desktop.engine.batch import (
    UNKNOWN_TOKEN,
    AsyncGroup,
    DraftRow,
    IterationPlan,
    IterationResult,
    ScheduledSequence,
    StateSlots,
    SubBatch,
)
from neo_desktop.engine.kv.states import StateCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.request_queues import RequestQueues
from neo_desktop.engine.speculate.kept_states import KeptStates


class Scheduled(NamedTuple):
    """A request's share of a running iteration."""

    request: Request
    sequence: ScheduledSequence
    num_preemptions: int  # of the request, when the iteration started
    is_last: bool  # it computes the request's last known token: a token or the pooled states follow
    is_on_its_way: bool  # its async decode continues in later iterations
    draft: Sequence[int] = ()  # tokens that further rows verify

    def append_tokens(self, result: IterationResult) -> int:
        """Append the chosen tokens to the request: one, and one per token of the draft that was right.

        Returns:
            The number of tokens.
        """
        request, request_id = self.request, self.sequence.request_id
        request.append(token := result.sampled[request_id])
        if not self.draft:
            return 1
        num_tokens = 1
        for drafted, following in zip(self.draft, result.after_drafts.get(request_id, ()), strict=False):
            if request.is_finished or token.token_id != drafted:
                break
            token = following
            request.append(token)
            num_tokens += 1
        request.num_tokens += num_tokens - 1
        if request.num_preemptions == self.num_preemptions:
            request.num_computed_tokens += num_tokens - 1
        return num_tokens

    def keep_hidden(self, kept: KeptStates | None, result: IterationResult) -> None:
        """Keep the hidden states that the iteration computed for the request; None: none are kept."""
        if kept is not None and self.sequence.num_hidden:
            position = self.sequence.context_len - self.sequence.num_hidden
            kept.keep(self.request, position, result.hidden[self.sequence.request_id])

    def take_back(self, states: StateCache | None) -> None:
        """Return the request to its state before the iteration."""
        request = self.request
        if self.is_last:
            request.num_tokens -= 1
        if request.num_preemptions == self.num_preemptions:
            request.num_computed_tokens = self.sequence.start
            if states is not None and not self.is_on_its_way:
                states.take_back(request.request_id)


def plan_of(
    decision: Decision[Request],
    queues: RequestQueues[Request],
    *,
    is_ahead: bool,
    kept: KeptStates | None = None,
) -> tuple[IterationPlan, list[Scheduled]]:
    """Return the plan of a decision, and each request's share in the plan.

    Args:
        is_ahead: the previous iteration has not ended.
        kept: hidden states that are to be kept; None: none.
    """
    scheduled: list[Scheduled] = []
    kv, states = queues.kv, queues.kv.states

    def sequence(
        request: Request, tier: KVTier, num_tokens: int, is_on_its_way: bool = False
    ) -> ScheduledSequence:
        request_id, start = request.request_id, request.num_computed_tokens
        end = start + num_tokens
        is_last = end == request.num_tokens
        token_ids = tuple(request.token_ids[start:end])
        num_pooled = request.num_pooled(num_tokens) if request.is_pooled else 0
        slots = None
        if states is not None and request in queues.async_groups:
            slots = states.under_way(request_id)
        elif states is not None:
            slots = states.plan(request_id, start, num_tokens, is_last=is_last)
        sequence = ScheduledSequence(
            request_id,
            token_ids if len(token_ids) == num_tokens else (*token_ids, UNKNOWN_TOKEN),
            start,
            tier,
            kv.block_table(request_id),
            request.sampling_input() if is_last and not is_on_its_way and not request.is_pooled else None,
            num_pooled,
            0 if kept is None or is_on_its_way else kept.wanted(request, end, num_tokens),
            slots,
            request.images,
        )
        is_end = sequence.sampling is not None or (num_pooled > 0 and is_last)
        scheduled.append(Scheduled(request, sequence, request.num_preemptions, is_end, is_on_its_way))
        return sequence

    def drafts(first: ScheduledSequence, rows: Sequence[DraftRow]) -> Iterator[ScheduledSequence]:
        """Yield the rows of a draft after the request's own token, as many as there are slots of states."""
        every: Sequence[StateSlots | None] = [None] * len(rows)
        if (states := queues.kv.states) is not None:
            every = states.plan_draft(first.request_id, len(rows))
            rows = rows[: len(every)]
        scheduled[-1] = scheduled[-1]._replace(draft=[row.token_id for row in rows])
        places = zip(rows, every, strict=True)
        for start, ((token_id, sampling), slots) in enumerate(places, first.start + 1):
            draft = first._replace(token_ids=(token_id,), start=start, sampling=sampling)
            yield draft._replace(is_draft=True, states=slots)

    def sub_batch(batch: Iterable[tuple[Request, int]]) -> Iterator[ScheduledSequence]:
        """Yield the order that all readers expect: by tier, then prompts before decodes."""
        parts: dict[KVTier, tuple[list[tuple[Request, int]], ...]] = {tier: ([], []) for tier in queues.tiers}
        for request, num_tokens in batch:
            parts[queues.tier_of(request)][num_tokens == 1].append((request, num_tokens))
        for tier, (prompts, decodes) in parts.items():
            for request, num_tokens in chain(prompts, decodes):
                first = sequence(request, tier, num_tokens)
                yield first
                if rows := decision.drafts.get(first.request_id, ()):
                    yield from drafts(first, rows)

    def async_groups() -> Iterator[AsyncGroup]:
        """Yield the decodes that advance by a layer, grouped by the linear stage that they join."""
        stages = queues.async_groups.stages(decision.new_async)
        for stage in stages:
            is_on_its_way = stage is not stages[-1]
            yield tuple(
                None if r is None else sequence(r, queues.tier_of(r), 1, is_on_its_way) for r in stage
            )

    plan = IterationPlan(
        tuple(SubBatch(tuple(sub_batch(batch))) for batch in decision.sub_batches),
        decision.copies,
        decision.predicted,
        is_ahead,
        tuple(async_groups()) if decision.is_async_step else (),
    )
    return plan, scheduled


def without_ended(decision: Decision[Request], queues: RequestQueues[Request]) -> Decision[Request] | None:
    """Return a decision without the requests that have finished since; None if nothing remains."""
    batches = tuple(
        tuple(item for item in batch if not item[0].is_finished) for batch in decision.sub_batches
    )
    new_async = tuple(request for request in decision.new_async if not request.is_finished)
    is_async_step = decision.is_async_step and bool(new_async or len(queues.async_groups))
    sub_batches = tuple(batch for batch in batches if batch) or (((),) if is_async_step else ())
    host_decodes = tuple(request for request in decision.host_decodes if not request.is_finished)
    if not sub_batches:
        return None
    return replace(
        decision,
        sub_batches=sub_batches,
        host_decodes=host_decodes,
        new_async=new_async,
        is_async_step=is_async_step,
    )


def can_plan_ahead(
    decision: Decision[Request], queues: RequestQueues[Request], running: Collection[Sequence[Scheduled]]
) -> bool:
    """Return True if an iteration of decodes needs no more of the one that runs than tokens on the device."""
    under_way = {scheduled.request.request_id for each in running for scheduled in each}
    tiers = {scheduled.sequence.tier for each in running for scheduled in each}
    tiers |= {queues.tier_of(request) for batch in decision.sub_batches for request, _ in batch}
    # Streamed KV is stored, and workers answer, after the end. Slots of states must not be planned in vain.
    on_host, states = [tier for tier in tiers if tier.in_host_memory], queues.kv.states
    return (
        len(running) == 1
        and not decision.copies
        and not queues.has_moves
        and not decision.is_async_step
        and (not on_host or (states is None and all(tier.cpu_attends for tier in on_host)))
        and (states is None or states.has_spare(sum(map(len, decision.sub_batches))))
        and all(
            num_tokens == 1
            and request.num_uncomputed_tokens == 1
            and not (request.needs_tokens and request.request_id in under_way)
            for batch in decision.sub_batches
            for request, num_tokens in batch
        )
    )
