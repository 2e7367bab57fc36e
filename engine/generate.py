"""The requests of a prompt, and their finished outputs."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.detokenizer import IncrementalText
from neo_desktop.engine.grammar import GrammarCompiler
from neo_desktop.engine.input_processor import InputProcessor, PreparedRequest
from neo_desktop.engine.request import FinishReason, Request, RequestOutput
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.thought_budget import ThoughtBudget


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished output of `generate`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    tokens: tuple[SampledToken, ...]  # the same tokens, with the requested log-probabilities
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was reused

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Self:
        """Join the outputs of a finished request."""
        last = outputs[-1]
        assert last.finish_reason is not None
        tokens = tuple(token for output in outputs for token in output.tokens)
        return cls(
            text="".join(output.text for output in outputs),
            token_ids=tuple(token.token_id for token in tokens),
            finish_reason=last.finish_reason,
            tokens=tokens,
            num_prompt_tokens=last.num_prompt_tokens,
            num_cached_tokens=last.num_cached_tokens,
        )


def new_requests(
    request_id: str,
    prepared: PreparedRequest,
    input_processor: InputProcessor,
    eos_token_ids: tuple[int, ...],
    grammars: GrammarCompiler,
    arrivals: Iterator[int],
) -> Iterator[Request]:
    """Yield the n requests of a prompt, distinguished by `choice`."""
    params = prepared.params
    seed = secrets.randbits(63) if params.seed is None else params.seed
    for choice in range(params.n):
        yield Request(
            request_id,
            prepared.token_ids,
            params,
            choice=choice,
            seed=seed,
            arrival=next(arrivals),
            max_context_tokens=input_processor.max_context_tokens,
            eos_token_ids=eos_token_ids,
            text=IncrementalText(
                input_processor.tokenizer.decode_stream(is_chat=params.thoughts is not None),
                params.stop,
                params.thoughts,
            ),
            grammar=None if params.grammar is None else grammars.start(params.grammar, params.grammar_after),
            budget=_budget(params, input_processor),
            block_hashes=prepared.block_hashes,
            images=prepared.images,
            predicted_token_ids=prepared.predicted_token_ids,
        )


def _budget(params: SamplingParams, input_processor: InputProcessor) -> ThoughtBudget | None:
    if params.thought_tokens is None or params.thoughts is None:
        return None
    is_open = params.thoughts == "open"
    return ThoughtBudget(
        input_processor.tokenizer, params.thought_tokens, is_open, input_processor.vocab_size
    )
