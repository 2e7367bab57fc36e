"""A growing text, split into the thought that a model writes first and its answer."""

import collections
from collections.abc import Iterator
from typing import Literal

from neo_desktop.models import harmony

OPENING, CLOSING, SIGN = harmony.OPENING, harmony.CLOSING, harmony.SIGN

Part = tuple[Literal["thought", "answer"], str]
Thoughts = Literal["possible", "open"]
"""Of a chat's answer: it may begin with a thought, or the prompt has begun one."""
AnyPart = tuple[Literal["thought", "answer", "mark"], str]


class ThoughtSplitter:
    """Tells what stands between `<think>` and `</think>` at the beginning of a text from what follows.

        start ──"<think>"──→ thought ──"</think>"──→ answer
          └────anything else─────────────────────────↗

    A mark that may have begun is held back until the next piece tells; so is white space before `<think>`.
    White space right after a mark is dropped. However a text is cut, the parts are the same in sum.

    Marks that `harmony.HarmonyStream` has signed are no text of the model: signed ones may come anywhere, and
    a thought with a signed mark before it ends at a signed mark alone.

    Args:
        is_open: the prompt has ended with `<think>`, so the text begins within the thought.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._state: Literal["start", "thought", "answer"] = "thought" if is_open else "start"
        self._held = ""
        self._drops_space = is_open  # a mark came last
        self._closing = CLOSING

    @property
    def is_thinking(self) -> bool:
        """True within a thought."""
        return self._state == "thought"

    def feed(self, text: str) -> Iterator[Part]:
        """Take in the next piece; yields what is certain by now, never empty texts."""
        for kind, part in self.split(text):
            if kind != "mark":
                yield kind, part

    def split(self, text: str) -> Iterator[AnyPart]:
        """Like `feed`, with marks and white space after them: the parts are the whole text."""
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
                before, found, _ = self._held.partition(mark)
                if not found:
                    before, _ = split_off_beginning(self._held, mark)
                self._held = self._held[len(before) :]
                if before:
                    yield kind, before
                if not found:
                    return
                yield self._take_mark(len(mark), mark)

    def flush(self) -> Iterator[Part]:
        """End the text: yields what was held back."""
        held, self._held = self._held, ""
        if held:
            yield ("thought" if self._state == "thought" else "answer"), held

    def _take_mark(self, num_chars: int, mark: str) -> AnyPart:
        """Use up a mark, with the white space before it that counts to it."""
        part, self._held = self._held[:num_chars], self._held[num_chars:]
        self._state = "answer" if self._state == "thought" else "thought"
        self._closing = SIGN + CLOSING if mark.startswith(SIGN) else CLOSING
        self._drops_space = True
        return "mark", part


def is_open(prompt: str, begun: str = "") -> bool:
    """True if the next token belongs to a thought.

    Args:
        prompt: all text before that token.
        begun: the text of the answer that the prompt ends with.
    """
    return ends_thinking(begun) or prompt.rstrip().endswith(OPENING)


def ends_thinking(text: str, is_open: bool = False) -> bool:
    """Return True if a text of the model ends within a thought; see `ThoughtSplitter`."""
    splitter = ThoughtSplitter(is_open)
    collections.deque(splitter.feed(text), maxlen=0)
    return splitter.is_thinking


def split_off_beginning(text: str, mark: str) -> tuple[str, str]:
    """Split off the longest end of a text with which the mark may have begun."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return text[:-length], text[-length:]
    return text, ""
