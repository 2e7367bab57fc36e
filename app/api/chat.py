"""POST /v1/chat/completions: OpenAI's chats, with what vLLM and llama.cpp add."""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, Self

from fastapi.responses import JSONResponse, Response
from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from neo_desktop.app.api.fields import (
    HINT,
    MAX_TOOLS,
    Content,
    Json,
    Label,
    Model,
    Only,
    Tagged,
    Unsupported,
    Verbosity,
    given,
)
from neo_desktop.app.api.pictures import ContentWithImages, check_role
from neo_desktop.app.api.replies import head, token_logprobs, until_done, usage_body
from neo_desktop.app.api.sampling import GenerationRequest
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.calls import CallStart, Piece, Text, Thought
from neo_desktop.app.generate.conversation import Conversation, thinking_fields, thought_tokens
from neo_desktop.app.generate.history import arguments_of
from neo_desktop.app.generate.outputs import Answer, Call, Outputs, begin, collect
from neo_desktop.app.generate.tools import AUTO, REQUIRED, Tool, ToolChoice
from neo_desktop.app.web.connection import EventStream, event
from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from neo_desktop.models.config import GenerationDefaults
from neo_desktop.models.tokenizer import Tokenizer

CUSTOM = {"custom": "custom tools are for /v1/responses; describe this one as a function"}
ALLOWED = {"allowed_tools": "leave the other tools out instead"} | CUSTOM
OWN_TEMPLATE_FIELDS = ("messages", "tools", "add_generation_prompt", "documents")


class CalledFunction(Model):
    """A called tool, and its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class ToolCall(Model):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int | None, HINT] = None  # of streams; some clients send it back

    def for_template(self) -> Json:
        """The call as chat templates expect it: with the arguments as an object, if they are one."""
        function = {"name": self.function.name, "arguments": arguments_of(self.function.arguments)}
        return {"id": self.id or "", "type": "function", "function": function}


class Message(Model):
    """One message of a chat; which roles a model knows is up to its template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[ContentWithImages | None, Field(validate_default=True)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Annotated[ToolCall, Tagged(ToolCall, refused=CUSTOM, default="function")]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name
    # Parts of an answer that clients send back as they got it.
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    annotations: Annotated[list[Json] | None, HINT] = None
    cache_control: Annotated[Json | None, HINT] = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: str | list[Any] | None, info: ValidationInfo) -> str | list[Any] | None:
        if content is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("content", "must be text: only an assistant's message may have none")
        check_role(content, info.data.get("role"))
        return content

    def for_template(self) -> Json:
        """The message as chat templates expect it; "developer" is OpenAI's newer name for "system"."""
        fields = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return given(fields)


class Function(Model):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Json | None = None  # JSON schema
    strict: bool | None = None  # a call that must come always follows the schema


class FunctionTool(Model):
    type: Literal["function"]
    function: Function
    cache_control: Annotated[Json | None, HINT] = None

    def tool(self) -> Tool:
        """The same for every protocol."""
        function = self.function
        return Tool(function.name, function.description, function.parameters or {}, bool(function.strict))


class FunctionName(Model):
    name: str


class NamedChoice(Model):
    type: Literal["function"]
    function: FunctionName


