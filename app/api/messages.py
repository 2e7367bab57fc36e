"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form, which coding agents speak."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import Field, field_validator

from neo_desktop.app.api.conversation import Conversation, prepare, thinking_fields
from neo_desktop.app.api.fields import MAX_TOOLS, Content, Json, Model, Only, Unsupported, given
from neo_desktop.app.api.message_events import Stops, blocks_of, message_body, message_events
from neo_desktop.app.api.outputs import begin, collect
from neo_desktop.app.api.sampling import sampling_params
from neo_desktop.app.api.structure import Structure
from neo_desktop.app.api.tools import AUTO, REQUIRED, Tool, ToolChoice
from neo_desktop.app.service import EngineService
from neo_desktop.app.web.connection import EventStream
from neo_desktop.app.web.errors import ApiError
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import GenerationDefaults

KEEP_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}  # agents send it; nothing is cleared


class CacheControl(Model):
    """What to keep; prompts are always kept, as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Model):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[Any, Only([])] = None


class ThinkingBlock(Model):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Model):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    cache_control: CacheControl | None = None
    caller: Annotated[Any, Only({"type": "direct"})] = None
    toolset_name: Unsupported = None


class ToolResultBlock(Model):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Content = ""
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class AnthropicMessage(Model):
    """One message: text, or blocks."""

    role: Literal["user", "assistant"]
    content: list[Block]

    @field_validator("content", mode="before", json_schema_input_type=str | list[Block])
    @classmethod
    def _as_blocks(cls, content: object) -> object:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    def for_template(self) -> list[Json]:
        """The message as chat templates expect it: results of tools are messages of their own."""
        results = [
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": f"Error: {block.content}" if block.is_error else block.content,
            }
            for block in self.content
            if isinstance(block, ToolResultBlock)
        ]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        fields = {
            "role": self.role,
            "content": "\n".join(texts),
            "tool_calls": calls or None,
            "reasoning_content": "\n".join(thoughts) or None,
        }
        return results + ([given(fields)] if texts or calls or not results else [])


class ToolDefinition(Model):
    """A tool that the client runs."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: Json  # JSON schema of an object
    type: Literal["custom"] | None = None
    strict: bool | None = None  # a call that must come always follows the schema
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments always come as they are written
    input_examples: Annotated[Any, Only([])] = None
    defer_loading: Annotated[Any, Only(False)] = None
    allowed_callers: Annotated[Any, Only(["direct"])] = None


class Choice(Model):
    """Whether a tool has to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Model):
    """Whether the model thinks first; how long is up to it, a budget is no limit here."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Annotated[Any, Only("summarized")] = None


class OutputFormat(Model):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Model):
    """The answer's form, and how much thought goes into it."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # a hint; not all models know it


class Metadata(Model):
    """Labels."""

    user_id: str | None = None


class CountTokensRequest(Model):
    """Body of POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: Content | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: Annotated[Any, Only({"edits": []}, {"edits": [KEEP_THOUGHTS]})] = None
    mcp_servers: Annotated[Any, Only([])] = None

    def conversation(self, template: str | None) -> Conversation:
        """The chat, for the model with this template.

        Raises:
            ApiError: the template cannot do what is asked for.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        choice = self.tool_choice or Choice(type="auto")
        if (choice.type == "tool") != (choice.name is not None):
            raise ApiError(
                400, "tool_choice has a name when its type is tool, and only then", param="tool_choice"
            )
        config = self.output_config or OutputConfig()
        structure = None
        if config.format is not None:
            structure = ("output_config.format", Structure("json_schema", config.format.schema_))
        is_thinking = None
        if self.thinking is not None and self.thinking.type != "adaptive":
            is_thinking = self.thinking.type == "enabled"
        return Conversation(
            messages=[*system, *(one for message in self.messages for one in message.for_template())],
            tools=[
                Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict))
                for tool in self.tools or ()
            ],
            choice={"auto": AUTO, "any": REQUIRED, "tool": ToolChoice(True, choice.name), "none": None}[
                choice.type
            ],
            is_parallel=not choice.disable_parallel_tool_use,
            template_fields=thinking_fields(template, config.effort, is_thinking, is_hint=True),
            structure=structure,
            continues_last=self.messages[-1].role == "assistant",
        )


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Unsupported = None
    inference_geo: Unsupported = None
    speed: Annotated[Any, Only("standard")] = None

    def sampling_params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return what was asked for; what was left open is the model's own recommendation.

        Raises:
            SettingError: a value is out of range.
        """
        return sampling_params(
            defaults,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )


async def answer(service: EngineService, body: MessagesRequest, params: SamplingParams) -> Response:
    """Answer a chat, in one piece or as a stream of events."""
    outputs = await begin(service, body.conversation(service.tokenizer.chat_template), params)
    stops = Stops(service.tokenizer, body.stop_sequences or ())
    if body.stream:
        return EventStream(message_events(outputs, stops, service.model_name), outputs)
    (answer,) = await collect(outputs)
    stops.add(answer.raw_text, answer.tokens)
    message = message_body(service.model_name, outputs.usage)
    message |= {"content": blocks_of(answer), **stops.reason(answer.end)}
    return JSONResponse(message)


async def count_tokens(service: EngineService, body: CountTokensRequest) -> Response:
    """Tell how many tokens the prompt of a chat has."""
    prepared = await prepare(service, body.conversation(service.tokenizer.chat_template))
    try:
        token_ids = await asyncio.to_thread(service.tokenizer.encode, prepared.prompt, False)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    return JSONResponse({"input_tokens": len(token_ids)})
