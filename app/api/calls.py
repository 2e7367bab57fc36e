"""Tool calls, read from the text that a model writes, while it grows."""

import hashlib
import json
import string
import uuid
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from neo_desktop.app.api.tools import ToolFormat
from neo_desktop.models.thoughts import split_off_beginning

_MAX_NAME_CHARS = 256
_LETTERS = string.ascii_letters + string.digits


class Text(NamedTuple):
    """More of the answer."""

    text: str


class Thought(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class CallStart(NamedTuple):
    """A call begins; its arguments follow."""

    number: int  # of the call within its output, from 0
    call_id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, as JSON text."""

    number: int
    text: str


Piece = Text | Thought | CallStart | CallArguments


class CallReader:
    """Tells calls from other text, however the text is cut into pieces.

        text ──opening mark──→ between ──"{"──→ call ──its "}"──→ between ──anything else──→ text

    What may begin a mark is held back. What looked like a call and is none is given out as text.

    Args:
        tool_format: of the model's family.
        names: of the tools; without a mark, only a call of one of them is a call.
        is_begun: the prompt has ended with the opening mark.
        max_calls: further ones are left out; None: any number.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        *,
        is_begun: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._format = tool_format
        self._names = names
        self._max_calls = max_calls
        self._state: Literal["text", "between", "call"] = "between" if is_begun else "text"
        self._is_start = tool_format.is_bare
        self._held = ""
        self._mark = ""  # read, with no call after it yet
        self._call = _JsonCall()
        self._is_call_told = False
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Piece]:
        """Take in the next piece; yields what is certain by now."""
        self._held += text
        while (pieces := self._advance()) is not None:
            yield from pieces

    def flush(self) -> Iterator[Piece]:
        """End the text: yields what was held back."""
        held = self._mark + (self._held if self._state != "call" else self._call.raw)
        if self._state == "call" and self._is_call_told:
            return
        is_rest = self._state == "between" and bool(self._format.closing.startswith(held.strip()))
        if held and not is_rest and not self._has_enough:
            yield Text(held)

    @property
    def _has_enough(self) -> bool:
        return self.num_calls == self._max_calls and self._state != "call"

    def _advance(self) -> list[Piece] | None:
        """Use up some of what is held; None: more must come first."""
        if self._has_enough:
            return None
        return {"text": self._in_text, "between": self._between, "call": self._in_call}[self._state]()

    def _in_text(self) -> list[Piece] | None:
        if self._is_start:
            begun = self._held.lstrip()
            if not begun:
                return None
            self._is_start = False
            if begun[0] == "{":
                return self._begin_call(begun)
        before, mark, after = self._held.partition(self._format.opening)
        if mark:
            self._state, self._held, self._mark = "between", after, mark
        else:
            before, self._held = split_off_beginning(self._held, self._format.opening)
            if not before:
                return None
        return [Text(before)] if before else []

    def _between(self) -> list[Piece] | None:
        self._held = self._held.lstrip(self._format.separators)
        marks = [mark for mark in (self._format.opening, self._format.closing) if mark]
        if any(mark.startswith(self._held) and mark != self._held for mark in marks):
            return None
        for mark in marks:
            if self._held.startswith(mark):
                self._held = self._held.removeprefix(mark)
                self._mark = mark if mark == self._format.opening else ""
                return []
        name, brace, _ = self._held.partition("{")
        if brace and not name:
            return self._begin_call(self._held)
        if brace and self._format.has_names and len(name) < _MAX_NAME_CHARS:
            name_alone = name.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()
            return self._begin_call(self._held.removeprefix(name), name_alone)
        if self._format.has_names and len(name) < _MAX_NAME_CHARS:
            return None
        mark, self._mark = self._mark, ""
        self._state = "text"
        return [Text(mark)] if mark else []

    def _begin_call(self, text: str, name: str | None = None) -> list[Piece]:
        self._state, self._held = "call", text
        self._call, self._is_call_told = _JsonCall(name), False
        return []

    def _in_call(self) -> list[Piece] | None:
        num_chars = self._call.feed(self._held)
        self._held = self._held[num_chars:]
        name, pieces = self._call.name, list[Piece]()
        is_known = name in self._names or bool(self._mark or not self._format.is_bare)
        if name and is_known and not self._is_call_told:
            self._is_call_told = True
            pieces.append(CallStart(self.num_calls, _new_id(self._format), name))
        if self._is_call_told and (arguments := self._call.take_arguments()):
            pieces.append(CallArguments(self.num_calls, arguments))
        if not self._is_call_told and (self._call.is_complete or (name and not is_known)):
            pieces.append(Text(self._mark + self._call.raw))
            self._state, self._mark = "text", ""
        elif self._call.is_complete:
            self.num_calls += 1
            self._state, self._mark = "between", ""
        return pieces or (None if self._state == "call" else [])


class _JsonCall:
    """One JSON object like {"name": "f", "arguments": {"a": 1}} as it grows.

    Args:
        name: where the name stands before the object; the object then is the arguments.
    """

    def __init__(self, name: str | None = None) -> None:
        self.raw = ""  # all of it so far
        self.is_complete = False
        self._name = name
        self._is_bare = name is not None
        self._members: list[_Member] = []
        self._num_given_chars = 0  # of the arguments
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def name(self) -> str | None:
        """The tool's name, once it is known."""
        if self._name is None:
            for member in self._members:
                if self._key(member) == "name" and member.end is not None:
                    name = _value(self.raw[member.colon : member.end])
                    self._name = name if isinstance(name, str) else None
        return self._name

    def feed(self, text: str) -> int:
        """Take in more; returns how many of the characters belong to the object."""
        start = len(self.raw)
        for at, char in enumerate(text, start):
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
                if self._depth == 1:
                    self._members.append(_Member(at + 1))
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._members[-1].end = at
                    self.is_complete = True
                    self.raw += text[: at + 1 - start]
                    return at + 1 - start
            elif self._depth == 1 and char == ":":
                self._members[-1].colon = self._members[-1].colon or at + 1
            elif self._depth == 1 and char == ",":
                self._members[-1].end = at
                self._members.append(_Member(at + 1))
        self.raw += text
        return len(text)

    def take_arguments(self) -> str:
        """What became certain of the arguments since the last call."""
        arguments = self._arguments()
        text = arguments[self._num_given_chars :]
        self._num_given_chars += len(text)
        return text

    def _arguments(self) -> str:
        if self._is_bare:
            return self.raw
        for member in self._members:
            if member.colon and self._key(member) in ("arguments", "parameters"):
                text = self.raw[member.colon : member.end].strip()
                if not text.startswith('"'):
                    return text
                # Some models write the arguments as a text that holds JSON.
                value = _value(text) if member.end is not None else ""
                return value if isinstance(value, str) else text
        return "{}" if self.is_complete else ""

    def _key(self, member: "_Member") -> object:
        return _value(self.raw[member.start : member.colon - 1]) if member.colon else None


class _Member:
    """Where a member of an object stands in its text."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.colon = 0  # after it; 0: not there yet
        self.end: int | None = None


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _new_id(tool_format: ToolFormat) -> str:
    return short_id(uuid.uuid4().hex) if tool_format.short_ids else f"call_{uuid.uuid4().hex[:24]}"


def short_id(call_id: str) -> str:
    """An id of nine letters and digits, always the same for the same id; such an id stays as it is."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    digest = hashlib.sha256(call_id.encode("utf-8", "replace")).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])
