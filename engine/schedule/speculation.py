"""Speculation: an iteration verifies drafts of some requests, if more tokens per time are predicted.

A row per draft token joins the request's decode. Every row chooses its token as it would without the draft,
with the random number of its position. So the tokens are those of iterations without drafts: a draft's
token is kept while it equals the token chosen before it. KV of the other rows is overwritten later.

Requests without drafts:

- chunks of prompts, async decodes (see `AsyncGroups`), and requests for hidden states;
- requests that switched it off.

Drafts of a `ModelDrafter` take time. It is asked where they raise the predicted rate in spite of that, and
now and then to measure its acceptance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple
from weakref import WeakKeyDictionary

from neo_desktop.engine.batch import IterationTiming
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import IterationShape, predict
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.draft_rows import (
    TRIED_ROWS,
    WORTHWHILE,
    Candidate,
    DraftRates,
    candidates_of,
    decodes_of,
    most_tokens,
    num_tokens_of,
    with_blocks,
)
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.request_queues import RequestQueues
from neo_desktop.engine.speculate.drafter import NO_DRAFT, Acceptance, Draft, Drafter, ModelDrafter
from neo_desktop.engine.speculate.kept_states import KeptStates
from neo_desktop.engine.speculate.ngram import NgramDrafter
from neo_desktop.engine.speculate.relative_times import READING_ROWS
from neo_desktop.engine.stats import SpeculationStats

SMOOTHING, SMOOTHING_OF_ALL = 0.15, 0.03  # weight of a token in the acceptance: of a request, of the engine
# Beside this many requests, no drafts are made in the next iterations after none was worthwhile: a search per
# request takes time.
MANY, PAUSE = 8, 4
TRIED_SHARE = 0.01  # most of the time that drafts of a model take to measure its acceptance alone


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


class Speculation:
    """Chooses drafts and their widths.

    Args:
        drafter: None: only the model drafts.
        cost: None: no measured tables.
        max_rows: limit on decodes in an iteration, drafts included.
        model: None: no model drafts.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        cost: TableCostModel | None,
        max_rows: int,
        model: ModelDrafter | None = None,
    ) -> None:
        self._drafter = drafter
        self.model = model
        self._cost = cost
        self._max_rows = max_rows
        self._requests: WeakKeyDictionary[Request, _Speculated] = WeakKeyDictionary()
        expected = [] if drafter is None else list(drafter.expected)
        self._model_kind = len(expected)  # kind of the model's drafts, after those of the drafter
        self._acceptance = Acceptance([*expected, 0.0 if model is None else model.expected], SMOOTHING_OF_ALL)
        self._rates = DraftRates(cost)
        self._is_timed = True  # False: iterations have no measured times
        self._guesses: dict[int, float] = {}  # decodes -> relative time of `TRIED_ROWS` rows
        self._begun: _Begun | None = None  # the current iteration; None: its time says nothing
        self._num_paused = 0  # iterations before drafts are made again
        self._num_gained = 0  # tokens of the current iteration's decodes
        self._num_unasked = 0  # iterations of decodes since the model drafted
        self._model_ms = 0.0  # time in which the model drafted for the current iteration
        self._num_drafts = self._num_drafted = self._num_accepted = 0
        self._with_ms = self._without_ms = 0.0
        self._model_s = 0.0

    @classmethod
    def of(
        cls,
        sources: str,
        cost: TableCostModel | None,
        max_rows: int,
        model: ModelDrafter | None = None,
    ) -> "Speculation | None":
        """Return an engine's speculation; None: the engine shall not speculate.

        Args:
            sources: the option `speculate`.
        """
        if sources == "off":
            return None
        return cls(None if sources in ("draft", "mtp") else NgramDrafter(), cost, max_rows, model)

    @property
    def kept(self) -> KeptStates | None:
        """Hidden states that the drafter reads; None: it reads none."""
        return None if self.model is None else self.model.kept

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_drafted_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
            mean_width=self._num_drafted / max(self._num_drafts, 1),
            gain=self._without_ms / self._with_ms if self._with_ms else 1.0,
            model_s=self._model_s,
        )

    def widened(
        self, decision: Decision[Request], queues: RequestQueues[Request], max_tokens: int
    ) -> Decision[Request]:
        """Return a decision with the drafts that raise the predicted rate most."""
        shape, batches = decodes_of(decision.shape), list(decision.shape.batches)
        num_decodes = num_tokens_of(shape)
        num_free = min(max_tokens - num_tokens_of(decision.shape), self._max_rows - num_decodes)
        drafts = {}
        able = candidates_of(decision, queues, _is_able)
        for candidate, most in self._widths(able, shape, num_free):
            request = candidate.request
            width = with_blocks(request, queues, most)
            if rows := request.draft_rows(self._requests[request].draft.token_ids[:width]):
                drafts[request.request_id] = rows
                for row in range(1, len(rows) + 1):
                    candidate.add_row(batches, row)
        self._num_gained, self._begun = 0, None
        whole = decision.shape._replace(batches=tuple(batches))
        if num_decodes and not whole.async_decodes and not any(batch.prefill_ms for batch in batches):
            plain_ms = decision.predicted.total_ms or float(READING_ROWS + num_decodes)
            guess = self._rates.guess(shape, decodes_of(whole)) if drafts else 1.0
            self._begun = _Begun(num_decodes, plain_ms, guess)
        if not drafts:
            return decision
        predicted = decision.predicted if self._cost is None else predict(self._cost, whole)
        return replace(decision, shape=whole, predicted=predicted, drafts=drafts)

    def awaits_tokens(self, decision: Decision[Request], queues: RequestQueues[Request]) -> bool:
        """Return True if an iteration should wait for pending tokens, because drafts will probably pay."""
        shape, able = decodes_of(decision.shape), candidates_of(decision, queues, _is_able)
        return not self._is_known(shape) or bool(self._widths(able, shape, self._max_rows, are_known=False))

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
        model_ms, self._model_ms = self._model_ms, 0.0
        self._model_s += model_ms / 1e3
        self._num_unasked += 1
        self._is_timed = timing is not None
        if begun is None or timing is None or timing.is_first or not timing.total_ms:
            return
        num_decodes, plain_ms, guess = begun
        times = self._rates.times
        times.learn(num_decodes, plain_ms, timing.total_ms, guess)
        if guess > 1.0 or model_ms:
            self._with_ms += timing.total_ms + model_ms
            self._without_ms += plain_ms * times.pace(num_decodes) * self._num_gained / num_decodes

    def _widths(
        self,
        able: Sequence[Candidate[Request]],
        shape: IterationShape,
        num_free: int,
        *,
        are_known: bool = True,
    ) -> list[tuple[Candidate[Request], int]]:
        """Return the requests that get drafts, with the number of tokens.

        Args:
            able: requests that may get drafts.
            shape: of the decision's decodes. Prompts do not count: they take their time with and without
                drafts.
            num_free: most tokens of the drafts together.
            are_known: no token is pending; otherwise a model drafts nothing yet.
        """
        if not able or num_free < 1 or not self._is_known(shape) or not self._can_pay(shape, able[0]):
            return []
        if len(able) >= MANY and self._num_paused:
            self._num_paused -= 1
            return []
        every = [self._chances(each.request) for each in able]
        widths, rate = self._rates.best_rows(able, every, shape, num_free)
        asked, width = self._asked(able, every, widths, rate, shape, num_free)
        if width and not are_known:
            return [(able[index], width) for index in asked]
        if width:
            requests = [able[index].request for index in asked]
            for index, draft in zip(asked, self._drafts_of_model(requests, width), strict=True):
                if draft.token_ids:  # otherwise the draft from elsewhere remains
                    every[index] = self._noted(able[index].request, draft)
            widths, _ = self._rates.best_rows(able, every, shape, num_free)
        self._num_paused = 0 if widths else PAUSE
        return [(able[index], width) for index, width in widths.items()]

    def _is_known(self, shape: IterationShape) -> bool:
        """Return True if an iteration like this one was measured without drafts, or none ever is."""
        return not self._is_timed or self._rates.times.pace(num_tokens_of(shape)) > 0

    def _can_pay(self, shape: IterationShape, candidate: Candidate[Request]) -> bool:
        """Return True if some more rows would pay if all their tokens were right."""
        num_decodes = num_tokens_of(shape)
        guess = self._guesses.get(num_decodes)
        if guess is None:  # it hardly changes
            batches = list(shape.batches)
            for row in range(1, TRIED_ROWS + 1):
                candidate.add_row(batches, row)
            guess = self._rates.guess(shape, shape._replace(batches=tuple(batches)))
            self._guesses[num_decodes] = guess
        time = self._rates.times.corrected(num_decodes, guess)
        return num_decodes + TRIED_ROWS > WORTHWHILE * num_decodes * time

    def _chances(self, request: Request) -> list[float]:
        """Draft the request's next tokens, without a model; return their probabilities of being chosen."""
        if request not in self._requests:
            self._requests[request] = _Speculated(Acceptance(self._acceptance.means, SMOOTHING))
        num_pending = request.num_tokens - len(request.token_ids)
        most = most_tokens(request)
        draft = NO_DRAFT
        if self._drafter is not None and most > 0:
            draft = self._drafter.draft(request, most + num_pending)
        return self._noted(request, draft)

    def _noted(self, request: Request, draft: Draft) -> list[float]:
        """Keep a request's draft; return the probabilities of its tokens.

        The first drafted tokens stand for those that are pending.
        """
        known = self._requests[request]
        known.draft, known.position = draft, len(request.token_ids)
        num_pending = request.num_tokens - len(request.token_ids)
        mean = known.acceptance.means[draft.kind]
        return [mean**row for row in range(num_pending + 1, len(draft.token_ids) + 1)]

    def _asked(
        self,
        able: Sequence[Candidate[Request]],
        every: Sequence[Sequence[float]],
        widths: Mapping[int, int],
        best_rate: float,
        shape: IterationShape,
        num_free: int,
    ) -> tuple[list[int], int]:
        """Return the requests that the model shall draft for, as indices, and the number of tokens; 0: none.

        Args:
            every: per request, the probabilities of its draft from elsewhere.
            widths: the best widths of these drafts, by index.
            best_rate: the tokens per relative time with them.
        """
        model = self.model
        if model is None:
            return [], 0
        means = [self._requests[each.request].acceptance.means[self._model_kind] for each in able]
        asked = [
            index
            for index, (each, chances) in enumerate(zip(able, every, strict=True))
            if most_tokens(each.request) > 0
            and means[index] > max(chances, default=0.0)
            and model.is_able(each.request)
        ]
        asked = sorted(asked, key=lambda index: -means[index])[: min(model.most_requests, num_free)]
        if not asked:
            return [], 0
        requests = [able[index].request for index in asked]
        most = min(num_free // len(asked), max(map(most_tokens, requests)))
        num_decodes = num_tokens_of(shape)
        plain_ms = self._rates.ms(shape) * self._rates.times.pace(num_decodes)  # 0: nothing is timed
        best_width, rate = 0, 0.0
        gained, batches = float(num_decodes), list(shape.batches)
        for index, width in widths.items():
            for row in range(1, width + 1) if index not in asked else ():
                gained += every[index][row - 1]
                able[index].add_row(batches, row)
        for width in range(1, most + 1):
            for index in asked:
                gained += means[index] ** width
                able[index].add_row(batches, width)
            time = self._rates.relative_time(shape, shape._replace(batches=tuple(batches)))
            if plain_ms:
                time += model.ms(requests, width) / plain_ms
            before, rate = rate, gained / time
            if rate > best_rate:
                best_width, best_rate = width, rate
            elif rate < before:
                break  # predictions take time
        if not best_width and plain_ms:
            tried = min(TRIED_ROWS, most)
            if model.ms(requests, tried) < TRIED_SHARE * self._num_unasked * plain_ms:
                return asked, tried
        return asked, best_width

    def _drafts_of_model(self, requests: Sequence[Request], width: int) -> list[Draft]:
        assert self.model is not None
        started = perf_counter()
        drafts = self.model.draft_all(requests, width)
        self._model_ms += 1e3 * (perf_counter() - started)
        self._num_unasked = 0
        return [
            Draft(token_ids[: most_tokens(request)], self._model_kind)
            for request, token_ids in zip(requests, drafts, strict=True)
        ]


def _is_able(request: Request) -> bool:
    """Return True if the request may get drafts at all."""
    return request.params.speculation and not request.is_pooled
