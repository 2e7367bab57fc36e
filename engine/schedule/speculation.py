"""Speculation: an iteration verifies drafts of some requests, if more tokens per time are predicted.

A row per draft token joins the request's decode. Every row chooses its token as it would without the draft,
with the random number of its position. So the tokens are those of iterations without drafts: a draft's
token is kept while it equals the token chosen before it. KV of the other rows is overwritten later.

Requests without drafts:

- chunks of prompts, async decodes (see `AsyncGroups`), and requests for hidden states;
- requests that switched it off;
- models with recurrent layers (`Speculation.of`).
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms, predict
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.request_queues import RequestQueues
from neo_desktop.engine.speculate.acceptance import Acceptance
from neo_desktop.engine.speculate.drafter import NO_DRAFT, Draft, Drafter
from neo_desktop.engine.speculate.ngram import NgramDrafter
from neo_desktop.engine.speculate.relative_times import RelativeTimes, rounded_size
from neo_desktop.engine.stats import SpeculationStats

MAX_WIDTH = 8  # tokens of a draft
WORTHWHILE = 1.05  # least predicted gain: predictions have larger errors
TRIED_ROWS = 4  # rows that must pay if their tokens are right, or there are no drafts
SMOOTHING, SMOOTHING_OF_ALL = 0.15, 0.03  # weight of a token in the acceptance: of a request, of the engine
LEAST_ROW = 0.005  # least time of a row, relative to an iteration
# Beside this many requests, no drafts are made in the next iterations after none was worthwhile: a search per
# request takes time.
MANY, PAUSE = 8, 4
READING_ROWS = 8  # a guess: reading the weights takes as long as computing this number of rows


@dataclass(slots=True)
class _Speculated:
    """A request's newest draft, and the acceptance of its drafts."""

    acceptance: Acceptance
    draft: Draft = NO_DRAFT
    position: int = 0  # of the draft's first token


class _Begun(NamedTuple):
    """An iteration of decodes alone."""

    num_decodes: int
    plain_ms: float  # predicted without drafts
    guess: float  # of its relative time; 1: it has no drafts


class _Candidate(NamedTuple):
    """A request that may get drafts in an iteration."""

    request: Request
    batch: int  # index of its sub-batch
    tier: KVTier

    def plus_row(self, batch: BatchShape, row: int) -> BatchShape:
        """Return its sub-batch with the decode of the draft's token number `row`."""
        return batch.plus({self.tier: Decodes(1, self.request.num_tokens + row)})


