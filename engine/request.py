"""A request within the engine, and its outputs."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

import numpy as np

from neo_desktop.engine.batch import DraftRow, FloatArray, SampledToken, SamplingInput
from neo_desktop.engine.detokenizer import IncrementalText
from neo_desktop.engine.grammar import GrammarState
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv.block_pool import BlockHash, extend_hashes
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.thought_budget import ThoughtBudget
from neo_desktop.models.vision.prompt import ImageRows

NO_TOKENS = IntArray().view()


class FinishReason(StrEnum):
    """Reason for the end of a request."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens reached, or the context is full
    ABORT = "abort"  # cancelled by its owner
    ERROR = "error"  # the engine could not continue it; `error` has the reason
    DEAD_END = "dead_end"  # its grammar allows no further token; `error` has the reason


class RequestOutput(NamedTuple):
    """Output that one iteration added to a request."""

    request_id: str  # the owner's name
    choice: int  # index among the n outputs of the prompt
    text: str  # new text; may be empty while a character or a possible stop string is unfinished
    tokens: tuple[SampledToken, ...]  # new tokens
    finish_reason: FinishReason | None  # None: more output will follow
    error: str | None  # set if finish_reason is ERROR or DEAD_END
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was reused from earlier requests
    num_output_tokens: int  # so far
    embedding: FloatArray | None = None  # unit length, [hidden]; set at the end if pooling was requested
    stopped_by: str | None = None  # the stop string that ended it
    num_accepted_predicted: int = 0  # tokens of the predicted output that were drafted and right, so far
    num_rejected_predicted: int = 0  # and wrong


class RequestState:
    """The scheduler's view of a request: its number of tokens, and of computed tokens.

    Args:
        owner_id: the owner's name; the n outputs of a prompt are n of these objects.
        arrival: position in the order of arrival; preemption does not change it.
        max_num_tokens: limit on prompt and output together.
    """

    def __init__(
        self, request_id: str, owner_id: str, arrival: int, num_prompt_tokens: int, max_num_tokens: int
    ) -> None:
        self.request_id = request_id
        self.owner_id = owner_id
        self.arrival = arrival
        self.num_prompt_tokens = num_prompt_tokens
        self.max_num_tokens = max_num_tokens
        self.num_tokens = num_prompt_tokens  # prompt and output so far, including the pending token
        self.num_computed_tokens = 0  # tokens whose KV is in the cache
        self.num_cached_tokens = 0  # prompt tokens found in the cache at first admission
        self.num_preemptions = 0
        self.iterations_waited = 0  # consecutive iterations that a CPU decode had to wait
        self.finish_reason: FinishReason | None = None

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens without KV: the rest of the prompt, or the token sampled last."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_complete(self) -> bool:
        """True if the request ends with its current or pending tokens."""
        return self.num_tokens >= self.max_num_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def block_hashes(self, block_size: int) -> Sequence[BlockHash]:
        """Return the hashes of full blocks, for reuse of their KV; empty if the content is unknown."""
        return ()

    def chunk_of(self, num_tokens: int) -> int:
        """Return the tokens of the next chunk, about `num_tokens`, that cut no image."""
        return num_tokens


R = TypeVar("R", bound=RequestState)


