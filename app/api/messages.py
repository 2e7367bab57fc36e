"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form, which coding agents speak."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse, Response
from pydantic import Field

from neo_desktop.app.api.fields import MAX_TOOLS, Json, Model, SchemaFormat, Tagged
from neo_desktop.app.api.message_blocks import (
    AnthropicMessage,
    AnthropicTool,
    System,
    ToolDefinition,
    system_text,
)
from neo_desktop.app.api.replies import new_id
from neo_desktop.app.api.sampling import SampledRequest
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.errors import ApiError, blaming
from neo_desktop.app.generate.calls import CallArguments, CallStart, Piece, Text, Thought
from neo_desktop.app.generate.conversation import Conversation, prepare, thinking_fields, thought_tokens
from neo_desktop.app.generate.json_stream import complete_members
from neo_desktop.app.generate.outputs import Answer, Outputs, TokensUsed, begin, collect
from neo_desktop.app.generate.structure import Structure
from neo_desktop.app.generate.tools import CHOICES, ToolChoice
from neo_desktop.app.web.connection import EventStream, event
from neo_desktop.engine.errors import ContextLengthError, SettingError


class Choice(Model):
    """The obligation to call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Model):
    """A switch for thinking, and its budget: a thought that has used it up ends."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class OutputConfig(Model):
    """The answer's form, and how much thought goes into it."""

    format: SchemaFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # a hint; not all models know it


class CountTokensRequest(Model):
    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: System | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Annotated[Thinking, Tagged(refused={"between_tools": "ask for adaptive"})] | None = None
    output_config: OutputConfig | None = None

    def conversation(self, template: str | None) -> Conversation:
        prompt = system_text(self.system)
        system = [{"role": "system", "content": prompt}] if prompt else []
        choice = self.tool_choice or Choice(type="auto")
        if (choice.type == "tool") != (choice.name is not None):
            raise SettingError("tool_choice", "has a name when its type is tool, and only then")
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
            choice=ToolChoice(True, choice.name) if choice.name else CHOICES[choice.type],
            is_parallel=not choice.disable_parallel_tool_use,
            template_fields=thinking_fields(template, config.effort, is_thinking, is_hint=True),
            structure=structure,
            thought_tokens=thought_tokens(template, config.effort, budget),
            continues_last=self.messages[-1].role == "assistant",
        )


class MessagesRequest(CountTokensRequest, SampledRequest):
    max_tokens: int
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


async def answer(service: EngineService, body: MessagesRequest) -> Response:
    params = body.sampling_params(service.sampling_defaults)
    conversation = body.conversation(service.tokenizer.chat_template)
    try:
        outputs = await begin(service, conversation, params, cuts_max_tokens=True)
    except ApiError as error:
        if not isinstance(length := error.__cause__, ContextLengthError):
            raise
        # Anthropic's words, which agents look for.
        message = f"prompt is too long: {length.num_tokens} tokens > {length.limit - 1} maximum"
        message += "" if length.is_whole else " (in its beginning alone)"
        raise ApiError(400, message, param="messages") from length
    if body.stream:
        return EventStream(_events(outputs, service.model_name), outputs)
    (answer,) = await collect(outputs)
    written = _body(service.model_name, outputs.usage)
    reason = _stop_reason(answer.end, answer.stopped_by)
    return JSONResponse(written | {"content": _blocks(answer)} | reason)


async def count_tokens(service: EngineService, body: CountTokensRequest) -> Response:
    prepared = await prepare(service, body.conversation(service.tokenizer.chat_template))
    with blaming("messages"):
        token_ids = await asyncio.to_thread(service.tokenizer.encode_chat, prepared.prompt)
    return JSONResponse({"input_tokens": len(token_ids)})


async def _events(outputs: Outputs, model: str) -> AsyncIterator[bytes]:
    """Yield the answer while it grows, block after block; an error is the last event."""
    index, open_type = -1, None  # of the last block
    try:
        async for step in outputs:
            if index < 0:
                index = 0
                yield _event("message_start", message=_body(model, outputs.usage))
                yield _event("ping")
            for piece in step.pieces:
                block, delta = _block_of(piece)
                if block is not None and (block["type"] != open_type or open_type == "tool_use"):
                    if open_type is not None:
                        yield _event("content_block_stop", index=index)
                        index += 1
                    open_type = block["type"]
                    yield _event("content_block_start", index=index, content_block=block)
                yield _event("content_block_delta", index=index, delta=delta)
            if step.end is not None:
                if open_type is not None:
                    yield _event("content_block_stop", index=index)
                usage = {"output_tokens": outputs.usage.num_output_tokens}
                yield _event("message_delta", delta=_stop_reason(step.end, step.stopped_by), usage=usage)
                yield _event("message_stop")
    except ApiError as error:
        yield event(error.anthropic_body, "error")


def _block_of(piece: Piece) -> tuple[Json | None, Json]:
    """Return the empty block that a piece belongs to (None: the open one), and the change."""
    match piece:
        case Text(text):
            return _text(""), {"type": "text_delta", "text": text}
        case Thought(text):
            return _thinking(""), {"type": "thinking_delta", "thinking": text}
        case CallStart(_, call_id, name):
            return _tool_use(call_id, name), {"type": "input_json_delta", "partial_json": ""}
        case CallArguments(_, text):
            return None, {"type": "input_json_delta", "partial_json": text}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name} | fields, name)


def _stop_reason(end: str | None, stopped_by: str | None) -> Json:
    if stopped_by is not None and end == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reasons.get(end or "", "end_turn"), "stop_sequence": None}


def _body(model: str, usage: TokensUsed) -> Json:
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "inference_geo": None,
            "server_tool_use": None,
            "service_tier": "standard",
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"thinking_tokens": usage.num_thought_tokens},
        },
    }


def _blocks(answer: Answer) -> list[Json]:
    """The answer's blocks; arguments that were cut keep their complete members."""
    blocks = [_thinking(answer.thought)] if answer.thought else []
    blocks += [_text(answer.text)] if answer.text else []
    for call in answer.calls:
        arguments = complete_members(call.arguments) if call.arguments else {}
        blocks.append(_tool_use(call.call_id, call.name) | {"input": arguments})
    return blocks


def _text(text: str) -> Json:
    return {"type": "text", "text": text, "citations": None}


def _thinking(text: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(call_id: str, name: str) -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}, "caller": {"type": "direct"}}
