"""Rows of drafts in an iteration, and the widths that raise the tokens per time most."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple

from neo_desktop.engine.batch import rounded_size
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms
from neo_desktop.engine.request import R, RequestState
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.request_queues import RequestQueues
from neo_desktop.engine.speculate.relative_times import READING_ROWS, RelativeTimes

MAX_WIDTH = 8  # tokens of a draft
WORTHWHILE = 1.05  # least predicted gain: predictions have larger errors
TRIED_ROWS = 4  # rows that must pay if their tokens are right, or there are no drafts
LEAST_ROW = 0.005  # least time of a row, relative to an iteration


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


class DraftRates:
    """Predicts rates by tables or a rule, corrected by measured iterations.

    Args:
        cost: None: no measured tables.
    """

    def __init__(self, cost: TableCostModel | None) -> None:
        self._cost = cost
        self.times = RelativeTimes()
        # The newest shape without drafts, its tokens, and its time.
        self._plain: tuple[IterationShape | None, int, float] = None, 0, 0.0

    def best_rows(
        self,
        able: Sequence[Candidate[Any]],
        every: Sequence[Sequence[float]],
        shape: IterationShape,
        num_free: int,
    ) -> tuple[Mapping[int, int], float]:
        """Return the widths of the best drafts, by index of the request, and the tokens per relative time.

        Args:
            every: per request, the probabilities of its draft's tokens.
        """
        rows = [
            (chance, index, row) for index, each in enumerate(every) for row, chance in enumerate(each, 1)
        ]
        rows.sort(key=lambda row: -row[0])  # stable: a request's rows stay in order, as their chances fall
        num_decodes = num_tokens_of(shape)
        count, best_rate = 0, WORTHWHILE * num_decodes
        gained, batches = float(num_decodes), list(shape.batches)
        most = gained + sum(chance for chance, *_ in rows[:num_free])
        for number, (chance, index, row) in enumerate(rows[:num_free], 1):
            gained += chance
            able[index].add_row(batches, row)
            if rounded_size(number) != number < len(rows):
                continue  # predictions take time
            time = self.relative_time(shape, shape._replace(batches=tuple(batches)))
            if gained / time > best_rate:
                count, best_rate = number, gained / time
            elif number >= TRIED_ROWS or most / time <= best_rate:
                break  # chances fall, and more rows take longer
        return Counter(index for _, index, _ in rows[:count]), best_rate

    def relative_time(self, shape: IterationShape, with_drafts: IterationShape) -> float:
        return self.times.corrected(num_tokens_of(shape), self.guess(shape, with_drafts))

    def guess(self, shape: IterationShape, with_drafts: IterationShape) -> float:
        """Return the relative time by the tables, or by a rule if that is less: tables contain noise."""
        if self._plain[0] is not shape:  # usually it is compared with several others
            self._plain = shape, num_tokens_of(shape), self.ms(shape)
        _, few, plain_ms = self._plain
        more = num_tokens_of(with_drafts) - few
        by_rule = 1.0 + more / (READING_ROWS + few)
        return max(min(self.ms(with_drafts) / plain_ms, by_rule), 1.0 + LEAST_ROW * more)

    def ms(self, shape: IterationShape) -> float:
        """Return the predicted time of an iteration, or a number proportional to it."""
        predicted_ms = 0.0 if self._cost is None else iteration_ms(self._cost, shape)
        return predicted_ms or float(READING_ROWS + num_tokens_of(shape))
