"""The bodies that OpenAI's clients send, as far as this server can do what they ask.

No field is ignored silently. A field is either used, or says nothing about the answer (`user`), or accepted
only with values that change nothing (`tools=[]`); anything else is an error that names the field.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from neo_desktop.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from neo_desktop.models.config import GenerationDefaults

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; chats go on until the context is full


def _only(*accepted: object) -> AfterValidator:
    """For a feature that is not there: only values that do not ask for it."""

    def check(value: object) -> object:
        if value is not None and not any(type(value) is type(one) and value == one for one in accepted):
            raise PydanticCustomError("unsupported", "is not supported by this server; leave it out")
        return value

    return AfterValidator(check)


def _described(what: str) -> WrapValidator:
    """One sentence in place of one error per alternative of a union."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("type", "must be {what}", {"what": what}) from None

    return WrapValidator(check)


def _joined_text(content: object) -> object:
    """Text parts as one text, a line each."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            message = "must be text or text parts, got a part of type {kind}: this server reads text only"
            raise PydanticCustomError("content_part", message, {"kind": repr(kind)})
        texts.append(part["text"])
    return "\n".join(texts)


def _prompts(prompt: object) -> list[str | list[int]]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompt, str) or _is_token_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and (_are_texts(prompt) or all(map(_is_token_ids, prompt))):
        return prompt
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, a list of token ids or a list of such lists"
    )


def _are_texts(prompts: list[object]) -> bool:
    return all(isinstance(prompt, str) for prompt in prompts)


def _is_token_ids(prompt: object) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and bool(prompt) and all(type(token_id) is int for token_id in prompt)


Unsupported = Annotated[Any, _only()]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Message(_Model):
    """One message of a chat; which roles a model knows is up to its template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_joined_text)]
    name: str | None = None
    tool_call_id: str | None = None
    # Parts of an answer that clients send back as they got it.
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    annotations: Annotated[Any, _only([])] = None
    tool_calls: Annotated[Any, _only([])] = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it; "developer" is OpenAI's newer name for "system"."""
        role = "system" if self.role == "developer" else self.role
        fields = {"role": role, "content": self.content, "name": self.name, "tool_call_id": self.tool_call_id}
        return {name: value for name, value in fields.items() if value is not None}


class StreamOptions(_Model):
    """Extras of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, _only(False)] = None


class _Request(_Model):
    """What both endpoints have in common."""

    model: str | None = None  # None: the model that is served
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[str | list[str] | None, _described("a string or a list of strings")] = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Beyond OpenAI's, under the names that vLLM gave them.
    top_k: int | None = None  # 0 or -1: all tokens
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    # Labels: they say nothing about the answer.
    user: str | None = None

    logit_bias: Annotated[Any, _only({})] = None

    def _sampling_params(
        self, defaults: GenerationDefaults, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        asked = {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "n": self.n,
            "seed": self.seed,
            "stop": self.stop,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
        }
        return SamplingParams(**(_recommended(defaults) | _given(asked)))


class ChatCompletionRequest(_Request):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None  # OpenAI's newer name for max_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's; e.g. {"enable_thinking": false} for Qwen3

    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    parallel_tool_calls: bool | None = None  # without tools there are no calls

    audio: Unsupported = None
    function_call: Annotated[Any, _only("none", "auto")] = None
    functions: Annotated[Any, _only([])] = None
    modalities: Annotated[Any, _only(["text"])] = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Annotated[Any, _only("in_memory")] = None
    reasoning_effort: Unsupported = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    service_tier: Annotated[Any, _only("auto", "default")] = None
    store: Annotated[Any, _only(False)] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    tools: Annotated[Any, _only([])] = None
    verbosity: Annotated[Any, _only("medium")] = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("pair", "has top_logprobs, which needs logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise PydanticCustomError("pair", "has max_tokens and max_completion_tokens: give one of them")
        return self

    def sampling_params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return what was asked for; what was left open is the model's own recommendation.

        Raises:
            ValueError: a value is out of range; the message begins with the field's name.
        """
        return self._sampling_params(
            defaults,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]  # one or several
    logprobs: int | None = None

    best_of: Annotated[Any, _only(1)] = None
    echo: Annotated[Any, _only(False)] = None
    suffix: Annotated[Any, _only("")] = None

    def sampling_params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Like `ChatCompletionRequest.sampling_params`."""
        max_tokens = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling_params(defaults, max_tokens=max_tokens, logprobs=self.logprobs)


def _recommended(defaults: GenerationDefaults) -> dict[str, Any]:
    return _given(
        {
            "temperature": 0.0 if defaults.do_sample is False else defaults.temperature,
            "top_k": defaults.top_k,
            "top_p": defaults.top_p,
            "min_p": defaults.min_p,
            "repetition_penalty": defaults.repetition_penalty,
        }
    )


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