class Request(RequestState):
    """One sequence of tokens that grows until it is finished.

    Args:
        choice: index among the n outputs of the prompt.
        seed: with `choice` and a token's position, determines the random number for that token.
        max_context_tokens: limit on prompt and output together.
        block_hashes: known hashes of the prompt's full blocks.
        images: rows of the prompt that come from images.
        predicted_token_ids: a text that the output probably resembles; a source of drafts.
    """

    def __init__(
        self,
        owner_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        choice: int,
        seed: int,
        arrival: int,
        max_context_tokens: int,
        eos_token_ids: tuple[int, ...],
        text: IncrementalText,
        grammar: GrammarState | None = None,
        budget: ThoughtBudget | None = None,
        block_hashes: Sequence[BlockHash] = (),
        images: ImageRows | None = None,
        predicted_token_ids: Sequence[int] = (),
    ) -> None:
        num_prompt_tokens = len(prompt_token_ids)
        room = max_context_tokens - num_prompt_tokens
        max_output_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.pooling is not None:  # its end replaces a token
            max_output_tokens = 1
        super().__init__(
            f"{owner_id}#{choice}",
            owner_id,
            arrival,
            num_prompt_tokens,
            num_prompt_tokens + max_output_tokens,
        )
        self.prompt_token_ids = prompt_token_ids
        self.images = images
        self.params = params
        self.choice = choice
        self.token_ids = list(prompt_token_ids)  # known tokens of prompt and output
        self.error: str | None = None
        self._seed = seed
        self._end_token_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self._text = text
        self._grammar = grammar
        self._budget = budget
        self.predicted_token_ids = predicted_token_ids
        self.num_accepted_predicted = 0  # see `RequestOutput`
        self.num_rejected_predicted = 0
        self.is_pooled = params.pooling is not None
        self._pooled: FloatArray | None = None  # running sum of the requested hidden states
        self._new_tokens: list[SampledToken] = []
        self._block_hashes = list(block_hashes)
        self._has_penalties = params.has_penalties
        # only for penalties, see `SamplingInput`
        self._distinct_prompt = NO_TOKENS
        if self._has_penalties:
            self._distinct_prompt = IntArray(np.unique(prompt_token_ids)).view()
        self._output = IntArray()

    def block_hashes(self, block_size: int) -> Sequence[BlockHash]:
        """Return the hashes of full blocks; each is computed once.

        Empty if hidden states are requested: KV reuse would skip tokens.
        """
        if self.is_pooled:
            return ()
        extend_hashes(self._block_hashes, self.token_ids, block_size, self.images)
        return self._block_hashes

    def chunk_of(self, num_tokens: int) -> int:
        if self.images is None:
            return num_tokens
        return self.images.chunk_of(self.num_computed_tokens, num_tokens)

    @property
    def needs_tokens(self) -> bool:
        """True if choosing a token requires all earlier ones."""
        is_due = self._budget is not None and self._budget.is_due
        return self._grammar is not None or self._has_penalties or is_due

    def sampling_input(self) -> SamplingInput:
        forced = None if self._budget is None else self._budget.mask()
        allowed = None if self._grammar is None else self._grammar.allowed_tokens
        return SamplingInput(
            self.params,
            self._seed,
            self.choice,
            self.num_tokens,
            self._distinct_prompt,
            self._output.view() if self._has_penalties else NO_TOKENS,
            allowed if forced is None else lambda: forced,
        )

    def draft_rows(self, draft: Sequence[int]) -> list[DraftRow]:
        """Return the rows that verify a draft, up to a token that is forbidden or ends the output."""
        rows: list[DraftRow] = []
        if self._budget is not None and self._budget.is_thinking:  # it may force any of the next tokens
            return rows
        last, grammar = self.sampling_input(), self._grammar
        for token_id in draft:
            after = None if grammar is None else grammar.after(token_id)
            is_end = grammar is not None and (after is None or after.is_complete)
            if is_end or token_id in self._end_token_ids:
                break
            output = last.output_token_ids
            if self._has_penalties:
                output = np.append(output, np.int32(token_id))
            grammar = after
            allowed = None if grammar is None else grammar.allowed_tokens
            last = last._replace(position=last.position + 1, output_token_ids=output, allowed_tokens=allowed)
            rows.append(DraftRow(token_id, last))
        return rows

    def num_pooled(self, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens need hidden states; they are the last ones."""
        if self.params.pooling == "mean":
            return num_tokens
        ends = self.num_computed_tokens + num_tokens == self.num_tokens
        return int(self.params.pooling == "last" and ends)

    def pool(self, hidden: FloatArray, *, is_first: bool) -> None:
        """Add a sum of hidden states, [hidden], to those before, unless it starts at the first token."""
        self._pooled = hidden if is_first or self._pooled is None else self._pooled + hidden

    def append(self, token: SampledToken) -> None:
        token_id = token.token_id
        if self._grammar is not None and not self._grammar.accept(token_id):
            self.finish(FinishReason.DEAD_END, self._grammar.error)
            return
        if self._budget is not None:
            self._budget.accept(token_id)
        self.token_ids.append(token_id)
        self._new_tokens.append(token)
        if self._has_penalties:
            self._output.append(token_id)
        is_stopped = token_id in self._end_token_ids or self._text.push(token_id)
        if is_stopped or (self._grammar is not None and self._grammar.is_complete):
            self.finish(FinishReason.STOP)
        elif len(self.token_ids) >= self.max_num_tokens:
            self.finish(FinishReason.LENGTH)

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        stopped = self._text.finish()
        self.finish_reason = FinishReason.STOP if stopped and reason is FinishReason.LENGTH else reason
        self.error = error

    def take_output(self) -> RequestOutput:
        tokens, self._new_tokens = tuple(self._new_tokens), []
        return RequestOutput(
            request_id=self.owner_id,
            choice=self.choice,
            text=self._text.take(),
            tokens=tokens,
            finish_reason=self.finish_reason,
            error=self.error,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=len(self.token_ids) - self.num_prompt_tokens,
            embedding=None if self.finish_reason is not FinishReason.STOP else self._embedding(),
            stopped_by=self._text.stopped_by,
            num_accepted_predicted=self.num_accepted_predicted,
            num_rejected_predicted=self.num_rejected_predicted,
        )

    def _embedding(self) -> FloatArray | None:
        if self._pooled is None:
            return None
        # Normalisation makes mean and sum equal.
        length = np.linalg.norm(self._pooled.astype(np.float64))
        return (self._pooled / max(length, np.finfo(np.float32).tiny)).astype(np.float32)
