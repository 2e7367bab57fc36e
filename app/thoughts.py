"""A growing text, split into the thought that a model writes first and its answer."""

from collections.abc import Iterator
from typing import Literal

from neo_desktop.models import harmony

OPENING, CLOSING = harmony.OPENING, harmony.CLOSING

Part = tuple[Literal["thought", "answer"], str]


class ThoughtSplitter:
    """Tells what stands between `<think>` and `</think>` at the beginning of a text from what follows.

        start ──"<think>"──→ thought ──"</think>"──→ answer
          └────anything else─────────────────────────↗

    A mark that may have begun is held back until the next piece tells; so is white space before `<think>`.
    White space right after a mark is dropped. However a text is cut, the parts are the same in sum.

    Args:
        is_open: the prompt has ended with `<think>`, so the text begins within the thought.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._state: Literal["start", "thought", "answer"] = "thought" if is_open else "start"
        self._held = ""
        self._drops_space = is_open  # a mark came last

    def feed(self, text: str) -> Iterator[Part]:
        """Take in the next piece; yields what is certain by now, never empty texts."""
        text, self._held = self._held + text, ""
        if self._state == "start":
            begun = text.lstrip()
            if begun.startswith(OPENING):
                self._state, self._drops_space, text = "thought", True, begun.removeprefix(OPENING)
            elif OPENING.startswith(begun):
                self._held = text
                return
            else:
                self._state = "answer"
        if self._state == "thought":
            text = self._without_space(text)
            thought, mark, answer = text.partition(CLOSING)
            if not mark:
                thought, self._held = split_off_beginning(text, CLOSING)
            if thought:
                yield "thought", thought
            if not mark:
                return
            self._state, self._drops_space, text = "answer", True, answer
        text = self._without_space(text)
        if text:
            yield "answer", text

    def flush(self) -> Iterator[Part]:
        """End the text: yields what was held back."""
        held, self._held = self._held, ""
        if held:
            yield ("thought" if self._state == "thought" else "answer"), held

    def _without_space(self, text: str) -> str:
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        return text


def split_off_beginning(text: str, mark: str) -> tuple[str, str]:
    """Split off the longest end of a text with which the mark may have begun."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return text[:-length], text[-length:]
    return text, ""
