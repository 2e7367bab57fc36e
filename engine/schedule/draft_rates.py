"""Tokens per time of iterations with drafts, and the widths that raise them most."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import IterationShape, iteration_ms
from neo_desktop.engine.schedule.draft_rows import Candidate, num_tokens_of
from neo_desktop.engine.speculate.relative_times import READING_ROWS, RelativeTimes, rounded_size

WORTHWHILE = 1.05  # least predicted gain: predictions have larger errors
TRIED_ROWS = 4  # rows that must pay if their tokens are right, or there are no drafts
LEAST_ROW = 0.005  # least time of a row, relative to an iteration


class DraftRates:
    """Predicts rates by tables or a rule, corrected by measured iterations.

    Args:
        cost: None: no measured tables.
    """

    def __init__(self, cost: TableCostModel | None) -> None:
        self._cost = cost
        self.times = RelativeTimes()

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
        for number, (chance, index, row) in enumerate(rows[:num_free], 1):
            gained += chance
            able[index].add_row(batches, row)
            if rounded_size(number) != number < len(rows):
                continue  # predictions take time
            rate = gained / self.relative_time(shape, shape._replace(batches=tuple(batches)))
            if rate > best_rate:
                count, best_rate = number, rate
            elif number >= TRIED_ROWS:
                break  # chances fall
        return Counter(index for _, index, _ in rows[:count]), best_rate

    def relative_time(self, shape: IterationShape, with_drafts: IterationShape) -> float:
        """Return the time of an iteration with drafts over its time without."""
        return self.times.corrected(num_tokens_of(shape), self.guess(shape, with_drafts))

    def guess(self, shape: IterationShape, with_drafts: IterationShape) -> float:
        """Return the relative time by the tables, or by a rule if that is less: tables contain noise."""
        by_rule = (READING_ROWS + num_tokens_of(with_drafts)) / (READING_ROWS + num_tokens_of(shape))
        least = 1.0 + LEAST_ROW * (num_tokens_of(with_drafts) - num_tokens_of(shape))
        return max(min(self.ms(with_drafts) / self.ms(shape), by_rule), least)

    def ms(self, shape: IterationShape) -> float:
        """Return the predicted time of an iteration, or a number proportional to it."""
        predicted_ms = 0.0 if self._cost is None else iteration_ms(self._cost, shape)
        return predicted_ms or float(READING_ROWS + num_tokens_of(shape))
