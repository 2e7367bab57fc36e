"""Splits a streamed text into the thought that a model writes first, and its answer."""

import collections
from collections.abc import Iterator
from typing import Literal

from neo_desktop.models import harmony

OPENING, CLOSING, SIGN = harmony.OPENING, harmony.CLOSING, harmony.SIGN

Part = tuple[Literal["thought", "answer"], str]
Thoughts = Literal["possible", "open"]
"""State of a chat's answer: it may start with a thought, or the prompt has opened one."""
AnyPart = tuple[Literal["thought", "answer", "mark"], str]


class ThoughtSplitter:
    """Separates the text between `<think>` and `</think>` at the start from the rest.

            start ──"<think>"──→ thought ──"</think>"──→ answer
              └────anything else─────────────────────────↗

    Text that may be the start of a mark is held back until the next piece decides, as is white space before
    `<think>`. White space right after a mark is dropped. The concatenated parts do not depend on the division
    of the text into pieces.

    Marks signed by `harmony.HarmonyStream` are not the model's own text: they may occur anywhere, and a
    thought with a signed opening mark ends only at a signed closing mark.

    Args:
        is_open: the prompt has ended with `<think>`, so the text starts inside the thought.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._state: Literal["start", "thought", "answer"] = "thought" if is_open else "start"
        self._held = ""
        self._drops_space = is_open  # the last part was a mark
        self._closing = CLOSING

    @property
    def is_thinking(self) -> bool:
        return self._state == "thought"

    def feed(self, text: str) -> Iterator[Part]:
        """Add the next piece; yield the parts that are certain by now, never empty ones."""
        for kind, part in self.split(text):
            if kind != "mark":
                yield kind, part

    def split(self, text: str) -> Iterator[AnyPart]:
        """Feed a piece, and also yield marks with the white space after them: the parts make up the text."""
        self._held += text
        while self._held:
            if self._drops_space:
                rest = self._held.lstrip()
                if rest != self._held:
                    yield "mark", self._held[: len(self._held) - len(rest)]
                self._held, self._drops_space = rest, not rest
            elif self._state == "start":
                begun = self._held.lstrip()
                marks = (OPENING, SIGN + OPENING)
                if any(mark.startswith(begun) and mark != begun for mark in marks):
                    return
                mark = next((mark for mark in marks if begun.startswith(mark)), None)
                if mark is None:
                    self._state = "answer"
                else:
                    yield self._take_mark(len(self._held) - len(begun) + len(mark), mark)
            else:
                kind: Literal["thought", "answer"] = "thought" if self._state == "thought" else "answer"
                mark = self._closing if self._state == "thought" else SIGN + OPENING
                before, match, _ = self._held.partition(mark)
                if not match:
                    before, _ = split_off_beginning(self._held, mark)
                self._held = self._held[len(before) :]
                if before:
                    yield kind, before
                if not match:
                    return
                yield self._take_mark(len(mark), mark)

    def flush(self) -> Iterator[Part]:
        """End the text; yield the held-back rest."""
        held, self._held = self._held, ""
        if held:
            yield ("thought" if self._state == "thought" else "answer"), held

    def _take_mark(self, num_chars: int, mark: str) -> AnyPart:
        """Consume a mark, together with white space before `<think>`."""
        part, self._held = self._held[:num_chars], self._held[num_chars:]
        self._state = "answer" if self._state == "thought" else "thought"
        self._closing = SIGN + CLOSING if mark.startswith(SIGN) else CLOSING
        self._drops_space = True
        return "mark", part


def is_open(prompt: str, begun: str = "") -> bool:
    """Return True if the next token belongs to a thought; `begun`: start of the answer in the prompt."""
    return ends_thinking(begun) or prompt.rstrip().endswith(OPENING)


def ends_thinking(text: str, is_open: bool = False) -> bool:
    """Return True if a text of the model ends inside a thought; see `ThoughtSplitter`."""
    splitter = ThoughtSplitter(is_open)
    collections.deque(splitter.feed(text), maxlen=0)
    return splitter.is_thinking


def split_off_beginning(text: str, mark: str) -> tuple[str, str]:
    """Split off the longest suffix of the text that may be the start of the mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return text[:-length], text[-length:]
    return text, ""
