"""Drafts of a given acceptance, with the widths that the engine would choose."""

import random
from collections.abc import Mapping
from dataclasses import replace

from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import predict
from neo_desktop.engine.request import R, RequestState
from neo_desktop.engine.schedule.draft_rows import (
    DraftRates,
    candidates_of,
    decodes_of,
    most_tokens,
    num_tokens_of,
    with_blocks,
)
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.request_queues import RequestQueues


class SimulatedDrafts:
    """Every request has a draft in each iteration; making it takes no time.

    Args:
        acceptance: probability that a drafted token is right, which the scheduler knows.
        max_rows: limit on decodes in an iteration, drafts included.
    """

    def __init__(self, acceptance: float, cost: TableCostModel, max_rows: int, seed: int = 0) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"an acceptance is between 0 and 1, got {acceptance:g}")
        self._acceptance = acceptance
        self._cost = cost
        self._max_rows = max_rows
        self._rates = DraftRates(cost)
        self._random = random.Random(seed)

    def widened(
        self, decision: Decision[R], queues: RequestQueues[R], max_tokens: int
    ) -> tuple[Decision[R], Mapping[R, int]]:
        """Return a decision with drafts, and their widths by request."""
        shape, batches = decodes_of(decision.shape), list(decision.shape.batches)
        num_free = min(max_tokens - num_tokens_of(decision.shape), self._max_rows - num_tokens_of(shape))
        able = candidates_of(decision, queues, lambda request: True)
        if not able or num_free < 1 or not self._acceptance:
            return decision, {}
        every = [[self._acceptance**row for row in range(1, most_tokens(each.request) + 1)] for each in able]
        best, _ = self._rates.best_rows(able, every, shape, num_free)
        widths: dict[R, int] = {}
        for index, most in best.items():
            candidate = able[index]
            widths[candidate.request] = width = with_blocks(candidate.request, queues, most)
            for row in range(1, width + 1):
                candidate.add_row(batches, row)
        whole = decision.shape._replace(batches=tuple(batches))
        return replace(decision, shape=whole, predicted=predict(self._cost, whole)), widths

    def accept(self, request: RequestState, width: int) -> None:
        """Add the right tokens of a request's draft, up to the first wrong one."""
        for _ in range(width):
            if request.is_complete or self._random.random() >= self._acceptance:
                return
            request.num_tokens += 1
            request.num_computed_tokens += 1
