"""The output for Anthropic's clients: a message in one piece, or the events by which it grows."""

import json
from collections.abc import AsyncIterator
from typing import Any

from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.replies import new_id
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.calls import CallArguments, CallStart, Text, Thought
from neo_desktop.app.generate.json_stream import complete_members
from neo_desktop.app.generate.outputs import Answer, Outputs, TokensUsed
from neo_desktop.app.web.connection import event

_EMPTY_TEXT: Json = {"type": "text", "text": "", "citations": None}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def stop_reason(end: str | None, stopped_by: str | None) -> Json:
    """Why an answer ended."""
    if stopped_by is not None and end == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    return {"stop_reason": STOP_REASONS[end or "stop"], "stop_sequence": None}


async def message_events(outputs: Outputs, model: str) -> AsyncIterator[bytes]:
    """Yield the answer while it grows; an error is the last event."""
    blocks = _BlockEvents()
    is_begun = False
    try:
        async for step in outputs:
            if not is_begun:
                is_begun = True
                yield _event("message_start", message=message_body(model, outputs.usage))
                yield _event("ping")
            for piece in step.pieces:
                begun: Json | None = None
                match piece:
                    case Text(text):
                        begun = _EMPTY_TEXT
                        delta = {"type": "text_delta", "text": text}
                    case Thought(text):
                        begun = {"type": "thinking", "thinking": "", "signature": ""}
                        delta = {"type": "thinking_delta", "thinking": text}
                    case CallStart(_, call_id, name):
                        begun = _tool_use(call_id, name)
                        delta = {"type": "input_json_delta", "partial_json": ""}
                    case CallArguments(_, text):
                        delta = {"type": "input_json_delta", "partial_json": text}
                for body in blocks.add(begun, delta):
                    yield body
            if step.end is not None:
                for body in blocks.end():
                    yield body
                usage = {"output_tokens": outputs.usage.num_output_tokens}
                yield _event("message_delta", delta=stop_reason(step.end, step.stopped_by), usage=usage)
                yield _event("message_stop")
    except ApiError as error:
        yield event(error.anthropic_body, "error")


class _BlockEvents:
    """The open block of the answer, and the events that open and close it."""

    def __init__(self) -> None:
        self._index = -1
        self._type: str | None = None  # of the open block

    def add(self, begun: Json | None, delta: Json) -> list[bytes]:
        """More of the answer; `begun`: the block that it belongs to, None for the open one."""
        events = []
        if begun is not None and (begun["type"] != self._type or begun["type"] == "tool_use"):
            events += self.end()
            self._index += 1
            self._type = begun["type"]
            events.append(_event("content_block_start", index=self._index, content_block=begun))
        return [*events, _event("content_block_delta", index=self._index, delta=delta)]

    def end(self) -> list[bytes]:
        """Close the open block, if there is one."""
        if self._type is None:
            return []
        self._type = None
        return [_event("content_block_stop", index=self._index)]


def message_body(model: str, usage: TokensUsed) -> Json:
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


def blocks_of(answer: Answer) -> list[Json]:
    blocks: list[Json] = []
    if answer.thought:
        blocks.append({"type": "thinking", "thinking": answer.thought, "signature": ""})
    if answer.text:
        blocks.append(_EMPTY_TEXT | {"text": answer.text})
    for call in answer.calls:
        blocks.append(_tool_use(call.call_id, call.name) | {"input": _input(call.arguments)})
    return blocks


def _tool_use(call_id: str, name: str) -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}, "caller": {"type": "direct"}}


def _input(arguments: str) -> Json:
    """Return the arguments as an object; cut arguments keep their complete members."""
    value: Json = json.loads(complete_members(arguments))
    return value


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name} | fields, name)
