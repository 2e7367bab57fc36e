"""Tool calls, read from the text that a model writes, while it grows."""

import hashlib
import json
import string
import uuid
from collections.abc import Collection, Generator, Iterator
from typing import NamedTuple, TypeVar

from neo_desktop.app.generate.json_stream import SPACE, JsonValue, Reading, Source, mended
from neo_desktop.app.generate.tools import ToolFormat
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
T = TypeVar("T")
Steps = Generator[Piece | None, None, T]  # None: more text is needed


class CallReader:
    """Tells calls from other text, however the text is cut into pieces.

    A beginning that may become a mark or a call is held back. A part that turns out to be no call is text,
    unchanged. Arguments are handed on while they grow, always as the text of a JSON object, unless
    the text ends within them. A call whose arguments stop being JSON is closed there, and the rest is text.

    Args:
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
        self._num_calls = 0
        self._call: _Call | None = None  # that is being read
        self._gap: list[str] = []  # since the last call: text, unless a call follows
        self._has_mark = is_begun  # an opening mark came, and no call after it yet
        self._in_list = False
        self._source = Source()
        self._is_cut = False
        self._steps = self._read()

    def feed(self, text: str) -> Iterator[Piece]:
        """Take in the next piece; yields what is certain by now."""
        self._source.add(text)
        for piece in self._steps:
            if piece is None:
                yield from self._progress()
                return
            yield piece

    def flush(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """End the text: yields what was held back, but no half of a mark or call in a cut text."""
        self._source.is_ended, self._is_cut = True, is_cut
        return self.feed("")

    def _read(self) -> Steps[None]:
        if self._has_mark:
            yield from self._calls()
        elif self._format.is_bare:  # at the beginning, a call needs no mark
            self._gap.append((yield from self._source.run(SPACE)))
            is_call = (yield from self._source.ahead()) == "{"
            yield from self._calls() if is_call else self._as_text()
        while self._num_calls != self._max_calls and (yield from self._text()):
            self._begin_marked()
            yield from self._calls()

    def _text(self) -> Steps[bool]:
        """Read text and the opening mark after it; False: none came."""
        source, mark = self._source, self._format.opening
        while True:
            end = source.text.find(mark, source.at)
            is_found = end >= 0
            if not is_found:
                last = source.text[max(source.at, len(source.text) - len(mark)) :]
                end = len(source.text) - len(split_off_beginning(last, mark)[1])
                if source.is_ended and not self._is_cut:
                    end = len(source.text)
            if end > source.at:
                yield Text(source.text[source.at : end])
            source.at = end + len(mark) * is_found
            if is_found or source.is_ended:
                return is_found
            yield None

    def _calls(self) -> Steps[None]:
        """Read calls up to other text."""
        while self._num_calls != self._max_calls:
            space = yield from self._source.run(SPACE)
            if self._gap:
                self._gap.append(space)
            name = None
            if (char := (yield from self._source.ahead())) != "{":
                if (yield from self._is_between(char)):
                    continue
                name = yield from self._name()
                if name is None:
                    break
            if not (yield from self._is_call(name)):
                break
        rest = self._source.text[self._source.at :]
        is_closing = not self._has_mark and self._format.closing.startswith(rest)
        if self._source.is_ended and (self._is_cut or is_closing):
            self._source.take(len(rest))
        if not (self._is_cut and self._has_mark):
            yield from self._as_text()

    def _is_between(self, char: str) -> Steps[bool]:
        """Read a mark, the bracket of a list of calls, or what stands between two calls."""
        mark = yield from self._mark()
        if mark and not self._has_mark:
            self._source.take(len(mark))
            if mark == self._format.opening:
                self._begin_marked()
            return True
        if char == "]" and self._in_list and not self._has_mark:
            self._in_list = False
            self._source.take()
            return True
        if char == "[" and self._has_mark and not self._in_list and not mark:
            self._in_list = True
        elif not char or self._has_mark or char not in self._format.separators + "," * self._in_list:
            return False
        self._gap.append(self._source.take())
        return True

    def _begin_marked(self) -> None:
        self._gap, self._has_mark, self._in_list = [self._format.opening], True, False

    def _mark(self) -> Reading[str]:
        """Return the mark that stands here, or nothing."""
        source, marks = self._source, [self._format.opening, self._format.closing]
        while True:
            rest = source.text[source.at : source.at + max(map(len, marks))]
            for mark in filter(None, marks):
                if rest.startswith(mark):
                    return mark
            if source.is_ended or not any(mark.startswith(rest) for mark in marks):
                return ""
            yield

    def _name(self) -> Reading[str | None]:
        """Read the name that stands before the arguments; None: there is none."""
        source = self._source
        while self._format.has_names and not source.text.startswith(self._format.opening, source.at):
            written, brace, _ = source.text[source.at : source.at + _MAX_NAME_CHARS].partition("{")
            name = written.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()
            may_be = len(name.split()) <= 1 or any(known.startswith(name) for known in self._names)
            if not may_be or len(written) == _MAX_NAME_CHARS or (source.is_ended and not brace):
                break
            if brace:
                self._gap.append(source.take(len(written)))
                return name
            yield
        return None

    def _is_call(self, name: str | None) -> Steps[bool]:
        """Read a call; what is none is added to the gap."""
        self._source.taken.clear()
        needs_name = self._format.is_bare and not self._has_mark
        call = self._call = _Call(self._source, name, self._names if needs_name else None)
        is_whole = yield from call.read_call()
        is_cut_off = not is_whole and self._source.is_over
        yield from self._progress(is_last=is_cut_off and (self._is_cut or call.is_begun))
        self._call = None
        if not call.is_told:
            self._gap.append("".join(self._source.taken))
            return False
        rest = "" if is_whole else call.arguments.uncertain()
        end = call.arguments.closing()
        if is_cut_off:
            end = rest if call.is_begun and not call.arguments.is_complete else ""
        if end:
            yield CallArguments(self._num_calls, end)
        self._num_calls += 1
        self._has_mark = False
        self._gap = [rest] if rest.strip() and not is_cut_off else []
        return not self._gap

    def _progress(self, *, is_last: bool = False) -> Iterator[Piece]:
        """Yield what is certain of the call that is being read."""
        call = self._call
        if call is not None and call.name and not call.is_told and (call.is_object or is_last):
            call.is_told = True
            yield CallStart(self._num_calls, _new_id(self._format), call.name)
        if call is not None and call.is_told and (text := call.hand_on_arguments()):
            yield CallArguments(self._num_calls, text)

    def _as_text(self) -> Iterator[Piece]:
        text, self._gap = "".join(self._gap), []
        if text:
            yield Text(text)


class _Call(JsonValue):
    """One JSON object like {"name": "f", "arguments": {"a": 1}}, or the arguments alone after a name.

    If `names` are given, its name must be among them, and its keys must be those of a call.
    """

    def __init__(self, source: Source, name: str | None, names: Collection[str] | None) -> None:
        super().__init__(source)
        self.name = name
        self.is_told = False
        self.arguments = JsonValue(source)
        self._names = names
        self._text: str | None = None  # of the arguments, where they are not written as an object

    @property
    def is_begun(self) -> bool:
        """True once the arguments have begun as an object."""
        return self.arguments.first == "{"

    @property
    def is_object(self) -> bool:
        """True once the arguments are known to be an object with a member, or an empty one."""
        return self._text is not None or (self.is_begun and self.arguments.has_member)

    def read_call(self) -> Reading[bool]:
        """Return False if the text is no call, or ends within it."""
        if self.name is not None:
            return (yield from self.arguments.read()) and self.is_object
        is_whole = yield from self.read()
        if is_whole and not self.arguments.first:
            self._text = "{}"
        return is_whole

    def hand_on_arguments(self) -> str:
        """Return what became certain of the arguments since the last call."""
        if self._text is not None:
            text, self._text = self._text, ""
            return text
        return self.arguments.hand_on() if self.is_begun else ""

    def _member(self) -> Reading[bool]:
        """Read a key and its value; of several values of a key, the first counts."""
        written = JsonValue(self._source)
        if not (yield from written.read()):
            return False
        key = json.loads(written.hand_on())
        if (self._names is not None and key not in _KEYS) or not (yield from self._colon()):
            return False
        are_arguments = key in _ARGUMENTS and not self.arguments.first
        value = self.arguments if are_arguments else JsonValue(self._source)
        if not (yield from value.read()):
            return False
        if are_arguments and not self.is_object:
            given = json.loads(value.hand_on())
            text = given if isinstance(given, str) else json.dumps(given)
            # Some models write the arguments as a text that holds JSON, or none at all.
            self._text = "{}" if text.strip() in ("", "null") else mended(text)
            return self._text is not None
        if key == "name" and self.name is None:
            name = json.loads(value.hand_on())
            if not isinstance(name, str) or not name or not (self._names is None or name in self._names):
                return False
            self.name = name
        return True


def _new_id(tool_format: ToolFormat) -> str:
    return short_id(uuid.uuid4().hex) if tool_format.short_ids else f"call_{uuid.uuid4().hex[:24]}"


def short_id(call_id: str) -> str:
    """Return an id of nine letters and digits, the same for the same id; a short id does not change."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    digest = hashlib.sha256(call_id.encode("utf-8", "replace")).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])
