"""POST /v1/chat/completions: OpenAI's chats, with what vLLM and llama.cpp add."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from fastapi.responses import Response
from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from neo_desktop.app.api.fields import MAX_TOOLS, Content, Function, Json, Model, Tagged, given
from neo_desktop.app.api.pictures import ContentWithImages
from neo_desktop.app.api.replies import Reply, token_logprobs
from neo_desktop.app.api.sampling import GenerationRequest
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.generate.calls import CallArguments, CallStart, Piece, Text, Thought
from neo_desktop.app.generate.conversation import Conversation, thinking_fields, thought_tokens
from neo_desktop.app.generate.history import arguments_of, function_call
from neo_desktop.app.generate.outputs import Answer, Outputs, Step, begin
from neo_desktop.app.generate.tools import CHOICES, ToolChoice
from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from neo_desktop.models.config import GenerationDefaults

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

    def for_template(self) -> Json:
        """The call as chat templates expect it: with the arguments as an object, if they are one."""
        return function_call(self.id or "", self.function.name, arguments_of(self.function.arguments))


class Message(Model):
    """One message of a chat; which roles a model knows is up to its template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[ContentWithImages | None, Field(validate_default=True)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Annotated[ToolCall, Tagged(refused=CUSTOM)]] | None = None
    reasoning_content: str | None = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: str | list[Any] | None, info: ValidationInfo) -> str | list[Any] | None:
        if content is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("content", "must be text: only an assistant's message may have none")
        return content

    def for_template(self) -> Json:
        """The message as chat templates expect it; "developer" is OpenAI's newer name for "system"."""
        fields = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "reasoning_content": self.reasoning_content,
        }
        return given(fields)


class FunctionTool(Model):
    type: Literal["function"]
    function: Function


ChatTool = Annotated[FunctionTool, Tagged(refused=CUSTOM)]


class Prediction(Model):
    """A text that the answer will probably resemble, so that it comes faster."""

    type: Literal["content"]
    content: Content


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | FunctionTool, Tagged(refused=ALLOWED)] | None
    ) = None
    parallel_tool_calls: bool | None = None

    prediction: Prediction | None = None

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # llama.cpp's: limit on tokens of thoughts; -1: no limit
    reasoning_budget: Annotated[int, Field(ge=-1)] | None = None
    chat_template_kwargs: Json | None = None  # vLLM's; e.g. {"enable_thinking": false} for Qwen3
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Literal[False] | None = None  # the template writes them

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("pair", "has top_logprobs, which needs logprobs to be true")
        return self

    def sampling_params(self, defaults: GenerationDefaults, **more: Any) -> SamplingParams:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        prediction = None if self.prediction is None else self.prediction.content
        return super().sampling_params(defaults, logprobs=logprobs, prediction=prediction, **more)

    def conversation(self, template: str | None) -> Conversation:
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            reason = "and add_generation_prompt contradict each other: give one of them"
            raise SettingError("continue_final_message", reason)
        fields = thinking_fields(template, self.reasoning_effort) | (self.chat_template_kwargs or {})
        for name in OWN_TEMPLATE_FIELDS:
            if name in fields:
                raise SettingError("chat_template_kwargs", f"has {name}, which the server sets; leave it out")
        if self.add_generation_prompt is False:
            fields["add_generation_prompt"] = False
        if isinstance(named := self.tool_choice, FunctionTool):
            choice: ToolChoice | None = ToolChoice(True, named.function.name)
        else:
            choice = CHOICES[named or "auto"]
        budget = None if self.reasoning_budget == -1 else self.reasoning_budget
        return Conversation(
            messages=[message.for_template() for message in self.messages],
            tools=[tool.function.tool(tool.function.name) for tool in self.tools or ()],
            choice=choice,
            is_parallel=self.parallel_tool_calls is not False,
            template_fields=fields,
            structure=self.structure(),
            continues_last=continues,
            thought_tokens=thought_tokens(template, self.reasoning_effort, budget),
        )


async def answer(service: EngineService, body: ChatCompletionRequest) -> Response:
    params = body.sampling_params(service.sampling_defaults)
    outputs = await begin(service, body.conversation(service.tokenizer.chat_template), params)
    return await ChatReply(service, body, outputs).response()


class ChatReply(Reply):
    def __init__(self, service: EngineService, body: ChatCompletionRequest, outputs: Outputs) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, outputs, "chatcmpl-", kind)
        if body.return_token_ids:
            self._head["prompt_token_ids"] = outputs.prompt_token_ids[0]

    def whole(self, index: int, answer: Answer) -> Json:
        has_text = answer.text or not answer.calls
        message: Json = {"role": "assistant", "content": answer.text if has_text else None, "refusal": None}
        if answer.thought:
            message["reasoning_content"] = answer.thought
        if answer.calls:
            message["tool_calls"] = [
                function_call(call.call_id, call.name, call.arguments) for call in answer.calls
            ]
        return self._choice(index, {"message": message}, answer.tokens, answer.end)

    def parts(self, step: Step) -> Iterator[Json]:
        if step.index not in self._begun:
            self._begun.add(step.index)
            yield self._choice(step.index, {"delta": {"role": "assistant", "content": ""}})
        deltas = [_delta(piece) for piece in step.pieces]
        if not deltas and self._are_sent(step.tokens):
            deltas.append({"content": ""})
        for number, delta in enumerate(deltas):
            yield self._choice(step.index, {"delta": delta}, () if number else step.tokens)
        if step.end is not None:
            yield self._choice(step.index, {"delta": {}}, end=step.end)

    def _choice(
        self, index: int, content: Json, tokens: Sequence[SampledToken] = (), end: str | None = None
    ) -> Json:
        found = token_logprobs(self._tokenizer, tokens)
        logprobs = {"content": found, "refusal": None} if found else None
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": end}
        return choice | self._token_ids(tokens)


def _delta(piece: Piece) -> Json:
    match piece:
        case Text(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallStart(number, call_id, name):
            return {"tool_calls": [{"index": number} | function_call(call_id, name, "")]}
        case CallArguments(number, text):
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}
