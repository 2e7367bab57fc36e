"""The form in which gpt-oss writes (OpenAI calls it harmony), told as other models tell thoughts and answers.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>

becomes `<think>thought</think>answer`. What stands between a message and the next says who speaks, to whom
and on which channel; it is no text. A message to a function is a call of it:

    <|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>

becomes `<tool_call>add{"a": 1}`.
"""

from collections.abc import Mapping
from typing import Protocol

OPENING, CLOSING, CALL = "<think>", "</think>", "<tool_call>"
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MARKS = (START, CHANNEL, MESSAGE, END)
"""Special tokens; a vocabulary that has all of them is one of such models."""
TO_FUNCTION = "to=functions."
_THOUGHTS = "analysis"


class Stream(Protocol):
    """See `tokenizer.DecodeStream`."""

    def step(self, token_id: int) -> str:
        """Add a token; return the text that is complete now."""

    def flush(self) -> str:
        """Return the text still held back."""


class HarmonyStream:
    """A stream of text in which thoughts and calls are marked as other models mark them.

    Args:
        text: makes text of what is no mark.
        marks: token -> which of `MARKS` it is.
    """

    def __init__(self, text: Stream, marks: Mapping[int, str]) -> None:
        self._text, self._marks = text, marks
        self._header: str | None = None  # so far; None: within a message
        self._beginning: str | None = ""  # held back: the prompt may have begun a header; None: decided
        self._is_thought = False

    def step(self, token_id: int) -> str:
        """See `Stream`."""
        mark = self._marks.get(token_id)
        if mark is None:
            return self._kept(self._text.step(token_id))
        before = self._kept(self._text.flush())
        if self._beginning is not None:
            self._header, self._beginning = self._beginning, None
        if mark == START:
            self._header = ""
        elif mark == CHANNEL:
            self._header = f"{self._header or ''} "
        elif mark == MESSAGE:
            header, self._header = self._header or "", None
            return before + self._begun(header.split())
        return before

    def flush(self) -> str:
        """See `Stream`."""
        text = self._kept(self._text.flush())
        held, self._beginning = self._beginning or "", None
        return held + text

    def _begun(self, header: list[str]) -> str:
        """Return what marks the message with such words before it."""
        called = next((word for word in header if word.startswith(TO_FUNCTION)), None)
        was_thought, self._is_thought = self._is_thought, called is None and _THOUGHTS in header
        mark = "" if called is None else CALL + called.removeprefix(TO_FUNCTION)
        if was_thought != self._is_thought:
            mark = (OPENING if self._is_thought else CLOSING) + mark
        return mark

    def _kept(self, text: str) -> str:
        if self._header is not None:
            self._header += text
            return ""
        if self._beginning is None:
            return text
        # The prompt ends with who speaks; to whom may come first.
        begun = (self._beginning + text).lstrip()
        if begun.startswith(TO_FUNCTION) or TO_FUNCTION.startswith(begun):
            self._beginning += text
            return ""
        text, self._beginning = self._beginning + text, None
        return text
