"""POST /v1/completions: the model continues raw text."""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi.responses import JSONResponse, Response

from neo_desktop.app.api.fields import Json, Only, Prompts
from neo_desktop.app.api.replies import finite, head, until_done, usage_body
from neo_desktop.app.api.sampling import GenerationRequest
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.conversation import special_id
from neo_desktop.app.generate.outputs import Outputs, collect, submit, with_grammar
from neo_desktop.app.web.connection import EventStream, event
from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.input_processor import Prompt
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import GenerationDefaults
from neo_desktop.models.tokenizer import Tokenizer

MAX_TOKENS = 16  # OpenAI's default; chats continue until the context is full

# Marks of models that were trained to fill a gap: before the text, before what follows it, before the gap.
FILL_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<PRE>", "<SUF>", "<MID>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


class CompletionRequest(GenerationRequest):
    prompt: Prompts  # one or several
    suffix: str | None = None  # what follows the gap; for models that were trained to fill one
    echo: bool | None = None  # begin with the prompt
    logprobs: int | None = None
    add_special_tokens: bool | None = None  # unless false, the tokenizer puts its special tokens around texts

    best_of: Annotated[Any, Only(1)] = None

    def sampling_params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Like `ChatCompletionRequest.sampling_params`."""
        max_tokens = self._max_tokens()
        if max_tokens is None and self.n_predict is None:
            max_tokens = MAX_TOKENS
        return self._sampling_params(defaults, max_tokens=max_tokens, logprobs=self.logprobs)


async def answer(service: EngineService, body: CompletionRequest) -> Response:
    """Continue each prompt, in one piece or as a stream of events."""
    if body.echo and body.logprobs is not None:
        message = "echo cannot go with logprobs: this server does not rate prompts; leave one of them out"
        raise ApiError(400, message, param="echo")
    params = body.sampling_params(service.sampling_defaults)
    params, grammar_field = with_grammar(body.structure(), params)
    prompts = [_with_suffix(service.tokenizer, prompt, body.suffix) for prompt in body.prompt]
    field = "suffix" if body.suffix else "prompt"
    with_special = body.add_special_tokens is not False and not body.suffix
    generation = await submit(
        service, prompts, params, field, add_special_tokens=with_special, grammar_field=grammar_field
    )
    outputs = Outputs(generation, service.tokenizer, None, grammar_field)
    echoed = [_text(service.tokenizer, prompt) for prompt in body.prompt] if body.echo else []
    prompts_told = outputs.prompt_token_ids if body.return_token_ids else None
    shape = _Shape(service.tokenizer, body.logprobs is not None, echoed, params.n, prompts_told)
    if body.stream:
        return EventStream(
            until_done(_events(outputs, shape, service.model_name, body.include_usage)), outputs
        )
    answers = await collect(outputs)
    choices = [
        shape.choice(index, shape.echo(index) + answer.text, answer.tokens, answer.end)
        for index, answer in enumerate(answers)
    ]
    top = head("cmpl-", "text_completion", service.model_name)
    return JSONResponse(top | {"choices": choices, "usage": usage_body(outputs.usage)})


async def _events(outputs: Outputs, shape: "_Shape", model: str, include_usage: bool) -> AsyncIterator[bytes]:
    top = head("cmpl-", "text_completion", model)
    top |= {"usage": None} if include_usage else {}
    begun: set[int] = set()
    async for step in outputs:
        text = step.text if step.index in begun else shape.echo(step.index) + step.text
        begun.add(step.index)
        if text or (step.tokens and shape.with_tokens):
            yield event(top | {"choices": [shape.choice(step.index, text, step.tokens, None)]})
        if step.end is not None:
            yield event(top | {"choices": [shape.choice(step.index, "", (), step.end)]})
    if include_usage:
        yield event(top | {"choices": [], "usage": usage_body(outputs.usage)})


class _Shape:
    """Choices of an answer, as OpenAI's clients read them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        with_logprobs: bool,
        echoed: Sequence[str],
        n: int,
        prompt_token_ids: Sequence[Sequence[int]] | None,
    ) -> None:
        self.with_tokens = with_logprobs or prompt_token_ids is not None
        self._with_logprobs = with_logprobs
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._echoed = echoed
        self._n = n
        self._num_chars: defaultdict[int, int] = defaultdict(int)  # index -> where its next token begins

    def echo(self, index: int) -> str:
        """The prompt, where it is to be repeated."""
        return self._echoed[index // self._n] if self._echoed else ""

    def choice(self, index: int, text: str, tokens: Sequence[SampledToken], end: str | None) -> Json:
        """Return one text, or its next part."""
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens),
            "finish_reason": end,
        }
        if self._prompt_token_ids is not None:
            choice["prompt_token_ids"] = self._prompt_token_ids[index // self._n]
            choice["token_ids"] = [token.token_id for token in tokens]
        return choice

    def _logprobs(self, index: int, tokens: Sequence[SampledToken]) -> Json | None:
        if not self._with_logprobs or not tokens:
            return None
        text_of = self._tokenizer.token_text
        body: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            if token.logprob is None:
                continue
            text = text_of(token.token_id)
            likely = (token.logprob, *token.top_logprobs)  # as with OpenAI, the chosen one is always there
            body["tokens"].append(text)
            body["token_logprobs"].append(finite(token.logprob.logprob))
            body["top_logprobs"].append({text_of(one.token_id): finite(one.logprob) for one in likely})
            body["text_offset"].append(self._num_chars[index])
            self._num_chars[index] += len(text)
        return body


def _text(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(list(prompt), skip_special_tokens=False)


def _with_suffix(tokenizer: Tokenizer, prompt: Prompt, suffix: str | None) -> Prompt:
    """The prompt of a gap between a text and what follows it."""
    if not suffix:
        return prompt
    if not isinstance(prompt, str):
        raise ApiError(400, "suffix needs a prompt that is text", param="suffix")
    for marks in FILL_MARKS:
        if all(special_id(tokenizer, mark) is not None for mark in marks):
            before, after, gap = marks
            return f"{before}{prompt}{after}{suffix}{gap}"
    message = "suffix needs a model that was trained to fill gaps, which this one was not; leave it out"
    raise ApiError(400, message, param="suffix")
