"""A response while it grows: its items, and the events that tell of them."""

import time
from typing import Any

from neo_desktop.app.api.calls import CallArguments, CallStart, Piece, Text
from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.outputs import Step, TokensUsed
from neo_desktop.app.api.replies import new_id, token_logprobs
from neo_desktop.app.web.errors import ApiError
from neo_desktop.models.tokenizer import Tokenizer


class ResponseEvents:
    """Puts a response together; each call returns the events of what has changed.

        item added ──→ part added ──→ deltas ──→ part done ──→ item done      (messages and thoughts)
        item added ──────────────────→ deltas ────────────────→ item done      (calls)

    Args:
        response: as long as nothing has come; it is filled in place.
        with_logprobs: tell how probable tokens were.
    """

    def __init__(self, response: Json, tokenizer: Tokenizer, with_logprobs: bool) -> None:
        self.response = response
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
        """Take in what came."""
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
            return self._end_item() + self._begin_item("function_call", piece)
        if isinstance(piece, CallArguments):
            assert self._item is not None
            self._item["arguments"] += piece.text
            return [self._of_item("response.function_call_arguments.delta", delta=piece.text)]
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

    def _begin_item(self, kind: str, call: CallStart | None = None) -> list[Json]:
        if call is not None:
            fields = {"call_id": call.call_id, "name": call.name, "arguments": ""}
            self._item = {"type": kind, "id": new_id("fc_"), "status": "in_progress"} | fields
            return [self._of_item("response.output_item.added", item=dict(self._item))]
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
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._of_item("response.function_call_arguments.done", **done))
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
