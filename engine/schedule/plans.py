"""From the scheduler's decisions to plans for executors."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from neo_desktop.engine.batch import (
    UNKNOWN_TOKEN,
    AsyncGroup,
    IterationPlan,
    IterationResult,
    ScheduledSequence,
    StateSlots,
    SubBatch,
)
from neo_desktop.engine.kv.states import StateCache
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.request_queues import RequestQueues


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
        request, request_id = self.request, self.request.request_id
        token, num_tokens = result.sampled[request_id], 1
        request.append(token)
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

    def take_back(self, states: StateCache | None) -> None:
        """Return the request to its state before the iteration."""
        request = self.request
        if self.is_last:
            request.num_tokens -= 1
        if request.num_preemptions == self.num_preemptions:
            request.num_computed_tokens = self.sequence.start
            if states is not None:
                states.take_back(request.request_id)


def plan_of(
    decision: Decision[Request], queues: RequestQueues[Request], *, is_ahead: bool
) -> tuple[IterationPlan, list[Scheduled]]:
    """Return the plan of a decision, and each request's share in the plan.

    Args:
        is_ahead: the iteration starts before the previous one ends.
    """
    scheduled: list[Scheduled] = []

    def sequence(
        request: Request, num_tokens: int, *, is_sampled: bool, is_on_its_way: bool = False
    ) -> ScheduledSequence:
        start, states = request.num_computed_tokens, queues.kv.states
        is_known = start + num_tokens <= len(request.token_ids)
        ends = start + num_tokens == request.num_tokens
        token_ids = request.token_ids[start : start + num_tokens]
        sequence = ScheduledSequence(
            request_id=request.request_id,
            token_ids=tuple(token_ids) if is_known else (*token_ids, UNKNOWN_TOKEN),
            start=start,
            tier=queues.tier_of(request),
            block_table=queues.kv.block_table(request.request_id),
            sampling=request.sampling_input() if is_sampled else None,
            num_pooled=request.num_pooled(num_tokens) if request.is_pooled else 0,
            states=None
            if states is None
            else states.plan(request.request_id, start, num_tokens, is_last=ends),
            images=request.images,
        )
        is_last = is_sampled or (sequence.num_pooled > 0 and sequence.context_len == request.num_tokens)
        scheduled.append(Scheduled(request, sequence, request.num_preemptions, is_last, is_on_its_way))
        return sequence

    def sub_batch(batch: Iterable[tuple[Request, int]]) -> Iterator[ScheduledSequence]:
        """Yield the order that all readers expect: by tier, then prompts before decodes."""
        placed = [(rank[queues.tier_of(request)], request, num_tokens) for request, num_tokens in batch]
        placed.sort(key=lambda item: (item[0], item[2] == 1))
        for _, request, num_tokens in placed:
            is_last = request.num_computed_tokens + num_tokens == request.num_tokens
            first = sequence(request, num_tokens, is_sampled=is_last and not request.is_pooled)
            yield first
            if rows := decision.drafts.get(request.request_id, ()):
                every: Sequence[StateSlots | None] = [None] * len(rows)
                if (states := queues.kv.states) is not None:
                    every = states.plan_draft(request.request_id, len(rows))
                    rows = rows[: len(every)]
                scheduled[-1] = scheduled[-1]._replace(draft=[row.token_id for row in rows])
                for start, ((token_id, sampling), slots) in enumerate(
                    zip(rows, every, strict=True), first.start + 1
                ):
                    draft = first._replace(token_ids=(token_id,), start=start, sampling=sampling)
                    yield draft._replace(is_draft=True, states=slots)

    def async_groups() -> Iterator[AsyncGroup]:
        """Yield the decodes that advance by a layer, grouped by the linear stage that they join."""
        stages = queues.async_groups.stages(decision.new_async)
        for stage in stages:
            is_end = stage is stages[-1]
            yield tuple(
                None if each is None else sequence(each, 1, is_sampled=is_end, is_on_its_way=not is_end)
                for each in stage
            )

    rank = {tier: index for index, tier in enumerate(queues.tiers)}
    plan = IterationPlan(
        tuple(SubBatch(tuple(sub_batch(batch))) for batch in decision.sub_batches),
        decision.copies,
        decision.predicted,
        is_ahead,
        tuple(async_groups()) if decision.is_async_step else (),
    )
    return plan, scheduled


def without_ended(
    decision: Decision[Request] | None, queues: RequestQueues[Request]
) -> Decision[Request] | None:
    """Return a decision without the requests that have finished since; None if nothing remains."""
    if decision is None:
        return None
    batches = tuple(
        tuple(item for item in batch if not item[0].is_finished) for batch in decision.sub_batches
    )
    new_async = tuple(request for request in decision.new_async if not request.is_finished)
    is_async_step = decision.is_async_step and bool(new_async or len(queues.async_groups))
    sub_batches = tuple(batch for batch in batches if batch) or (((),) if is_async_step else ())
    host_decodes = tuple(request for request in decision.host_decodes if not request.is_finished)
    return (
        replace(
            decision,
            sub_batches=sub_batches,
            host_decodes=host_decodes,
            new_async=new_async,
            is_async_step=is_async_step,
        )
        if sub_batches
        else None
    )


def can_start_ahead(
    decision: Decision[Request], queues: RequestQueues[Request], running: Sequence[Scheduled]
) -> bool:
    """Return True if an iteration of decodes needs nothing of the running one but tokens on the device."""
    under_way = {scheduled.request.request_id for scheduled in running}
    return (
        not decision.copies
        and not decision.is_async_step
        and all(
            num_tokens == 1
            and request.num_uncomputed_tokens == 1
            and queues.tier_of(request).stays_on_device
            and not (request.needs_tokens and request.request_id in under_way)
            for batch in decision.sub_batches
            for request, num_tokens in batch
        )
    )
