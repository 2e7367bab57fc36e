"""POST /v1/completions: the model continues raw text."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi.responses import Response

from neo_desktop.app.api.fields import Json, Prompts
from neo_desktop.app.api.replies import Reply, finite
from neo_desktop.app.api.sampling import GenerationRequest
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.generate.conversation import special_id
from neo_desktop.app.generate.outputs import Answer, Outputs, Step, complete
from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.errors import SettingError
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
    suffix: str | None = None  # text after the gap; for models that were trained to fill one
    echo: bool | None = None  # begin with the prompt
    logprobs: int | None = None
    add_special_tokens: bool | None = None  # unless false, the tokenizer puts its special tokens around texts

    def sampling_params(self, defaults: GenerationDefaults, **more: Any) -> SamplingParams:
        asked = {"max_tokens": MAX_TOKENS} if self.max_tokens is None else {}
        return super().sampling_params(defaults, logprobs=self.logprobs, **asked, **more)


async def answer(service: EngineService, body: CompletionRequest) -> Response:
    if body.echo and body.logprobs is not None:
        reason = "cannot go with logprobs: this server does not rate prompts; leave one of them out"
        raise SettingError("echo", reason)
    outputs = await complete(
        service,
        [_with_suffix(service.tokenizer, prompt, body.suffix) for prompt in body.prompt],
        body.sampling_params(service.sampling_defaults),
        body.structure(),
        "suffix" if body.suffix else "prompt",
        add_special_tokens=body.add_special_tokens is not False and not body.suffix,
    )
    return await CompletionReply(service, body, outputs).response()


class CompletionReply(Reply):
    def __init__(self, service: EngineService, body: CompletionRequest, outputs: Outputs) -> None:
        super().__init__(service, body, outputs, "cmpl-", "text_completion")
        self._prompts = body.prompt
        self._n = body.n or 1
        self._has_echo = bool(body.echo)
        self._num_chars: defaultdict[int, int] = defaultdict(int)  # output -> where its next token begins

    def whole(self, index: int, answer: Answer) -> Json:
        return self._choice(index, self._echo(index) + answer.text, answer.tokens, answer.end)

    def parts(self, step: Step) -> Iterator[Json]:
        text = self._echo(step.index) + step.text
        if text or self._are_sent(step.tokens):
            yield self._choice(step.index, text, step.tokens, None)
        if step.end is not None:
            yield self._choice(step.index, "", (), step.end)

    def _echo(self, index: int) -> str:
        """The prompt, before an output's first text, where it is to be repeated."""
        if not self._has_echo or index in self._begun:
            return ""
        self._begun.add(index)
        prompt = self._prompts[index // self._n]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(list(prompt), skip_special_tokens=False)

    def _choice(self, index: int, text: str, tokens: Sequence[SampledToken], end: str | None) -> Json:
        logprobs = self._logprobs(index, tokens)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": end}
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._outputs.prompt_token_ids[index // self._n]
        return choice | self._token_ids(tokens)

    def _logprobs(self, index: int, tokens: Sequence[SampledToken]) -> Json | None:
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
        return body if body["tokens"] else None


def _with_suffix(tokenizer: Tokenizer, prompt: Prompt, suffix: str | None) -> Prompt:
    """Return the prompt of a gap between a text and what follows it."""
    if not suffix:
        return prompt
    if not isinstance(prompt, str):
        raise SettingError("suffix", "needs a prompt that is text")
    for marks in FILL_MARKS:
        if all(special_id(tokenizer, mark) is not None for mark in marks):
            before, after, gap = marks
            return f"{before}{prompt}{after}{suffix}{gap}"
    raise SettingError("suffix", "needs a model that was trained to fill gaps; leave it out")
