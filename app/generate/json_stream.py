"""JSON that a model writes, mended and handed on while it grows."""

import json
import math
import re
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from pydantic_core import from_json

T = TypeVar("T")
Reading = Generator[None, None, T]  # it yields where it needs more text

MAX_DEPTH = 128  # parsers of JSON recurse
SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f\x7f\ud800-\udfff]+')
_WORD = re.compile(r"[A-Za-z0-9+.-]+")
_LAST_WORD = re.compile(r"[\w.+-]+\Z")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = {"True": "true", "False": "false", "None": "null"} | {
    one: one for one in ("true", "false", "null")
}
_UNIT = re.compile(r"\\u[0-9a-fA-F]{4}")
_HIGH = re.compile(r"\\u[dD][89abAB]..")  # first half of a surrogate pair
_LOW = re.compile(r"\\u[dD][c-fC-F]..")
_UNKNOWN = "\\ufffd"  # stands for half of a pair that is alone


class Source:
    """A text that comes in pieces."""

    def __init__(self, text: str = "", *, is_ended: bool = False) -> None:
        self.text = text
        self.at = 0
        self.is_ended = is_ended
        self.taken: list[str] = []

    @property
    def is_over(self) -> bool:
        return self.is_ended and self.at == len(self.text)

    def add(self, text: str) -> None:
        self.text, self.at = self.text[self.at :] + text, 0

    def ahead(self, count: int = 1) -> Reading[str]:
        """Return the next characters without taking them; fewer at the end of the text."""
        while len(self.text) - self.at < count and not self.is_ended:
            yield
        return self.text[self.at : self.at + count]

    def take(self, count: int = 1) -> str:
        self.taken.append(self.text[self.at : self.at + count])
        self.at += count
        return self.taken[-1]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take all characters of a kind."""
        found = []
        while (yield from self.ahead()) and (match := pattern.match(self.text, self.at)):
            found.append(self.take(len(match[0])))
        return "".join(found)


class JsonValue:
    """One JSON value, however its text is cut.

    Control characters and stray backslashes within strings are escaped, halves of surrogate pairs are
    replaced. Python's `True`, `False` and `None` become JSON's, a comma before a closing bracket is dropped.

    A key is handed on together with the beginning of its value, a number as a whole: brackets alone can
    close what was handed on.
    """

    def __init__(self, source: Source) -> None:
        self.first = ""  # character of the value
        self.is_complete = False
        self._source = source
        self._certain: list[str] = []
        self._num_handed_on = 0  # of its pieces
        self._num_taken = 0  # pieces of the source that are certain
        self._pending: list[str] = []  # certain only with the value that follows
        self._closers: list[str] = []  # of what is open, the outermost first

    @property
    def has_member(self) -> bool:
        """True once more is certain than an opening bracket."""
        return len(self._certain) > 1

    def read(self) -> Reading[bool]:
        """Return False if the text is no JSON, or ends within it."""
        self.first = yield from self._next()
        self.is_complete = yield from self._value()
        return self.is_complete

    def hand_on(self) -> str:
        """Return what became certain since the last call."""
        text = "".join(self._certain[self._num_handed_on :])
        self._num_handed_on = len(self._certain)
        return text

    def uncertain(self) -> str:
        """Return the text that was read after the certain part, unchanged."""
        return "".join(self._source.taken[self._num_taken :])

    def closing(self) -> str:
        """Return what closes the certain part."""
        return "".join(reversed(self._closers))

    def _send(self, text: str) -> None:
        self._certain += [*self._pending, text]
        self._pending.clear()
        self._num_taken = len(self._source.taken)

    def _next(self) -> Reading[str]:
        """Return the next character that is not white space."""
        space = yield from self._source.run(SPACE)
        if space and self._closers:
            self._pending.append(space)
        return (yield from self._source.ahead())

    def _value(self) -> Reading[bool]:
        char = yield from self._source.ahead()
        if char == '"':
            self._send(self._source.take())
            is_whole = yield from self._string(self._send)
        elif char in ("{", "[") and len(self._closers) < MAX_DEPTH:
            is_whole = yield from self._members("}" if char == "{" else "]")
        else:
            word = yield from self._source.run(_WORD)
            is_number = _NUMBER.fullmatch(word) and math.isfinite(float(word))
            written = word if is_number else _LITERALS.get(word)
            is_whole = written is not None and not self._source.is_over
            if written is not None and is_whole:
                self._send(written)
        return is_whole

    def _members(self, closer: str) -> Reading[bool]:
        self._send(self._source.take())
        self._closers.append(closer)
        while (char := (yield from self._next())) != closer:
            if closer == "]":
                is_read = yield from self._value()
            else:
                is_read = char == '"' and (yield from self._member())
            if not is_read:
                return False
            if (char := (yield from self._next())) == ",":
                self._pending.append(self._source.take())
            elif char != closer:
                return False
        if "," in self._pending:
            self._pending.remove(",")
        self._send(self._source.take())
        self._closers.pop()
        return True

    def _member(self) -> Reading[bool]:
        self._pending.append(self._source.take())
        if not (yield from self._string(self._pending.append)) or not (yield from self._colon()):
            return False
        yield from self._next()
        return (yield from self._value())

    def _colon(self) -> Reading[bool]:
        if (yield from self._next()) != ":":
            return False
        self._pending.append(self._source.take())
        return True

    def _string(self, write: Callable[[str], None]) -> Reading[bool]:
        """Read on after the opening quotation mark."""
        while char := (yield from self._source.ahead()):
            if plain := _PLAIN.match(self._source.text, self._source.at):
                write(self._source.take(len(plain[0])))
            elif char == "\\":
                write((yield from self._escape()))
            elif char == '"':
                write(self._source.take())
                return True
            else:
                self._source.take()
                write(_UNKNOWN if char >= "\ud800" else json.dumps(char)[1:-1])
        return False

    def _escape(self) -> Reading[str]:
        kind = (yield from self._source.ahead(2))[1:]
        if kind and kind in '"\\/bfnrt':
            return self._source.take(2)
        if kind == "u" and _UNIT.fullmatch((yield from self._source.ahead(6))):
            unit = self._source.take(6)
            if _HIGH.fullmatch(unit) and _LOW.fullmatch((yield from self._source.ahead(6))):
                return unit + self._source.take(6)
            return _UNKNOWN if _HIGH.fullmatch(unit) or _LOW.fullmatch(unit) else unit
        return "\\" + self._source.take()  # a stray backslash


def mended(text: str) -> str | None:
    """Return the JSON object that a text holds; None if it holds none."""
    source = Source(text, is_ended=True)
    value = JsonValue(source)
    for _ in value.read():
        pass
    is_object = value.is_complete and value.first == "{" and not source.text[source.at :].strip()
    return value.hand_on() if is_object else None


def complete_members(arguments: str) -> dict[str, Any]:
    """Return the members that are complete in the beginning of an object."""
    # A word at the end may be the beginning of a number.
    found: dict[str, Any] = from_json(_LAST_WORD.sub("", arguments) or "{", allow_partial=True)
    return found
