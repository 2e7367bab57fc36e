"""Requests that may get drafts, and their rows in an iteration."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape
from neo_desktop.engine.request import RequestState
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.request_queues import RequestQueues

MAX_WIDTH = 8  # tokens of a draft

R = TypeVar("R", bound=RequestState)


class Candidate(NamedTuple, Generic[R]):
    """A request that may get drafts in an iteration."""

    request: R
    batch: int  # index of its sub-batch
    tier: KVTier

    def add_row(self, batches: list[BatchShape], row: int) -> None:
        """Add the decode of the draft's token number `row` to its sub-batch."""
        decode = Decodes(1, self.request.num_tokens + row)
        batches[self.batch] = batches[self.batch].plus({self.tier: decode})


def candidates_of(
    decision: Decision[R], queues: RequestQueues[R], is_able: Callable[[R], bool]
) -> list[Candidate[R]]:
    """Return the requests of a decision that may get drafts for their next decode.

    Args:
        is_able: returns True for requests that may get drafts at all.
    """
    return [
        Candidate(request, index, queues.tier_of(request))
        for index, batch in enumerate(decision.sub_batches)
        for request, num_tokens in batch
        if num_tokens == 1 and request.num_uncomputed_tokens == 1 and is_able(request)
    ]


def most_tokens(request: RequestState) -> int:
    """Return the most tokens of a draft."""
    return min(MAX_WIDTH, request.max_num_tokens - request.num_tokens - 1)


def with_blocks(request: R, queues: RequestQueues[R], width: int) -> int:
    """Return how many tokens of a draft have KV blocks; take a free block if enough are left for others."""
    kv, request_id, tier = queues.kv, request.request_id, queues.tier_of(request)
    if kv.num_free_blocks(tier) > len(queues.running[tier]):
        kv.extend(request_id, request.num_tokens + width)
    return min(width, kv.room(request_id) - request.num_tokens)


def decodes_of(shape: IterationShape) -> IterationShape:
    """Return the shape of an iteration without its prompts."""
    batches = [BatchShape().plus(batch.decodes) for batch in shape.batches]
    return shape._replace(batches=tuple(batches))


def num_tokens_of(shape: IterationShape) -> int:
    """Return the tokens of an iteration."""
    return sum(batch.tokens for batch in shape.batches)
