"""A growing response: its items and their events."""

import time
from typing import Any, NamedTuple

import pydantic_core

from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.replies import new_id, token_logprobs
from neo_desktop.app.api.response_tools import ResponseTools
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.calls import CallArguments, CallStart, Piece, Text
from neo_desktop.app.generate.outputs import Step, TokensUsed
from neo_desktop.models.tokenizer import Tokenizer


class _Kind(NamedTuple):
    """A kind of items."""

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
    """Puts a response together; each call returns the events of what has changed.

        item added ──→ part added ──→ deltas ──→ part done ──→ item done      (messages and thoughts)
        item added ──────────────────→ deltas ────────────────→ item done      (calls)

    Args:
        response: as long as nothing has come; it is filled in place.
        tools: the request's, which name the kinds of calls.
        with_logprobs: add the log-probabilities of tokens.
    """

    def __init__(
        self, response: Json, tools: ResponseTools, tokenizer: Tokenizer, with_logprobs: bool
    ) -> None:
        self.response = response
        self._tools = tools
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._item: Json | None = None  # the one that grows
        self._holder: Json = {}  # of its text
        self._arguments = ""  # of the call that grows, as the model writes them
        self._number = 0
        self._end: str | None = None

    def begin(self) -> list[Json]:
        """The first events."""
        return [self._of_response("created"), self._of_response("in_progress")]

    def add(self, step: Step) -> list[Json]:
        self._end = step.end
        logprobs = token_logprobs(self._tokenizer, step.tokens) if self._with_logprobs else []
        events = []
        for number, piece in enumerate(step.pieces):
            events += self._add_piece(piece, [] if number else logprobs)
        return events

    def end(self, usage: TokensUsed) -> list[Json]:
        """The last events."""
        is_cut = self._end == "length"
        status = "incomplete" if is_cut else "completed"
        events = [] if self._item or self.response["output"] else self._begin_text("message")
        events += self._end_item(status)
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
        return [*events, self._of_response(status)]

    def fail(self, error: ApiError) -> list[Json]:
        """The last events when nothing more will come."""
        events = self._end_item("incomplete")
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return [*events, self._of_response("failed")]

    def _add_piece(self, piece: Piece, logprobs: list[Json]) -> list[Json]:
        if isinstance(piece, CallStart):
            return self._end_item() + self._begin_call(piece)
        if isinstance(piece, CallArguments):
            self._arguments += piece.text
            if "input" in self._holder:
                return self._grow_input(_input_so_far(self._arguments) or "")
            return self._grow(piece.text)
        kind = "message" if isinstance(piece, Text) else "reasoning"
        events = []
        if self._item is None or self._item["type"] != kind:
            events = self._end_item() + self._begin_text(kind)
        if kind == "reasoning":
            return [*events, *self._grow(piece.text)]
        self._holder["logprobs"] += logprobs
        return [*events, *self._grow(piece.text, logprobs=logprobs)]

    def _begin_call(self, call: CallStart) -> list[Json]:
        kind, name, namespace = self._tools.route(call.name)
        fields = {"call_id": call.call_id, _KINDS[kind].field: "", "name": name}
        self._arguments = ""
        return self._begin(kind, fields | ({"namespace": namespace} if namespace else {}))

    def _begin_text(self, kind: str) -> list[Json]:
        fields: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        return self._begin(kind, fields | {"content": []})

    def _begin(self, kind: str, fields: Json) -> list[Json]:
        prefix, _, _, part = _KINDS[kind]
        self._item = {"type": kind, "id": new_id(prefix), "status": "in_progress"} | fields
        events = [self._event("output_item.added", output_index=self._index, item=dict(self._item))]
        self._holder = self._item
        if part is not None:
            self._holder = part | ({"logprobs": []} if kind == "message" else {})
            self._item["content"] = [self._holder]
            events.append(self._of_item("content_part.added", part=dict(part)))
        return events

    def _grow(self, text: str, **more: Any) -> list[Json]:
        assert self._item is not None
        kind = _KINDS[self._item["type"]]
        self._holder[kind.field] += text
        return [self._of_item(f"{kind.text}.delta", delta=text, **more)]

    def _grow_input(self, text: str) -> list[Json]:
        """Add what is new of the input of a custom tool."""
        so_far = self._holder["input"]
        return self._grow(text.removeprefix(so_far)) if text != so_far and text.startswith(so_far) else []

    def _end_item(self, status: str = "completed") -> list[Json]:
        if self._item is None:
            return []
        item = self._item
        kind = _KINDS[item["type"]]
        events = []
        if item["type"] == "custom_tool_call":
            whole = _input_so_far(self._arguments)
            events += self._grow_input(self._arguments if whole is None else whole)
        item["status"] = status
        done = {name: self._holder[name] for name in (kind.field, "name", "logprobs") if name in self._holder}
        events.append(self._of_item(f"{kind.text}.done", **done))
        if kind.part is not None:
            events.append(self._of_item("content_part.done", part=dict(self._holder)))
        events.append(self._event("output_item.done", output_index=self._index, item=dict(item)))
        self.response["output"].append(item)
        self._item = None
        return events

    @property
    def _index(self) -> int:
        return len(self.response["output"])

    def _of_item(self, kind: str, **fields: Any) -> Json:
        assert self._item is not None
        place: Json = {"output_index": self._index, "item_id": self._item["id"]}
        place |= {} if self._holder is self._item else {"content_index": 0}
        return self._event(kind, **place, **fields)

    def _of_response(self, kind: str) -> Json:
        return self._event(kind, response=dict(self.response, output=list(self.response["output"])))

    def _event(self, kind: str, **fields: Any) -> Json:
        body = {"type": f"response.{kind}", "sequence_number": self._number} | fields
        self._number += 1
        return body


def _input_so_far(arguments: str) -> str | None:
    """The text that a custom tool is called with, as far as its JSON is written; None: there is none."""
    try:
        value = pydantic_core.from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return None
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else None
