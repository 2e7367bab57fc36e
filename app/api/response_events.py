"""A growing response: its items and their events."""

import json
import time
from typing import Any

import pydantic_core

from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.replies import new_id, token_logprobs
from neo_desktop.app.api.response_tools import ResponseTools, shell_action
from neo_desktop.app.errors import ApiError
from neo_desktop.app.generate.calls import CallArguments, CallStart, Piece, Text
from neo_desktop.app.generate.outputs import Step, TokensUsed
from neo_desktop.models.tokenizer import Tokenizer

# Kind of a call → the beginning of its id, and what it holds before its arguments.
_CALLS: dict[str, tuple[str, Json]] = {
    "function_call": ("fc_", {"arguments": ""}),
    "custom_tool_call": ("ctc_", {"input": ""}),
    "local_shell_call": ("lsh_", {"action": shell_action({})}),
}


class ResponseEvents:
    """Puts a response together; each call returns the events of what has changed.

        item added ──→ part added ──→ deltas ──→ part done ──→ item done      (messages and thoughts)
        item added ──────────────────→ deltas ────────────────→ item done      (calls; shell's have no deltas)

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
        self._arguments = ""  # of the call that grows, as the model writes them
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._item: Json | None = None  # the one that grows
        self._logprobs: list[Json] = []  # of the message that grows
        self._number = 0
        self._end: str | None = None

    def begin(self) -> list[Json]:
        """The first events."""
        return [self._told("response.created"), self._told("response.in_progress")]

    def add(self, step: Step) -> list[Json]:
        events = []
        logprobs = token_logprobs(self._tokenizer, step.tokens) if self._with_logprobs else []
        for piece in step.pieces:
            events += self._add_piece(piece, logprobs)
            logprobs = []
        self._end = step.end
        return events

    def end(self, usage: TokensUsed) -> list[Json]:
        """The last events."""
        is_cut = self._end == "length"
        events = [] if self._item or self.response["output"] else self._begin_item("message")
        events += self._end_item("incomplete" if is_cut else "completed")
        self.response["status"] = "incomplete" if is_cut else "completed"
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        self.response["completed_at"] = None if is_cut else int(time.time())
        self.response["usage"] = {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_thought_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }
        return [*events, self._told(f"response.{self.response['status']}")]

    def fail(self, error: ApiError) -> list[Json]:
        """The last events when nothing more will come."""
        events = self._end_item("incomplete")
        self.response["status"] = "failed"
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response["error"] = {"code": code, "message": error.message}
        return [*events, self._told("response.failed")]

    def _add_piece(self, piece: Piece, logprobs: list[Json]) -> list[Json]:
        if isinstance(piece, CallStart):
            return self._end_item() + self._begin_call(piece)
        if isinstance(piece, CallArguments):
            return self._add_arguments(piece.text)
        kind = "message" if isinstance(piece, Text) else "reasoning"
        events = []
        if self._item is None or self._item["type"] != kind:
            events = self._end_item() + self._begin_item(kind)
        assert self._item is not None
        self._item["content"][0]["text"] += piece.text
        if kind == "reasoning":
            delta = self._of_part("response.reasoning_text.delta", delta=piece.text)
        else:
            self._logprobs += logprobs
            delta = self._of_part("response.output_text.delta", delta=piece.text, logprobs=logprobs)
        return [*events, delta]

    def _begin_call(self, call: CallStart) -> list[Json]:
        route = self._tools.route(call.name)
        prefix, empty = _CALLS[route.kind]
        self._arguments = ""
        self._item = {"type": route.kind, "id": new_id(prefix), "status": "in_progress"}
        self._item |= {"call_id": call.call_id} | empty
        if route.kind != "local_shell_call":
            self._item["name"] = route.name
            self._item |= {} if route.namespace is None else {"namespace": route.namespace}
        return [self._of_item("response.output_item.added", item=dict(self._item))]

    def _add_arguments(self, text: str) -> list[Json]:
        assert self._item is not None
        self._arguments += text
        if self._item["type"] == "function_call":
            self._item["arguments"] += text
            return [self._of_item("response.function_call_arguments.delta", delta=text)]
        if self._item["type"] == "custom_tool_call":
            return self._add_input(_input_so_far(self._arguments))
        return []

    def _add_input(self, text: str) -> list[Json]:
        assert self._item is not None
        delta = text.removeprefix(self._item["input"])
        if not delta or not text.startswith(self._item["input"]):
            return []
        self._item["input"] = text
        return [self._of_item("response.custom_tool_call_input.delta", delta=delta)]

    def _end_call(self) -> list[Json]:
        item = self._item
        assert item is not None
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            return [self._of_item("response.function_call_arguments.done", **done)]
        arguments = _object(self._arguments)
        if item["type"] == "local_shell_call":
            item["action"] = shell_action(arguments)
            return []
        whole = arguments.get("input", self._arguments)
        events = self._add_input(whole) if isinstance(whole, str) else []
        return [*events, self._of_item("response.custom_tool_call_input.done", input=item["input"])]

    def _begin_item(self, kind: str) -> list[Json]:
        self._item = {
            "type": kind,
            "id": new_id("msg_" if kind == "message" else "rs_"),
            "status": "in_progress",
        }
        if kind == "message":
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._item |= {"role": "assistant", "content": []}
        else:
            part = {"type": "reasoning_text", "text": ""}
            self._item |= {"summary": [], "content": []}
        added = self._of_item("response.output_item.added", item=dict(self._item) | {"content": []})
        self._item["content"].append(part)
        return [added, self._of_part("response.content_part.added", part=dict(part))]

    def _end_item(self, status: str = "completed") -> list[Json]:
        if self._item is None:
            return []
        item = self._item
        item["status"] = status
        events = []
        if item["type"] in _CALLS:
            events += self._end_call()
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"], self._logprobs = self._logprobs, []
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                events.append(self._of_part("response.output_text.done", **done))
            else:
                events.append(self._of_part("response.reasoning_text.done", text=part["text"]))
            events.append(self._of_part("response.content_part.done", part=dict(part)))
        events.append(self._of_item("response.output_item.done", item=dict(item)))
        self.response["output"].append(item)
        self._item = None
        return events

    def _of_part(self, kind: str, **fields: Any) -> Json:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> Json:
        assert self._item is not None
        place: Json = {"output_index": len(self.response["output"])}
        if "item" not in fields:
            place["item_id"] = self._item["id"]
        return self._event(kind, **place, **fields)

    def _told(self, kind: str) -> Json:
        return self._event(kind, response=dict(self.response, output=list(self.response["output"])))

    def _event(self, kind: str, **fields: Any) -> Json:
        body = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return body


def _input_so_far(arguments: str) -> str:
    """The text that a custom tool is called with, as far as its JSON is written."""
    try:
        value = pydantic_core.from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return ""
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else ""


def _object(arguments: str) -> Json:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
