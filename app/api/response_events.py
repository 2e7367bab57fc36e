"""A growing response: its items and their events."""

import copy
import time
from typing import Any, NamedTuple

import pydantic_core

from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.replies import new_id, token_logprobs
from neo_desktop.app.api.response_items import ResponseTools
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.calls import CallArguments, CallStart, Piece, Text, Thought
from neo_desktop.app.generate.outputs import Step, TokensUsed
from neo_desktop.app.web.connection import event
from neo_desktop.models.tokenizer import Tokenizer


class _Kind(NamedTuple):
    prefix: str  # of ids
    text: str  # which grows, in the names of events
    field: str  # that holds the text
    part: Json | None = None  # of the item, which holds the field; None: the item itself does


_KINDS = {
    "message": _Kind(
        *("msg_", "output_text", "text"),
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
    "reasoning": _Kind("rs_", "reasoning_text", "text", {"type": "reasoning_text", "text": ""}),
    "function_call": _Kind("fc_", "function_call_arguments", "arguments"),
    "custom_tool_call": _Kind("ctc_", "custom_tool_call_input", "input"),
}


class ResponseEvents:
    """Puts a response together, and writes an event for each change.

        item added ──→ part added ──→ deltas ──→ part done ──→ item done      (messages and thoughts)
        item added ──────────────────→ deltas ────────────────→ item done      (calls)

    `response`, which has no items yet, is filled in place.
    """

    def __init__(
        self, response: Json, tools: ResponseTools, tokenizer: Tokenizer, with_logprobs: bool
    ) -> None:
        self.response = response
        self._tools = tools
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._item: Json = {}  # the one that grows
        self._holder: Json = {}  # of its text
        self._arguments = ""  # of the call that grows, as the model writes them
        self._end: str | None = None
        self._events: list[Json] = []
        self._number = 0
        self._write_response("created")
        self._write_response("in_progress")

    def take(self) -> bytes:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return b"".join(event(body, body["type"]) for body in events)

    def add(self, step: Step) -> None:
        self._end = step.end
        logprobs = token_logprobs(self._tokenizer, step.tokens) if self._with_logprobs else []
        for number, piece in enumerate(step.pieces):
            self._add_piece(piece, [] if number else logprobs)

    def end(self, usage: TokensUsed) -> None:
        is_cut = self._end == "length"
        status = "incomplete" if is_cut else "completed"
        if not self._item and not self.response["output"]:
            self._begin(type="message", role="assistant", content=[])
        self._end_item(status)
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.num_thought_tokens},
                "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
            },
        }
        self._write_response(status)

    def fail(self, error: ApiError) -> None:
        self._end_item("incomplete")
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        self._write_response("failed")

    def _add_piece(self, piece: Piece, logprobs: list[Json]) -> None:
        match piece:
            case CallStart(_, call_id, full_name):
                item = self._tools.item(full_name)
                self._arguments = ""
                self._begin(**item, call_id=call_id, **{_KINDS[item["type"]].field: ""})
            case CallArguments(_, text):
                self._arguments += text
                if "input" in self._holder:
                    self._grow_input(_input_so_far(self._arguments) or "")
                else:
                    self._grow(text)
            case Thought(text):
                if self._item.get("type") != "reasoning":
                    self._begin(type="reasoning", summary=[], content=[])
                self._grow(text)
            case Text(text):
                if self._item.get("type") != "message":
                    self._begin(type="message", role="assistant", content=[])
                self._holder["logprobs"] += logprobs
                self._grow(text, logprobs=logprobs)

    def _begin(self, **item: Any) -> None:
        self._end_item("completed")
        prefix, _, _, part = _KINDS[item["type"]]
        self._item = self._holder = item | {"id": new_id(prefix), "status": "in_progress"}
        self._write("output_item.added", output_index=self._index, item=dict(self._item))
        if part is not None:
            self._holder = copy.deepcopy(part)
            self._item["content"] = [self._holder]
            self._write_of_item("content_part.added", part=part)

    def _grow(self, text: str, **more: Any) -> None:
        kind = _KINDS[self._item["type"]]
        self._holder[kind.field] += text
        self._write_of_item(f"{kind.text}.delta", delta=text, **more)

    def _grow_input(self, text: str) -> None:
        """Add what is new of the input of a custom tool."""
        so_far = self._holder["input"]
        if text != so_far and text.startswith(so_far):
            self._grow(text.removeprefix(so_far))

    def _end_item(self, status: str) -> None:
        item = self._item
        if not item:
            return
        kind = _KINDS[item["type"]]
        if item["type"] == "custom_tool_call":
            whole = _input_so_far(self._arguments)
            self._grow_input(self._arguments if whole is None else whole)
        item["status"] = status
        done = {name: self._holder[name] for name in (kind.field, "name", "logprobs") if name in self._holder}
        self._write_of_item(f"{kind.text}.done", **done)
        if kind.part is not None:
            self._write_of_item("content_part.done", part=self._holder)
        self._write("output_item.done", output_index=self._index, item=item)
        self.response["output"].append(item)
        self._item = {}

    @property
    def _index(self) -> int:
        return len(self.response["output"])

    def _write_of_item(self, kind: str, **fields: Any) -> None:
        place: Json = {"output_index": self._index, "item_id": self._item["id"]}
        place |= {} if self._holder is self._item else {"content_index": 0}
        self._write(kind, **place, **fields)

    def _write_response(self, kind: str) -> None:
        self._write(kind, response=dict(self.response, output=list(self.response["output"])))

    def _write(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": f"response.{kind}", "sequence_number": self._number} | fields)
        self._number += 1


def _input_so_far(arguments: str) -> str | None:
    """The text that a custom tool is called with, as far as its JSON is written; None: there is none."""
    try:
        value = pydantic_core.from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return None
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else None
