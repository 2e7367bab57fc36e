"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form, which coding agents speak."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import Field, field_validator

from neo_desktop.app.api.fields import HINT, MAX_TOOLS, Json, Label, LeftOut, Model, Only, Tagged, Unsupported
from neo_desktop.app.api.message_blocks import (
    AnthropicMessage,
    AnthropicTool,
    CacheControl,
    SystemBlock,
    ToolDefinition,
    as_blocks,
    system_text,
)
from neo_desktop.app.api.message_events import blocks_of, message_body, message_events, stop_reason
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.conversation import Conversation, prepare, thinking_fields, thought_tokens
from neo_desktop.app.generate.outputs import begin, collect
from neo_desktop.app.generate.sampling import sampling_params
from neo_desktop.app.generate.structure import Structure
from neo_desktop.app.generate.tools import AUTO, REQUIRED, ToolChoice
from neo_desktop.app.web.connection import EventStream
from neo_desktop.engine.errors import ContextLengthError
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.config import GenerationDefaults

KEEP_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}  # agents send it; nothing is cleared


class Choice(Model):
    """The obligation to call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


OTHER_THINKING = {"between_tools": "ask for adaptive"}


class Thinking(Model):
    """A switch for thinking, and its budget: a thought that has used it up ends."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Label = None  # thoughts are shown as they are
    block_binding: Unsupported = None


class OutputFormat(Model):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Model):
    """The answer's form, and how much thought goes into it."""

    format: OutputFormat | None = None
    task_budget: Annotated[Json | None, HINT] = None  # for all requests of a task
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # a hint; not all models know it


class Metadata(Model):
    user_id: Label = None


class CountTokensRequest(Model):
    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: list[SystemBlock] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Annotated[Thinking, Tagged(Thinking, refused=OTHER_THINKING)] | None = None
    output_config: OutputConfig | None = None
    context_management: Annotated[
        Json | None,
        LeftOut(
            "context_management is left out: the conversation is read as it was sent",
            {},
            {"edits": []},
            {"edits": [KEEP_THOUGHTS]},
        ),
    ] = None
    mcp_servers: Annotated[Any, Only([])] = None
    compaction: Unsupported = None
    thread: Unsupported = None

    # Labels and hints: they say nothing about the answer.
    cache_control: Annotated[CacheControl | None, HINT] = None
    speed: Label = None  # there is one
    betas: Annotated[list[str] | None, HINT] = None
    anthropic_beta: Annotated[list[str] | None, HINT] = None
    anthropic_version: Label = None
    billing_policy: Annotated[Json | None, HINT] = None
    diagnostics: Annotated[Json | None, HINT] = None
    fallbacks: Annotated[Any, HINT] = None  # there is one model
    fallback_credit_token: Annotated[Any, HINT] = None
    user_profile_id: Label = None
    workspace_id: Label = None

    @field_validator("system", mode="before", json_schema_input_type=str | list[SystemBlock] | None)
    @classmethod
    def _as_blocks(cls, system: object) -> object:
        return as_blocks(system)

    def conversation(self, template: str | None) -> Conversation:
        """The chat, for the model with this template.

        Raises:
            ApiError: the template cannot do what is asked for.
        """
        prompt = system_text(self.system)
        system = [{"role": "system", "content": prompt}] if prompt else []
        choice = self.tool_choice or Choice(type="auto")
        if (choice.type == "tool") != (choice.name is not None):
            raise ApiError(
                400, "tool_choice has a name when its type is tool, and only then", param="tool_choice"
            )
        config = self.output_config or OutputConfig()
        structure = None
        if config.format is not None:
            structure = Structure("output_config.format", "json_schema", config.format.schema_)
        is_thinking, budget = None, self.thinking.budget_tokens if self.thinking else None
        if self.thinking is not None and self.thinking.type != "adaptive":
            is_thinking = self.thinking.type == "enabled"
        return Conversation(
            messages=[*system, *(one for message in self.messages for one in message.for_template())],
            tools=[tool.tool() for tool in self.tools or () if isinstance(tool, ToolDefinition)],
            choice={"auto": AUTO, "any": REQUIRED, "tool": ToolChoice(True, choice.name), "none": None}[
                choice.type
            ],
            is_parallel=not choice.disable_parallel_tool_use,
            template_fields=thinking_fields(template, config.effort, is_thinking, is_hint=True),
            structure=structure,
            thought_tokens=thought_tokens(template, config.effort, budget),
            continues_last=self.messages[-1].role == "assistant",
        )


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    metadata: Annotated[Metadata | None, HINT] = None
    service_tier: Label = None  # there is one
    container: Unsupported = None
    inference_geo: Unsupported = None

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


async def answer(service: EngineService, body: MessagesRequest) -> Response:
    """Answer a chat, in one piece or as a stream of events."""
    params = body.sampling_params(service.sampling_defaults)
    conversation = body.conversation(service.tokenizer.chat_template)
    try:
        outputs = await begin(service, conversation, params, cuts_max_tokens=True)
    except ApiError as error:
        if isinstance(length := error.__cause__, ContextLengthError):
            raise ApiError(400, _too_long(length), param="messages") from length
        raise
    if body.stream:
        return EventStream(message_events(outputs, service.model_name), outputs)
    (answer,) = await collect(outputs)
    message = message_body(service.model_name, outputs.usage)
    message |= {"content": blocks_of(answer), **stop_reason(answer.end, answer.stopped_by)}
    return JSONResponse(message)


def _too_long(error: ContextLengthError) -> str:
    """Anthropic's words, which agents look for."""
    more = "" if error.is_whole else " (in its beginning alone)"
    return f"prompt is too long: {error.num_tokens} tokens > {error.limit - 1} maximum{more}"


async def count_tokens(service: EngineService, body: CountTokensRequest) -> Response:
    """Count the tokens of a chat's prompt."""
    prepared = await prepare(service, body.conversation(service.tokenizer.chat_template))
    try:
        token_ids = await asyncio.to_thread(service.tokenizer.encode_chat, prepared.prompt)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    return JSONResponse({"input_tokens": len(token_ids)})
