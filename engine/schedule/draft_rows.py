"""Requests that may get drafts, and their rows in an iteration."""

from typing import NamedTuple

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.request_queues import RequestQueues

MAX_WIDTH = 8  # tokens of a draft


class Candidate(NamedTuple):
    """A request that may get drafts in an iteration."""

    request: Request
    batch: int  # index of its sub-batch
    tier: KVTier

    def plus_row(self, batch: BatchShape, row: int) -> BatchShape:
        """Return its sub-batch with the decode of the draft's token number `row`."""
        return batch.plus({self.tier: Decodes(1, self.request.num_tokens + row)})


def able_requests(decision: Decision[Request], queues: RequestQueues[Request]) -> list[Candidate]:
    """Return the requests of a decision that may get drafts."""
    return [
        Candidate(request, index, queues.tier_of(request))
        for index, batch in enumerate(decision.sub_batches)
        for request, num_tokens in batch
        if num_tokens == 1 and _is_able(request)
    ]


def most_tokens(request: Request) -> int:
    """Return the most tokens of a draft."""
    return min(MAX_WIDTH, request.max_num_tokens - request.num_tokens - 1)


def _is_able(request: Request) -> bool:
    """Return True if the request may get a draft for its next decode."""
    return request.params.speculation and not request.is_pooled and request.num_uncomputed_tokens == 1


def with_blocks(request: Request, queues: RequestQueues[Request], width: int) -> int:
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
