"""A small model that drafts greedily for a large one, with KV of its own."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from neo_desktop.engine.batch import (
    IterationPlan,
    IterationResult,
    SamplingInput,
    ScheduledSequence,
    SubBatch,
    rounded_size,
)
from neo_desktop.engine.cuda.errors import is_lost
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.request import NO_TOKENS, Request
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.speculate.kept_states import KeptStates
from neo_desktop.engine.speculate.relative_times import READING_ROWS

logger = logging.getLogger(__name__)

GREEDY = SamplingParams(temperature=0.0)
SMOOTHING, SHORTENING = 0.1, 0.5  # weight of a longer, or shorter, new time: other programs only delay
USUAL_TOKENS = 16  # tokens that a request gains between two drafts; more are a prompt's
MOST_SPREAD = 128  # iterations among which the time of a prompt is divided
WARM_UP = "warm-up"


@dataclass(slots=True)
class Context:
    """The tokens of a request whose KV the draft model has."""

    request: Request
    num_preemptions: int  # of the request at that time
    token_ids: list[int] = field(default_factory=list)
    num_checked: int = 0  # first tokens that are the request's for sure

    @property
    def is_void(self) -> bool:
        """True if the request has ended or was preempted."""
        return self.request.is_finished or self.request.num_preemptions != self.num_preemptions


class DraftLimits(NamedTuple):
    """Sizes of a model that drafts."""

    max_context_tokens: int
    own_vocab_size: int  # tokens that it knows
    vocab_size: int  # tokens that the large model knows
    max_tokens: int  # most tokens of a plan
    most_requests: int  # most requests of a plan


class StepTimes:
    """Measured times of a token per request, by the rounded number of requests."""

    def __init__(self) -> None:
        self._ms: dict[int, float] = {}

    def ms(self, num_requests: int) -> float:
        """Return the time of a step; one request's was measured."""
        if (known := self._ms.get(rounded_size(num_requests))) is not None:
            return known
        return self._ms[1] * (READING_ROWS + num_requests) / (READING_ROWS + 1)

    def learn(self, num_requests: int, ms: float) -> None:
        size = rounded_size(num_requests)
        self._ms[size] = _updated(self._ms.get(size, ms), ms)


@contextmanager
def closed_by_errors(name: str, close: Callable[[], object]) -> Iterator[None]:
    """Close a drafter at an error; only a lost GPU's is raised, as the large model works without drafts."""
    try:
        yield
    except Exception as error:
        if is_lost(error):
            raise
        logger.exception("%s failed: no more drafts by it", name)
        close()


