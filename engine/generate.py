"""The requests of a prompt; batch generation: all prompts at once, and all outputs at the end."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from neo_desktop.engine.batch import FloatArray, SampledToken
from neo_desktop.engine.detokenizer import IncrementalText
from neo_desktop.engine.errors import EngineError
from neo_desktop.engine.grammar import GrammarCompiler
from neo_desktop.engine.input_processor import InputProcessor, PreparedRequest, Prompt
from neo_desktop.engine.request import FinishReason, Request, RequestOutput
from neo_desktop.engine.sampling_params import Pooling, SamplingParams
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


class _Engine(Protocol):
    """The required part of `Engine`."""

    @property
    def has_requests(self) -> bool: ...
    def prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedRequest: ...
    def add(self, request_id: str, prepared: PreparedRequest) -> None: ...
    def abort(self, request_id: str) -> object: ...
    def step(self) -> list[RequestOutput]: ...


def generate(
    engine: _Engine, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[Completion]:
    """Implement `Engine.generate`."""
    each = _one_per_prompt(params or SamplingParams(), len(prompts))
    return [_completion(outputs) for outputs in run(engine, prompts, each)]


def embed(engine: _Engine, prompts: Sequence[Prompt], pooling: Pooling) -> list[FloatArray]:
    """Implement `Engine.embed`."""
    each = [SamplingParams(pooling=pooling)] * len(prompts)
    return [cast("FloatArray", outputs[-1].embedding) for outputs in run(engine, prompts, each)]


def run(
    engine: _Engine, prompts: Sequence[Prompt], each: Sequence[SamplingParams]
) -> list[list[RequestOutput]]:
    """Run requests to their end; return their outputs, by prompt and choice.

    Raises:
        EngineError: the engine had to give up a request.
    """
    if engine.has_requests:
        raise RuntimeError("the engine must be idle, but requests are running")
    prepared = [engine.prepare(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    collected: dict[tuple[str, int], list[RequestOutput]] = {}
    try:
        for index, request in enumerate(prepared):
            engine.add(str(index), request)
            collected |= {(str(index), choice): [] for choice in range(request.params.n)}
        while engine.has_requests:
            for output in engine.step():
                collected[output.request_id, output.choice].append(output)
    finally:
        for index in range(len(prompts)):  # after an error or Ctrl-C; otherwise none is left
            engine.abort(str(index))
    for *_, last in collected.values():
        if last.finish_reason is None or last.error is not None:
            raise EngineError(last.error or "the request did not end")
    return list(collected.values())


def _one_per_prompt(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"got {num_prompts} prompts but {len(params)} sampling params")
    return params


def _completion(outputs: Sequence[RequestOutput]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    tokens = tuple(token for output in outputs for token in output.tokens)
    return Completion(
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
