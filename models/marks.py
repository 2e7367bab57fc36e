"""Marks of chats: the texts of control tokens, distinguished from the same texts in users' messages.

    messages ──Shield──→ broken marks ──chat template──→ text ──Shield.read──→ ChatText ──encode_chat──→ ids

A template writes marks around messages that may contain the same characters. Before the template runs, a sign
that occurs nowhere else breaks every mark in its input. Afterwards, every unbroken mark is the template's.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

MAX_MARK_CHARS = 256  # longer texts of control tokens are never recognised in chats
MAX_NESTED_MARKS = 32  # levels of common prefixes; nested regular expressions use Python's stack
MAX_NESTED_JSON = 200  # levels of lists and objects in tools and arguments
# Characters without a meaning of their own; noncharacters of Unicode come first.
SIGNS = tuple(map(chr, chain(range(0xFDD0, 0xFDF0), (0xFFFE, 0xFFFF), range(0xE000, 0xF900))))


@dataclass(frozen=True, slots=True)
class ChatText:
    """A chat in the text of its template.

    Args:
        pieces: text, mark, text, mark, …, text; texts may be empty. Only the marks become control tokens.
    """

    pieces: tuple[str, ...]

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __str__(self) -> str:
        return "".join(self.pieces)

    def __add__(self, other: "ChatText") -> "ChatText":
        joint = self.pieces[-1] + other.pieces[0]
        return ChatText((*self.pieces[:-1], joint, *other.pieces[1:]))

    def beginning(self, num_chars: int) -> "ChatText":
        """Return the pieces of the first `num_chars` characters; the last piece may be longer."""
        for number in range(0, len(self.pieces), 2):
            num_chars -= len(self.pieces[number])
            if num_chars <= 0:
                last = self.pieces[number]
                return ChatText((*self.pieces[:number], last[: len(last) + num_chars]))
            num_chars -= sum(map(len, self.pieces[number + 1 : number + 2]))
        return self


class Marks:
    """The marks of a vocabulary.

    Args:
        spoken: marks that an assistant's own message may contain, like `<think>`.
    """

    def __init__(self, control: Iterable[str], spoken: Iterable[str] = ()) -> None:
        spoken = frozenset(filter(_is_mark, spoken))
        self.texts = frozenset(filter(_is_mark, control)) | spoken
        self._every = _Finder(self.texts)
        self._spoken = _Finder(spoken)
        self._unspoken = _Finder(self.texts - spoken) if spoken else self._every

    def split(self, text: str, *, is_spoken: bool = False) -> ChatText:
        """Split a text; everything that looks like a mark becomes one.

        Args:
            is_spoken: the text is an assistant's own: only spoken marks count.
        """
        return ChatText((self._spoken if is_spoken else self._every).split(text))

    def broken(self, text: str, sign: str, *, is_spoken: bool = False) -> str:
        """Insert the sign into each mark, and at ends of the text that could be part of a mark.

        Args:
            is_spoken: the text is an assistant's own: spoken marks stay whole.
        """
        return (self._unspoken if is_spoken else self._every).broken(text, sign)


class _Finder:
    def __init__(self, marks: frozenset[str]) -> None:
        nothing = "(?!)"
        pattern = _alternatives(sorted(marks)) if marks else nothing
        self._whole = re.compile(f"({pattern})")
        self._sorted = sorted(marks)
        self._mirrored = sorted(mark[::-1] for mark in marks)
        self._longest = max(map(len, marks), default=1)
        self._first = re.compile(f"[{re.escape(''.join({mark[0] for mark in marks}))}]" if marks else nothing)
        self._last = re.compile(f"[{re.escape(''.join({mark[-1] for mark in marks}))}]" if marks else nothing)

    def split(self, text: str) -> tuple[str, ...]:
        return tuple(self._whole.split(text))

    def broken(self, text: str, sign: str) -> str:
        starts, at = [], -1
        while found := self._whole.search(text, at + 1):  # marks may overlap
            starts.append(at := found.start())
        if starts:
            ends = [*(start + 1 for start in starts), len(text)]
            text = sign.join(text[start:end] for start, end in pairwise([0, *ends]))
        room = self._longest - 1
        if self._last.search(text, 0, room):
            text = sign + text if _ends_with_beginning(text[room - 1 :: -1], self._mirrored) else text
        if self._first.search(text, max(len(text) - room, 0)):
            text = text + sign if _ends_with_beginning(text[-room:], self._sorted) else text
        return text


def _ends_with_beginning(text: str, marks: Sequence[str]) -> bool:
    """Return True if a suffix of the text is a prefix of one of the sorted marks."""
    for at in range(len(text)):
        index = bisect_left(marks, text[at:])
        if index < len(marks) and marks[index].startswith(text[at:]):
            return True
    return False


def _is_mark(text: str) -> bool:
    return 1 < len(text) <= MAX_MARK_CHARS and not text.isspace()


def _alternatives(texts: Sequence[str], depth: int = 0) -> str:
    """Return a regular expression of sorted texts, the longest first, with common prefixes factored out."""
    if depth > MAX_NESTED_MARKS:
        return f"(?:{'|'.join(map(re.escape, reversed(texts)))})"
    is_optional = texts[0] == ""
    branches, start = [], int(is_optional)
    while start < len(texts):
        end = start
        while end < len(texts) and texts[end][0] == texts[start][0]:
            end += 1
        shared = _shared_beginning(texts[start], texts[end - 1])
        rest = [text[len(shared) :] for text in texts[start:end]]
        more = _alternatives(rest, depth + 1) if len(rest) > 1 else ""
        branches.append(re.escape(shared) + more)
        start = end
    return f"(?:{'|'.join(branches)}){'?' * is_optional}"


def _shared_beginning(first: str, last: str) -> str:
    """Return the common prefix of the sorted texts from `first` to `last`."""
    length = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), None)
    return first[:length] if length is not None else min(first, last, key=len)


class Shield:
    """Breaks the marks in the input of one chat template, and reads the template's output.

    Args:
        values: JSON with all texts that will be broken.

    Raise ValueError if the texts contain every possible sign, or nest too deep.
    """

    def __init__(self, marks: Marks, *values: object) -> None:
        self._marks = marks
        text = "\n".join(_texts(values))
        free = (sign for sign in SIGNS if sign not in text and _escaped(sign) not in text)
        self._sign, self._end = next(free, ""), next(free, "")
        if not self._end:
            raise ValueError("the chat holds every private character of Unicode: remove them")

    def broken(self, value: Any, *, is_spoken: bool = False) -> Any:
        """Return JSON with broken marks; `is_spoken`: of texts that are an assistant's own, see `Marks`."""
        if isinstance(value, str):
            return self._marks.broken(value, self._sign, is_spoken=is_spoken)
        if isinstance(value, Mapping):
            return {self.broken(key): self.broken(item) for key, item in value.items()}
        return [self.broken(item) for item in value] if isinstance(value, list | tuple) else value

    def messages(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with broken marks, except the spoken marks of assistant messages."""
        return [
            {
                key: self.broken(value, is_spoken=key == "content" and message.get("role") == "assistant")
                for key, value in message.items()
            }
            for message in messages
        ]

    def ended(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Append a sign to the message's text; `read` cuts there."""
        return {**message, "content": (message.get("content") or "") + self._end}

    def read(self, text: str, *, is_cut: bool = False) -> ChatText:
        """Return the template's output; unbroken marks are its own.

        Args:
            is_cut: drop the text after an `ended` message.

        Raise ValueError if the template has dropped the end of that message.
        """
        for sign in (self._sign, self._end):
            text = text.replace(_escaped(sign), sign)
        if is_cut:
            text, end, _ = text.rpartition(self._end)
            if not end:
                raise ValueError("the chat template changes the text of the last message")
        text = text.replace(self._end, "")
        pieces = self._marks.split(text).pieces
        return ChatText(tuple(piece.replace(self._sign, "") for piece in pieces))


def _texts(value: object, depth: int = 0) -> Iterator[str]:
    if depth > MAX_NESTED_JSON:
        raise ValueError(f"the chat holds JSON of more than {MAX_NESTED_JSON} levels: make it flatter")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()], depth)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, depth + 1)


def _escaped(sign: str) -> str:
    """Return the sign's escape sequence in JSON and in Python source."""
    return f"\\u{ord(sign):04x}"