class Prediction(Model):
    """A text that the answer will probably resemble, so that it comes faster."""

    type: Literal["content"]
    content: Content


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None  # OpenAI's newer name for max_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    tools: (
        Annotated[
            list[Annotated[FunctionTool, Tagged(FunctionTool, refused=CUSTOM)]], Field(max_length=MAX_TOOLS)
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedChoice,
            Tagged(NamedChoice, refused=ALLOWED, words=("none", "auto", "required")),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None

    prediction: Prediction | None = None

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # llama.cpp's: limit on tokens of thoughts; -1: no limit
    reasoning_budget: Annotated[int, Field(ge=-1)] | None = None
    chat_template_kwargs: Json | None = None  # vLLM's; e.g. {"enable_thinking": false} for Qwen3
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    # Labels and hints: they say nothing about the answer.
    metadata: Annotated[dict[str, str] | None, HINT] = None
    prompt_cache_key: Label = None
    prompt_cache_options: Annotated[Json | None, HINT] = None
    prompt_cache_retention: Label = None
    safety_identifier: Label = None
    service_tier: Label = None  # there is one

    verbosity: Verbosity = None

    add_special_tokens: Annotated[Any, Only(False)] = None  # the template writes them
    audio: Unsupported = None
    chat_template: Unsupported = None
    documents: Annotated[Any, Only([])] = None
    echo: Annotated[Any, Only(False)] = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    functions: Annotated[Any, Only([])] = None
    include_reasoning: Annotated[Any, Only(True)] = None
    modalities: Annotated[Any, Only(["text"])] = None
    moderation: Unsupported = None
    reasoning_format: Annotated[Any, Only("auto", "deepseek")] = None
    store: Annotated[Any, Only(False)] = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("pair", "has top_logprobs, which needs logprobs to be true")
        return self

    def sampling_params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return what was asked for; what was left open is the model's own recommendation.

        Raises:
            SettingError: a value is out of range.
        """
        return self._sampling_params(
            defaults,
            max_tokens=self._max_tokens(self.max_completion_tokens),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prediction=None if self.prediction is None else self.prediction.content,
        )

    def conversation(self, template: str | None) -> Conversation:
        """The chat, for the model with this template.

        Raises:
            ApiError: fields contradict each other, or the template cannot do what they ask for.
        """
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            message = (
                "continue_final_message goes on with a message, add_generation_prompt begins another one"
            )
            raise ApiError(400, f"{message}: give one of them", param="continue_final_message")
        fields = thinking_fields(template, self.reasoning_effort) | (self.chat_template_kwargs or {})
        for name in OWN_TEMPLATE_FIELDS:
            if name in fields:
                message = f"chat_template_kwargs.{name} is set by the server; leave it out"
                raise ApiError(400, message, param="chat_template_kwargs")
        if self.add_generation_prompt is False:
            fields["add_generation_prompt"] = False
        budget = None if self.reasoning_budget == -1 else self.reasoning_budget
        return Conversation(
            messages=[message.for_template() for message in self.messages],
            tools=[tool.tool() for tool in self.tools or ()],
            choice=self._choice(),
            is_parallel=self.parallel_tool_calls is not False,
            template_fields=fields,
            structure=self.structure(),
            continues_last=continues,
            thought_tokens=thought_tokens(template, self.reasoning_effort, budget),
        )

    def _choice(self) -> ToolChoice | None:
        if isinstance(self.tool_choice, NamedChoice):
            return ToolChoice(is_required=True, name=self.tool_choice.function.name)
        return {None: AUTO, "auto": AUTO, "none": None, "required": REQUIRED}[self.tool_choice]


async def answer(service: EngineService, body: ChatCompletionRequest) -> Response:
    """Answer a chat, in one piece or as a stream of events."""
    params = body.sampling_params(service.sampling_defaults)
    outputs = await begin(service, body.conversation(service.tokenizer.chat_template), params)
    shape = _Shape(service.tokenizer, bool(body.logprobs), bool(body.return_token_ids))
    if body.stream:
        return EventStream(
            until_done(_events(outputs, shape, service.model_name, body.include_usage)), outputs
        )
    answers = await collect(outputs)
    choices = [shape.whole(index, answer) for index, answer in enumerate(answers)]
    top = head("chatcmpl-", "chat.completion", service.model_name) | shape.prompt(outputs)
    return JSONResponse(top | {"choices": choices, "usage": usage_body(outputs.usage)})


async def _events(outputs: Outputs, shape: "_Shape", model: str, include_usage: bool) -> AsyncIterator[bytes]:
    top = head("chatcmpl-", "chat.completion.chunk", model)
    top |= {"usage": None} if include_usage else {}
    begun: set[int] = set()
    async for step in outputs:
        deltas = [shape.delta(piece) for piece in step.pieces]
        if step.index not in begun:
            begun.add(step.index)
            opening = {"role": "assistant", "content": ""}
            yield event(top | shape.prompt(outputs) | {"choices": [shape.part(step.index, opening)]})
        if step.tokens and shape.with_tokens and not deltas:
            deltas.append({"content": ""})
        for number, delta in enumerate(deltas):
            tokens = step.tokens if number == 0 else ()
            yield event(top | {"choices": [shape.part(step.index, delta, tokens)]})
        if step.end is not None:
            yield event(top | {"choices": [shape.part(step.index, {}, end=step.end)]})
    if include_usage:
        yield event(top | {"choices": [], "usage": usage_body(outputs.usage)})


class _Shape:
    """Choices of an answer, as OpenAI's clients read them."""

    def __init__(self, tokenizer: Tokenizer, with_logprobs: bool, with_token_ids: bool) -> None:
        self.with_tokens = with_logprobs or with_token_ids
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._tokenizer = tokenizer

    def prompt(self, outputs: Outputs) -> Json:
        """Return the prompt's token ids, if the client asked for them."""
        return {"prompt_token_ids": outputs.prompt_token_ids[0]} if self._with_token_ids else {}

    def whole(self, index: int, answer: Answer) -> Json:
        has_text = answer.text or not answer.calls
        message: Json = {
            "role": "assistant",
            "content": answer.text if has_text else None,
            "refusal": None,
        }
        if answer.thought:
            message["reasoning_content"] = answer.thought
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": answer.end,
        } | self._token_ids(answer.tokens)

    def part(
        self, index: int, delta: Json, tokens: Sequence[SampledToken] = (), end: str | None = None
    ) -> Json:
        """More of a message, or its end."""
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": end}
        return choice | self._token_ids(tokens)

    def delta(self, piece: Piece) -> Json:
        if isinstance(piece, Text):
            return {"content": piece.text}
        if isinstance(piece, Thought):
            return {"reasoning_content": piece.text}
        if isinstance(piece, CallStart):
            begun = _call(Call(piece.call_id, piece.name))
            return {"tool_calls": [{"index": piece.number} | begun]}
        return {"tool_calls": [{"index": piece.number, "function": {"arguments": piece.text}}]}

    def _token_ids(self, tokens: Sequence[SampledToken]) -> Json:
        return {"token_ids": [token.token_id for token in tokens]} if self._with_token_ids else {}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if not self._with_logprobs or not tokens:
            return None
        return {"content": token_logprobs(self._tokenizer, tokens), "refusal": None}


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
