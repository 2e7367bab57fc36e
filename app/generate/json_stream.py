"""JSON that a model writes, mended and handed on while it grows."""

import json
import math
import re

MAX_DEPTH = 128  # parsers of JSON recurse
_MAX_WORD_CHARS = 1000  # of a number
_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f\x7f\ud800-\udfff]+')
_WORD = re.compile(r"[A-Za-z0-9+.-]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{0,4}")
_HIGH = re.compile(r"\\u[dD][89abAB]..")  # first half of a surrogate pair
_LOW = re.compile(r"\\u[dD][c-fC-F]..")
_UNKNOWN = "\\ufffd"  # stands for half of a pair that is alone


class JsonStream:
    """One JSON value, however its text is cut.

    Control characters and stray backslashes within strings are escaped, halves of surrogate pairs are
    replaced. Python's `True`, `False` and `None` become JSON's, a comma before a closing bracket is dropped.
    Anything else that is no JSON breaks the value.

    A key is handed on together with the beginning of its value, a number as a whole: brackets alone can
    close what was handed on.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self.first = ""  # character of the value
        self._text: list[str] = []  # certain by now
        self._num_taken = 0  # of its pieces
        self._pending: list[str] = []  # certain only with the value that follows
        self._unsent: list[str] = []  # as written, and not in `_text`
        self._closers: list[str] = []  # of what is open, the outermost first
        self._expected = "value"
        self._word = ""
        self._escape = ""
        self._is_key = False
        self._complete = (0, "")  # pieces up to the last complete member, and what closes them

    @property
    def has_member(self) -> bool:
        """True once more is certain than an opening bracket."""
        return len(self._text) > 1

    def feed(self, text: str, at: int = 0) -> int:
        """Read on from a place; return the place of the first character that is not the value's."""
        while at < len(text) and not self.is_complete and not self.is_broken:
            begun, num_pieces = at, len(self._text)
            at = self._string(text, at) if self._expected == "string" else self._structure(text, at)
            if len(self._text) > num_pieces:
                self._unsent.clear()
            elif at > begun:
                self._unsent.append(text[begun:at])
        return at

    def take(self) -> str:
        """Return what became certain since the last call."""
        text = "".join(self._text[self._num_taken :])
        self._num_taken = len(self._text)
        return text

    def take_unsent(self) -> str:
        """Return the text that was read and is not certain, unchanged."""
        text = "".join(self._unsent)
        self._unsent.clear()
        return text

    def closing(self) -> str:
        """Return what closes the text that is certain."""
        return "".join(reversed(self._closers))

    def closed(self) -> str:
        """Return the members that are complete, as JSON."""
        num_pieces, closing = self._complete
        return "".join(self._text[:num_pieces]) + closing

    def _send(self, text: str) -> None:
        self._text += [*self._pending, text]
        self._pending.clear()

    def _string(self, text: str, at: int) -> int:
        out = self._pending if self._is_key else self._text
        if self._escape:
            return self._escaped(text[at], at, out)
        plain = _PLAIN.match(text, at)
        if plain is not None:
            out.append(plain[0])
            return plain.end()
        char = text[at]
        if char == "\\":
            self._escape = char
        elif char == '"':
            out.append(char)
            self._expected = "colon"
            if not self._is_key:
                self._ended()
        else:
            out.append(_UNKNOWN if char >= "\ud800" else json.dumps(char)[1:-1])
        return at + 1

    def _escaped(self, char: str, at: int, out: list[str]) -> int:
        """Read one more character of an escape, or find that it is none."""
        escape = self._escape + char
        if len(self._escape) >= 6:  # half of a pair came
            second = escape[6:]
            if (len(second) <= 2 and "\\u".startswith(second)) or _UNICODE.fullmatch(second):
                self._escape = escape
                if len(second) == 6:
                    out.append(escape if _LOW.fullmatch(second) else _UNKNOWN)
                    self._escape = "" if _LOW.fullmatch(second) else second
                    if self._escape and not _HIGH.fullmatch(second):
                        out.append(second)
                        self._escape = ""
                return at + 1
            out.append(_UNKNOWN)
            self._escape = self._escape[6:]
            return at
        if len(escape) == 2 and char in '"\\/bfnrt':
            out.append(escape)
            self._escape = ""
        elif _UNICODE.fullmatch(escape):
            self._escape = escape
            if len(escape) == 6 and not _HIGH.fullmatch(escape):
                out.append(_UNKNOWN if _LOW.fullmatch(escape) else escape)
                self._escape = ""
        else:  # a stray backslash
            out.append(f"\\{self._escape}")
            self._escape = ""
            return at
        return at + 1

    def _structure(self, text: str, at: int) -> int:
        if self._expected == "word":
            return self._read_word(text, at)
        space = _SPACE.match(text, at)
        if space is not None:
            if self._closers:
                self._pending.append(space[0])
            return space.end()
        char = text[at]
        self.first = self.first or char
        if self._closers and char == self._closers[-1] and self._may_close():
            self._send(char)
            self._closers.pop()
            self._ended()
        elif self._expected in ("value", "value or end", "next value"):
            self._begin_value(char)
            return at if self._expected == "word" or self.is_broken else at + 1
        elif self._expected in ("key or end", "next key") and char == '"':
            self._pending.append(char)
            self._expected, self._is_key = "string", True
        elif self._expected == "colon" and char == ":":
            self._pending.append(char)
            self._expected = "value"
        elif self._expected == "comma" and char == ",":
            self._pending.append(char)
            self._expected = "next key" if self._closers[-1] == "}" else "next value"
        else:
            self.is_broken = True
            return at
        return at + 1

    def _may_close(self) -> bool:
        """Return whether a closing bracket is in place here; a comma right before it goes."""
        if self._expected in ("next key", "next value"):
            self._pending.remove(",")
            return True
        return self._expected in ("comma", "key or end", "value or end")

    def _begin_value(self, char: str) -> None:
        if char == '"':
            self._send(char)
            self._expected, self._is_key = "string", False
        elif char in "{[" and len(self._closers) < MAX_DEPTH:
            self._send(char)
            self._closers.append("}" if char == "{" else "]")
            self._expected = "key or end" if char == "{" else "value or end"
            if len(self._closers) == 1:
                self._complete = (len(self._text), self.closing())
        elif _WORD.match(char):
            self._expected = "word"
        else:
            self.is_broken = True

    def _read_word(self, text: str, at: int) -> int:
        """Read more of a number or literal, or end it."""
        more = _WORD.match(text, at)
        if more is not None:
            self._word += more[0][: _MAX_WORD_CHARS + 1]
            self.is_broken = len(self._word) > _MAX_WORD_CHARS
            return more.end()
        written = _LITERALS.get(self._word)
        if written is None and _NUMBER.fullmatch(self._word) and math.isfinite(float(self._word)):
            written = self._word
        if written is None:
            self.is_broken = True
        else:
            self._send(written)
            self._ended()
        self._word = ""
        return at

    def _ended(self) -> None:
        self._expected = "comma"
        self.is_complete = not self._closers
        self._complete = (len(self._text), self.closing())


def parsed(text: str) -> str | None:
    """Return the JSON object that a text holds, mended; None if it holds none."""
    stream = JsonStream()
    at = stream.feed(text)
    is_object = stream.is_complete and stream.first == "{" and not text[at:].strip()
    return stream.take() if is_object else None


def complete_members(arguments: str) -> str:
    """Return the members that are complete in the beginning of an object, as an object."""
    stream = JsonStream()
    stream.feed(arguments)
    return stream.closed() if stream.first == "{" else "{}"