class Speculation:
    """Chooses drafts and their widths.

    Args:
        cost: None: no measured tables.
        max_rows: limit on decodes in an iteration, drafts included.
    """

    def __init__(self, drafter: Drafter, cost: TableCostModel | None, max_rows: int) -> None:
        self._drafter = drafter
        self._cost = cost
        self._max_rows = max_rows
        self._requests: WeakKeyDictionary[Request, _Speculated] = WeakKeyDictionary()
        self._acceptance = Acceptance(drafter.expected, SMOOTHING_OF_ALL)
        self._times = RelativeTimes()
        self._is_timed = True  # False: iterations have no measured times
        self._guesses: dict[int, float] = {}  # decodes -> relative time of `TRIED_ROWS` rows
        self._begun: _Begun | None = None  # the current iteration; None: its time says nothing
        self._num_paused = 0  # iterations before drafts are made again
        self._num_gained = 0  # tokens of the current iteration's decodes
        self._num_drafts = self._num_drafted = self._num_accepted = 0
        self._with_ms = self._without_ms = 0.0

    @classmethod
    def of(
        cls, sources: str, kv_cache: KVCache, cost: TableCostModel | None, max_rows: int
    ) -> "Speculation | None":
        """Return an engine's speculation; None: the engine cannot or shall not speculate.

        Args:
            sources: the option `speculate`.
        """
        # The states of recurrent layers would have to be kept after every row of a draft.
        if sources == "off" or kv_cache.states is not None:
            return None
        return cls(NgramDrafter(), cost, max_rows)

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_drafted_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
            mean_width=self._num_drafted / max(self._num_drafts, 1),
            gain=self._without_ms / self._with_ms if self._with_ms else 1.0,
        )

    def widened(
        self, decision: Decision[Request], queues: RequestQueues[Request], max_tokens: int
    ) -> Decision[Request]:
        """Return a decision with the drafts that raise the predicted rate most.

        Args:
            max_tokens: limit on tokens of the iteration.
        """
        shape, batches = _decodes_of(decision.shape), list(decision.shape.batches)
        num_decodes = _num_tokens(shape)
        num_free = min(max_tokens - _num_tokens(decision.shape), self._max_rows - num_decodes)
        drafts = {}
        for candidate, most in self._widths(decision, queues, shape, num_free):
            request = candidate.request
            width = _with_blocks(request, queues, most)
            if rows := request.draft_rows(self._requests[request].draft.token_ids[:width]):
                drafts[request.request_id] = rows
                for row in range(1, len(rows) + 1):
                    batches[candidate.batch] = candidate.plus_row(batches[candidate.batch], row)
        self._num_gained, self._begun = 0, None
        whole = decision.shape._replace(batches=tuple(batches))
        if num_decodes and not whole.async_decodes and not any(batch.prefill_ms for batch in batches):
            plain_ms = decision.predicted.total_ms or float(READING_ROWS + num_decodes)
            guess = self._guess(shape, _decodes_of(whole)) if drafts else 1.0
            self._begun = _Begun(num_decodes, plain_ms, guess)
        if not drafts:
            return decision
        predicted = decision.predicted if self._cost is None else predict(self._cost, whole)
        return replace(decision, shape=whole, predicted=predicted, drafts=drafts)

    def awaits_tokens(self, decision: Decision[Request], queues: RequestQueues[Request]) -> bool:
        """Return True if an iteration should wait for pending tokens, because drafts will probably pay."""
        shape = _decodes_of(decision.shape)
        return not self._is_known(shape) or bool(self._widths(decision, queues, shape, self._max_rows))

    def learn(self, request: Request, width: int, num_tokens: int) -> None:
        """Note the tokens that a request gained in an iteration.

        Args:
            width: tokens of its draft that were verified.
        """
        self._num_gained += num_tokens
        if width:
            self._num_drafts += 1
            self._num_drafted += width
            self._num_accepted += num_tokens - 1
        known = self._requests.get(request)
        if known is None or not known.draft.token_ids:
            return
        chosen = request.token_ids[known.position : known.position + num_tokens]
        for acceptance in (known.acceptance, self._acceptance):
            acceptance.learn(known.draft.kind, known.draft.token_ids, chosen)
        if known.draft.is_predicted:
            request.num_accepted_predicted += num_tokens - 1
            request.num_rejected_predicted += width - (num_tokens - 1)
        known.draft = NO_DRAFT

    def measure(self, timing: IterationTiming | None) -> None:
        """Compare the iteration that has ended with its prediction."""
        begun, self._begun = self._begun, None
        self._is_timed = timing is not None
        if begun is None or timing is None or timing.is_first or not timing.total_ms:
            return
        num_decodes, plain_ms, guess = begun
        self._times.learn(num_decodes, plain_ms, timing.total_ms, guess)
        if guess > 1.0:
            self._with_ms += timing.total_ms
            self._without_ms += plain_ms * self._times.pace(num_decodes) * self._num_gained / num_decodes

    def _widths(
        self,
        decision: Decision[Request],
        queues: RequestQueues[Request],
        shape: IterationShape,
        num_free: int,
    ) -> list[tuple[_Candidate, int]]:
        """Return the requests that get drafts, with the number of tokens.

        Args:
            shape: of the decision's decodes. Prompts do not count: they take their time with and without
                drafts.
            num_free: most tokens of the drafts together.
        """
        able = [
            _Candidate(request, index, queues.tier_of(request))
            for index, batch in enumerate(decision.sub_batches)
            for request, num_tokens in batch
            if num_tokens == 1 and _is_able(request)
        ]
        if not able or num_free < 1 or not self._is_known(shape) or not self._can_pay(shape, able[0]):
            return []
        if len(able) >= MANY and self._num_paused:
            self._num_paused -= 1
            return []
        candidates = [(each, chances) for each in able if (chances := self._chances(each.request))]
        rows = [
            (chance, index, row)
            for index, (_, chances) in enumerate(candidates)
            for row, chance in enumerate(chances, 1)
        ]
        rows.sort(key=lambda row: -row[0])  # stable: a request's rows stay in order, as their chances fall
        num_decodes = _num_tokens(shape)
        count, best_rate = 0, WORTHWHILE * num_decodes
        gained, batches = float(num_decodes), list(shape.batches)
        for number, (chance, index, row) in enumerate(rows[:num_free], 1):
            candidate, _ = candidates[index]
            gained += chance
            batches[candidate.batch] = candidate.plus_row(batches[candidate.batch], row)
            if rounded_size(number) != number < len(rows):
                continue  # predictions take time
            rate = gained / self._relative_time(shape, shape._replace(batches=tuple(batches)))
            if rate > best_rate:
                count, best_rate = number, rate
            elif number >= TRIED_ROWS:
                break  # chances fall
        self._num_paused = 0 if count else PAUSE
        widths: Counter[int] = Counter(index for _, index, _ in rows[:count])
        return [(candidates[index][0], width) for index, width in widths.items()]

    def _is_known(self, shape: IterationShape) -> bool:
        """Return True if an iteration like this one was measured without drafts, or none ever is."""
        return not self._is_timed or self._times.pace(_num_tokens(shape)) > 0

    def _can_pay(self, shape: IterationShape, candidate: _Candidate) -> bool:
        """Return True if some more rows would pay if all their tokens were right."""
        num_decodes = _num_tokens(shape)
        guess = self._guesses.get(num_decodes)
        if guess is None:  # it hardly changes
            batches = list(shape.batches)
            for row in range(1, TRIED_ROWS + 1):
                batches[candidate.batch] = candidate.plus_row(batches[candidate.batch], row)
            guess = self._guess(shape, shape._replace(batches=tuple(batches)))
            self._guesses[num_decodes] = guess
        time = self._times.corrected(num_decodes, guess)
        return num_decodes + TRIED_ROWS > WORTHWHILE * num_decodes * time

    def _chances(self, request: Request) -> list[float]:
        """Draft the request's next tokens; return their probabilities of being chosen.

        The first drafted tokens stand for those that are pending.
        """
        known = self._requests.get(request)
        if known is None:
            acceptance = Acceptance(self._acceptance.means, SMOOTHING)
            known = self._requests[request] = _Speculated(acceptance)
        num_pending = request.num_tokens - len(request.token_ids)
        most = min(MAX_WIDTH, request.max_num_tokens - request.num_tokens - 1)
        known.draft = self._drafter.draft(request, most + num_pending) if most > 0 else NO_DRAFT
        known.position = len(request.token_ids)
        mean = known.acceptance.means[known.draft.kind]
        return [mean**row for row in range(num_pending + 1, len(known.draft.token_ids) + 1)]

    def _relative_time(self, shape: IterationShape, with_drafts: IterationShape) -> float:
        """Return the time of an iteration with drafts over its time without."""
        return self._times.corrected(_num_tokens(shape), self._guess(shape, with_drafts))

    def _guess(self, shape: IterationShape, with_drafts: IterationShape) -> float:
        """Return the relative time by the tables, or by a rule if that is less: tables contain noise."""
        by_rule = (READING_ROWS + _num_tokens(with_drafts)) / (READING_ROWS + _num_tokens(shape))
        least = 1.0 + LEAST_ROW * (_num_tokens(with_drafts) - _num_tokens(shape))
        return max(min(self._ms(with_drafts) / self._ms(shape), by_rule), least)

    def _ms(self, shape: IterationShape) -> float:
        predicted_ms = 0.0 if self._cost is None else iteration_ms(self._cost, shape)
        return predicted_ms or float(READING_ROWS + _num_tokens(shape))


def _is_able(request: Request) -> bool:
    """Return True if the request may get a draft for its next decode."""
    return request.params.speculation and not request.is_pooled and request.num_uncomputed_tokens == 1


def _with_blocks(request: Request, queues: RequestQueues[Request], width: int) -> int:
    """Return how many tokens of a draft have KV blocks; take a free block if enough are left for others."""
    kv, request_id, tier = queues.kv, request.request_id, queues.tier_of(request)
    if kv.num_free_blocks(tier) > len(queues.running[tier]):
        kv.extend(request_id, request.num_tokens + width)
    return min(width, kv.room(request_id) - request.num_tokens)


def _decodes_of(shape: IterationShape) -> IterationShape:
    """Return the shape of an iteration without its prompts."""
    batches = [BatchShape().plus(batch.decodes) for batch in shape.batches]
    return shape._replace(batches=tuple(batches))


def _num_tokens(shape: IterationShape) -> int:
    return sum(batch.tokens for batch in shape.batches)
