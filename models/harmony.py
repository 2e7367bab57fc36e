"""The form in which gpt-oss writes (OpenAI calls it harmony), told as other models tell thoughts and answers.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>

becomes `<think>thought</think>answer`. What stands between a message and the next says who speaks and on
which channel; it is no text.
"""

from collections.abc import Mapping
from typing import Protocol

OPENING, CLOSING = "<think>", "</think>"
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MARKS = (START, CHANNEL, MESSAGE, END)
"""Special tokens; a vocabulary that has all of them is one of such models."""
_THOUGHTS = "analysis"


class Stream(Protocol):
    """See `tokenizer.DecodeStream`."""

    def step(self, token_id: int) -> str:
        """Add a token; return the text that is complete now."""

    def flush(self) -> str:
        """Return the text still held back."""


class HarmonyStream:
    """A stream of text in which thoughts are marked as other models mark them.

    Args:
        text: makes text of what is no mark.
        marks: token -> which of `MARKS` it is.
    """

    def __init__(self, text: Stream, marks: Mapping[int, str]) -> None:
        self._text, self._marks = text, marks
        self._header: str | None = None  # so far; None: within a message
        self._is_thought = False

    def step(self, token_id: int) -> str:
        """See `Stream`."""
        mark = self._marks.get(token_id)
        if mark is None:
            return self._kept(self._text.step(token_id))
        before = self._kept(self._text.flush())
        if mark in (START, CHANNEL):
            self._header = ""
        elif mark == MESSAGE:
            header, self._header = self._header or "", None
            was_thought, self._is_thought = self._is_thought, header.strip() == _THOUGHTS
            if was_thought != self._is_thought:
                return before + (OPENING if self._is_thought else CLOSING)
        return before

    def flush(self) -> str:
        """See `Stream`."""
        return self._kept(self._text.flush())

    def _kept(self, text: str) -> str:
        if self._header is None:
            return text
        self._header += text
        return ""
