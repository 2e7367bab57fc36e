"""Tool calls, read from the text that a model writes, while it grows."""

import hashlib
import json
import string
import uuid
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from neo_desktop.app.generate.json_stream import JsonStream, parsed
from neo_desktop.app.generate.tools import WHITE_SPACE, ToolFormat
from neo_desktop.models.thoughts import split_off_beginning

_MAX_NAME_CHARS = 256
_LETTERS = string.ascii_letters + string.digits
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)  # of a call without a mark


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
_Step = tuple[int, list[Piece]]  # the next place, and the pieces that became certain


class CallReader:
    """Tells calls from other text, however the text is cut into pieces.

        text ──opening mark──→ marked ──"{"──→ call ──its "}"──→ marked ──anything else──→ text

    A beginning that may become a mark or a call is held back. A part that turns out to be no call is text,
    unchanged. Arguments are handed on while they grow, always as the text of a JSON object, unless
    the text ends within them. A call whose arguments stop being JSON is closed there, and the rest is text.

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
        self._state: Literal["start", "text", "marked", "call"] = "start" if tool_format.is_bare else "text"
        if is_begun:
            self._state = "marked"
        self._has_mark = is_begun  # an opening mark came, and no call after it yet
        self._in_list = False
        self._held = ""  # may begin a mark or a name
        self._gap: list[str] = []  # text, unless a call follows
        self._call = _Call(None)
        self._is_told = False  # the call's name was given out
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Piece]:
        """Take in the next piece; yields what is certain by now."""
        text, self._held = self._held + text, ""
        steps = {
            "start": self._in_start,
            "text": self._in_text,
            "marked": self._in_marked,
            "call": self._in_call,
        }
        at = 0
        while at < len(text) and not self._has_enough:
            at, pieces = steps[self._state](text, at)
            yield from pieces

    def flush(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """End the text: yields what was held back.

        Args:
            is_cut: the model would have written more; half a mark and half a call are no text then.
        """
        if self._has_enough:
            return
        if self._state == "call":
            if self._call.name and self._is_known and not self._is_told and (is_cut or self._call.is_begun):
                yield self._told()
            if self._is_told:
                yield from self._arguments(self._call.take() + self._call.take_unsent())
                return
        held = self._call.raw if self._state == "call" else self._held
        if self._has_mark or self._state in ("text", "marked"):
            is_rest = self._state == "marked" and not self._has_mark and self._format.closing.startswith(held)
            held = "" if is_cut or is_rest else held
        if not (is_cut and self._has_mark):
            held = "".join(self._gap) + held
        if held:
            yield Text(held)

    @property
    def _has_enough(self) -> bool:
        return self.num_calls == self._max_calls and self._state != "call"

    @property
    def _is_known(self) -> bool:
        return self._has_mark or not self._format.is_bare or self._call.name in self._names

    def _in_start(self, text: str, at: int) -> _Step:
        """At the beginning, a call needs no mark."""
        begun = _skip(text, at, WHITE_SPACE)
        self._gap.append(text[at:begun])
        if begun == len(text):
            return begun, []
        return self._begin_call(begun) if text[begun] == "{" else (begun, self._as_text())

    def _in_text(self, text: str, at: int) -> _Step:
        mark = self._format.opening
        end = text.find(mark, at)
        if end >= 0:
            self._read_opening()
            return end + len(mark), [Text(text[at:end])] if end > at else []
        end = max(at, len(text) - len(mark))
        before, self._held = split_off_beginning(text[end:], mark)
        before = text[at:end] + before
        return len(text), [Text(before)] if before else []

    def _in_marked(self, text: str, at: int) -> _Step:
        """After a mark or a call."""
        begun = _skip(text, at, WHITE_SPACE)
        if self._gap:
            self._gap.append(text[at:begun])
        if begun == len(text):
            return begun, []
        char = text[begun]
        if char == "{":
            return self._begin_call(begun)
        if self._has_mark and text.startswith(self._format.opening, begun):
            return begun, self._as_text()
        end = self._after_mark(text, begun)
        if end is None and self._is_separator(char):
            end = begun + 1
        if end is None and self._format.has_names:
            end = self._after_name(text, begun)
        return (end, []) if end is not None else (begun, self._as_text())

    def _after_mark(self, text: str, at: int) -> int | None:
        """Read a mark or hold back the beginning of one; None: there is none."""
        opening, closing = self._format.opening, self._format.closing
        if text.startswith(opening, at):
            self._read_opening()
            return at + len(opening)
        if closing and text.startswith(closing, at):
            return None if self._has_mark else at + len(closing)
        rest = text[at : at + len(opening + closing)]
        if opening.startswith(rest) or closing.startswith(rest):
            self._held = rest
            return len(text)
        return None

    def _after_name(self, text: str, at: int) -> int | None:
        """Read a name that stands before the arguments, or hold it back; None: there is none."""
        end = text.find("{", at, at + _MAX_NAME_CHARS)
        written = text[at : end if end >= 0 else at + _MAX_NAME_CHARS]
        name = written.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()
        if len(written) == _MAX_NAME_CHARS or not self._may_be_name(name):
            return None
        if end < 0:
            self._held = written
            return len(text)
        self._gap.append(written)
        return self._begin_call(end, name)[0]

    def _is_separator(self, char: str) -> bool:
        """Return whether a character belongs to a list of calls, or stands between two; it is read then."""
        if char == "[" and self._has_mark and not self._in_list:
            self._in_list = True
        elif char == "]" and self._in_list and not self._has_mark:
            self._in_list = False
            return True
        elif self._has_mark or not ((char == "," and self._in_list) or char in self._format.separators):
            return False
        self._gap.append(char)
        return True

    def _may_be_name(self, beginning: str) -> bool:
        return len(beginning.split()) <= 1 or any(name.startswith(beginning) for name in self._names)

    def _read_opening(self) -> None:
        self._state, self._has_mark, self._in_list = "marked", True, False
        self._gap = [self._format.opening]

    def _begin_call(self, at: int, name: str | None = None) -> _Step:
        is_bare = self._format.is_bare and not self._has_mark
        self._state, self._call, self._is_told = "call", _Call(name, _KEYS if is_bare else None), False
        return at, []

    def _in_call(self, text: str, at: int) -> _Step:
        call, pieces = self._call, list[Piece]()
        at = call.feed(text, at)
        if call.name and call.is_object and self._is_known and not self._is_told:
            pieces.append(self._told())
        is_over = call.is_complete or call.is_broken or (call.name is not None and not self._is_known)
        if self._is_told:
            end = call.closing() if call.is_broken else ""
            pieces += self._arguments(call.take() + end)
        if is_over and self._is_told:
            self.num_calls += 1
            self._state, self._has_mark, self._gap = "marked", False, []
            if (rest := call.take_unsent()).strip():
                self._gap = [rest]
                pieces += self._as_text()
        elif is_over:
            self._gap.append(call.raw)
            pieces += self._as_text()
        return at, pieces

    def _told(self) -> CallStart:
        self._is_told = True
        return CallStart(self.num_calls, _new_id(self._format), self._call.name or "")

    def _arguments(self, text: str) -> list[Piece]:
        return [CallArguments(self.num_calls, text)] if text else []

    def _as_text(self) -> list[Piece]:
        text, self._gap = "".join(self._gap), []
        self._state, self._has_mark, self._in_list = "text", False, False
        return [Text(text)] if text else []


class _Call:
    """One JSON object like {"name": "f", "arguments": {"a": 1}} as it grows.

    Args:
        name: where the name stands before the object; the object then is the arguments.
        keys: that it may have; None: any. Of several with the same key, the first counts.
    """

    def __init__(self, name: str | None, keys: Collection[str] | None = None) -> None:
        self.name = name
        self.is_complete = False
        self.is_broken = False
        self._keys = keys
        self._raw: list[str] = []
        self._rest: list[str] = []  # after the arguments
        self._arguments = JsonStream() if name is not None else None
        self._text: str | None = None  # of the arguments, where they are not written as an object
        self._value = self._arguments or JsonStream()  # that is being read
        self._key: str | None = None
        self._expected = "{" if name is None else "arguments"

    @property
    def raw(self) -> str:
        """The text of the call so far."""
        return "".join(self._raw)

    @property
    def is_begun(self) -> bool:
        """True once the arguments have begun as an object."""
        return self._arguments is not None and self._arguments.first == "{"

    @property
    def is_object(self) -> bool:
        """True once the arguments are known to be an object with a member, or an empty one."""
        has_member = self._arguments is not None and self._arguments.has_member
        return self._text is not None or (self.is_begun and has_member)

    def feed(self, text: str, at: int) -> int:
        """Read on from a place; return the place of the first character that is not the call's."""
        begun = at
        while at < len(text) and not self.is_complete and not self.is_broken:
            before, was_after = at, self._has_arguments
            at = self._step(text, at)
            if was_after:
                self._rest.append(text[before:at])
        self._raw.append(text[begun:at])
        return at

    def take(self) -> str:
        """Return what became certain of the arguments since the last call."""
        if self._text is not None:
            text, self._text = self._text, ""
            return text
        return self._arguments.take() if self._arguments is not None and self.is_begun else ""

    def take_unsent(self) -> str:
        """Return what was read after the certain part of the arguments, up to the end of a broken call."""
        if self._has_arguments:
            return "".join(self._rest) if self.is_broken else ""
        return self._arguments.take_unsent() if self._arguments is not None and self.is_begun else ""

    def closing(self) -> str:
        """Return what closes the arguments."""
        return "" if self._arguments is None or self._text is not None else self._arguments.closing()

    @property
    def _has_arguments(self) -> bool:
        return self._arguments is not None and self._arguments.is_complete

    def _step(self, text: str, at: int) -> int:
        if self._expected in ("arguments", "key's end", "value's end"):
            at = self._value.feed(text, at)
            self.is_broken = self._value.is_broken
            if self._value.is_complete:
                self._take_in()
            return at
        begun = _skip(text, at, WHITE_SPACE)
        if begun > at:
            return begun
        char = text[at]
        if self._expected == "value":
            self._begin_value()
            return at
        if char == '"' and self._expected in ("key or }", "key"):
            self._value, self._expected = JsonStream(), "key's end"
            return at
        if char == "}" and self._expected in ("key or }", ", or }", "key"):
            self.is_complete = True
            self._text = "{}" if self._arguments is None else self._text
        else:
            following = {"{": "key or }", ", or }": "key", ":": "value"}
            self.is_broken = self._expected not in following or char != self._expected[0]
            if self.is_broken:
                return at
            self._expected = following[self._expected]
        return at + 1

    def _begin_value(self) -> None:
        self._value, self._expected = JsonStream(), "value's end"
        if self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = self._value

    def _take_in(self) -> None:
        """A key or a value is complete, or the arguments after a name."""
        if self._expected == "arguments":
            self.is_complete, self.is_broken = self.is_object, not self.is_object
        elif self._expected == "key's end":
            self._key, self._expected = json.loads(self._value.take()), ":"
            self.is_broken = self._keys is not None and self._key not in self._keys
        else:
            self._expected = ", or }"
            if self._value is self._arguments and not self.is_object:
                value = json.loads(self._value.take())
                written = value if isinstance(value, str) else json.dumps(value)
                # Some models write the arguments as a text that holds JSON, or none at all.
                self._text = "{}" if written.strip() in ("", "null") else parsed(written)
                self.is_broken = self._text is None
            elif self._key == "name" and self.name is None:
                name = json.loads(self._value.take())
                self.name = name if isinstance(name, str) else None
                self.is_broken = not self.name


def _skip(text: str, at: int, chars: str) -> int:
    while at < len(text) and text[at] in chars:
        at += 1
    return at


def _new_id(tool_format: ToolFormat) -> str:
    return short_id(uuid.uuid4().hex) if tool_format.short_ids else f"call_{uuid.uuid4().hex[:24]}"


def short_id(call_id: str) -> str:
    """Return an id of nine letters and digits, the same for the same id; a short id does not change."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    digest = hashlib.sha256(call_id.encode("utf-8", "replace")).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])