class DraftModel:
    """Drafts with a smaller model of the same vocabulary.

    It first computes the tokens that a request gained since its last draft, then a token per step, for all
    requests together. KV of wrong tokens is overwritten. Requests that end or are preempted lose their KV
    with the next draft, and the longest without a draft lose it if memory is short.

    Args:
        execute: carries out a plan of the draft model.
        kv: block counts of its KV, in one tier.
    """

    expected = 0.6
    kept: KeptStates | None = None
    reads_images = False  # True: images in a prompt are no obstacle

    def __init__(
        self,
        execute: Callable[[IterationPlan], IterationResult],
        kv: KVCache,
        release: Callable[[], object],
        limits: DraftLimits,
    ) -> None:
        self.most_requests = limits.most_requests
        self._execute: Callable[[IterationPlan], IterationResult] | None = execute
        self._release = release
        self._kv = kv
        (self._tier,) = kv.tiers
        self._most_tokens = min(limits.max_context_tokens, kv.capacity_tokens(self._tier))  # of a request
        self._limits = limits
        self._contexts: dict[str, Context] = {}  # the request with the newest draft is last
        self._steps = StepTimes()
        self._token_ms = 0.0  # time of a token to catch up
        self._measure()

    def read_from(self, kv: KVCache, storage: KVStorage) -> None:
        """Do nothing: it has KV of its own."""

    def ms(self, requests: Sequence[Request], width: int) -> float:
        """Return the predicted time. A prompt's time counts in parts, since all its drafts need it."""
        num_late = 0.0
        for request in requests:
            context = self._contexts.get(request.request_id)
            late = self._num_known(request) - (0 if context is None else len(context.token_ids))
            if late > USUAL_TOKENS:
                late = min(late, self._limits.max_tokens)
                num_late += late / min(max(request.max_num_tokens - request.num_tokens, 1), MOST_SPREAD)
            else:
                num_late += max(late - 1, 0)
        return width * self._steps.ms(len(requests)) + num_late * self._token_ms

    def draft_all(self, requests: Sequence[Request], width: int) -> list[Sequence[int]]:
        self._free([name for name, context in self._contexts.items() if context.is_void])
        able = [request for request in requests if self.is_able(request)]
        self._make_room(able)
        drafts: Mapping[str, Sequence[int]] = {}
        with closed_by_errors("the draft model", self.close):
            drafts = self._drafts(able, width)
        return [self._usable(drafts.get(request.request_id, ())) for request in requests]

    def close(self) -> None:
        """Drop the model and its memory; there are no drafts any more. May be called again."""
        self._execute = None
        self._release()

    def is_able(self, request: Request) -> bool:
        """Return True if the draft model knows all the request's tokens, and its KV has room for them."""
        if self._execute is None or (request.images is not None and not self.reads_images):
            return False
        if self._num_known(request) > self._most_tokens:
            return False
        context = self._contexts.get(request.request_id)
        new = request.token_ids[0 if context is None else context.num_checked :]
        return max(new, default=0) < self._limits.own_vocab_size

    def _num_known(self, request: Request) -> int:
        """Return the number of `_known` tokens."""
        return len(request.token_ids)

    def _known(self, request: Request) -> Sequence[int]:
        """Return the tokens of the request that the draft model computes."""
        return request.token_ids

    def _usable(self, draft: Sequence[int]) -> Sequence[int]:
        """Return a draft up to a token that the large model does not know."""
        unknown = (index for index, token_id in enumerate(draft) if token_id >= self._limits.vocab_size)
        return draft[: next(unknown, len(draft))]

    def _drafts(self, requests: Sequence[Request], width: int) -> dict[str, list[int]]:
        """Return the drafts by request ID; a request that is far behind catches up, without a draft."""
        late: list[tuple[Context, Sequence[int]]] = []
        for request in requests:
            if (context := self._context_of(request, width)) is not None:
                late.append((context, self._known(request)[len(context.token_ids) :]))
        late.sort(key=lambda item: len(item[1]))
        num_free = self._limits.max_tokens
        chunks: list[ScheduledSequence] = []
        ready: dict[str, Context] = {}
        for context, tokens in late:
            chunk = tokens[:num_free]
            num_free -= len(chunk)
            is_ready = len(chunk) == len(tokens)
            if chunk:
                chunks.append(self._sequence(context.request.request_id, context, chunk, is_last=is_ready))
            if chunk and is_ready:
                ready[context.request.request_id] = context
        drafts: dict[str, list[int]] = {name: [] for name in ready}
        started = time.perf_counter()
        for step in range(width if ready else min(len(chunks), 1)):
            result = self._run(chunks)
            now = time.perf_counter()
            if result.timing is None or not result.timing.is_first:
                self._learn(chunks, 1e3 * (now - started))
            started, chunks = now, []
            for name, token in result.sampled.items():
                drafts[name].append(token.token_id)
                if step + 1 < width and token.token_id < self._limits.own_vocab_size:
                    chunks.append(self._sequence(name, ready[name], [token.token_id], is_last=True))
            if not chunks:
                break
        return drafts

    def _run(self, sequences: Iterable[ScheduledSequence]) -> IterationResult:
        assert self._execute is not None
        return self._execute(IterationPlan((SubBatch(tuple(sequences)),)))

    def _sequence(
        self, name: str, context: Context, token_ids: Sequence[int], *, is_last: bool
    ) -> ScheduledSequence:
        """Return the next tokens of a context, which count as computed from now on."""
        start = len(context.token_ids)
        context.token_ids.extend(token_ids)
        sampling = SamplingInput(GREEDY, 0, 0, len(context.token_ids), NO_TOKENS, NO_TOKENS)
        table = self._kv.block_table(name)
        return ScheduledSequence(
            name, tuple(token_ids), start, self._tier, table, sampling if is_last else None
        )

    def _context_of(self, request: Request, width: int) -> Context | None:
        """Return the context with the KV that is right, and room for a draft; None: no room."""
        name, tokens = request.request_id, self._known(request)
        num_tokens = len(tokens) + width - 1  # the last drafted token needs no KV
        if num_tokens > self._most_tokens:
            return None
        if name not in self._contexts and self._kv.admit(name, num_tokens, (), self._tier) is not None:
            self._contexts[name] = Context(request, request.num_preemptions)
        if name not in self._contexts or not self._kv.extend(name, num_tokens):
            return None
        context = self._contexts[name] = self._contexts.pop(name)
        num_right = context.num_checked
        last = min(len(context.token_ids), len(tokens) - 1)  # the newest token is computed for its successor
        while num_right < last and context.token_ids[num_right] == tokens[num_right]:
            num_right += 1
        del context.token_ids[num_right:]
        context.num_checked = num_right
        return context

    def _make_room(self, requests: Sequence[Request]) -> None:
        """Free the KV of other requests while blocks for these ones are missing."""
        asked = {request.request_id for request in requests}
        needed = len(asked) + sum(
            self._kv.blocks_for(self._num_known(request) + USUAL_TOKENS)
            for request in requests
            if request.request_id not in self._contexts
        )
        for name in [name for name in self._contexts if name not in asked]:
            if self._kv.num_free_blocks(self._tier) >= needed:
                break
            self._free([name])

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            del self._contexts[name]
            self._kv.free(name)

    def _learn(self, sequences: Sequence[ScheduledSequence], ms: float) -> None:
        """Note the time of a step, or of tokens to catch up."""
        num_late = sum(len(sequence.token_ids) - 1 for sequence in sequences)
        if num_late > len(sequences):
            token_ms = max(ms - self._steps.ms(len(sequences)), 0.0) / num_late
            self._token_ms = _updated(self._token_ms, token_ms)
        elif not num_late:
            self._steps.learn(len(sequences), ms)

    def _measure(self) -> None:
        """Measure the times of one request: the shortest of some, as the first one compiles."""
        num_tokens = min(self._limits.max_tokens, self._most_tokens) // 2
        if self._kv.admit(WARM_UP, num_tokens + 1, (), self._tier) is None:
            raise MemoryError("the draft model's KV has no room for a request")
        table = self._kv.block_table(WARM_UP)
        sampling = SamplingInput(GREEDY, 0, 0, 1, NO_TOKENS, NO_TOKENS)
        times: dict[int, float] = {}
        for count in (num_tokens, num_tokens, 1, 1, 1, 1, 1):
            started = time.perf_counter()
            self._run([ScheduledSequence(WARM_UP, (0,) * count, 0, self._tier, table, sampling)])
            times[count] = min(1e3 * (time.perf_counter() - started), times.get(count, inf))
        self._steps.learn(1, times[1])
        self._token_ms = max(times[num_tokens] - times[1], 0.0) / max(num_tokens - 1, 1)
        self._kv.free(WARM_UP)


def _updated(before: float, ms: float) -> float:
    return before + (SMOOTHING if ms > before else SHORTENING) * (min(ms, 3 * before) - before)
