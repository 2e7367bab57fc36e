"""Translates gpt-oss's output format (OpenAI's harmony) to the marks that other models use.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>

becomes `<think>thought</think>answer`. The header between two messages names speaker, recipient and channel;
it is not text. A message to a function is a tool call:

    <|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>

becomes `<tool_call>add{"a": 1}`. Arguments that are not a JSON object become one: `{"arguments": [1, 2]}`.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neo_desktop.models.tokenizer import DecodeStream

OPENING, CLOSING, CALL = "<think>", "</think>", "<tool_call>"
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MARKS = (START, CHANNEL, MESSAGE, END)
"""Special tokens; a vocabulary with all four belongs to a harmony model."""
SIGN = "\ufdd0"
"""Precedes `<think>` and `</think>` in a chat's answer, so that ordinary text cannot be mistaken for them."""
TO_FUNCTION = "to=functions."
_THOUGHTS = "analysis"


def special_of(tokens: Mapping[int, str]) -> Mapping[int, str] | None:
    """Return the special tokens of a harmony vocabulary; None for other vocabularies."""
    return tokens if set(MARKS).issubset(tokens.values()) else None


class HarmonyStream:
    """A stream of text that marks thoughts and calls as other models do.

    Args:
        text: detokenises the tokens that are not special.
        special: special token -> its text, which may be one of `MARKS`. None is output as text: in a header
            they separate words.
        is_signed: put `SIGN` before the marks of thoughts.
    """

    def __init__(self, text: "DecodeStream", special: Mapping[int, str], *, is_signed: bool = False) -> None:
        self._text, self._special = text, special
        self._sign = SIGN * is_signed
        self._header: str | None = None  # header text so far; None: inside a message
        self._beginning: str | None = ""  # held back: the prompt may have opened a header; None: decided
        self._is_thought = False
        self._arguments: str | None = None  # of a call, held back: may not be an object; None: decided
        self._is_call = False

    @property
    def is_answer(self) -> bool:
        """True for text that the user should see: outside headers, thoughts and calls."""
        return self._header is None and not self._is_thought and not self._is_call

    @property
    def is_header(self) -> bool:
        """True between two messages."""
        return self._header is not None

    def step(self, token_id: int) -> str:
        mark = self._special.get(token_id)
        if mark is None:
            return self._kept(self._text.step(token_id))
        before = self._kept(self._text.flush())
        if mark not in MARKS and (self._header or self._beginning):
            return before + self._kept(" ")
        before += self._ended()
        if mark in MARKS and self._beginning is not None:
            self._header, self._beginning = self._beginning, None
        if mark == START:
            self._header = ""
        elif mark == CHANNEL:
            self._header = f"{self._header or ''} "
        elif mark == MESSAGE:
            header, self._header = self._header or "", None
            return before + self._begun(header.replace("<|", " <|").split())
        return before

    def flush(self) -> str:
        text = self._kept(self._text.flush())
        held, self._beginning = self._beginning or "", None
        return held + text + self._ended()

    def _begun(self, header: list[str]) -> str:
        """Start a message; return the marks that its header implies."""
        called = next((word for word in header if word.startswith(TO_FUNCTION)), None)
        was_thought, self._is_thought = self._is_thought, called is None and _THOUGHTS in header
        mark = ""
        if called is not None:
            self._is_call, self._arguments = True, ""
            mark = CALL + called.removeprefix(TO_FUNCTION)
        if was_thought != self._is_thought:
            mark = self._sign + (OPENING if self._is_thought else CLOSING) + mark
        return mark

    def _ended(self) -> str:
        """End the message; return the held-back arguments as a JSON object."""
        held, self._arguments, self._is_call = self._arguments, None, False
        if held is None:
            return ""
        try:
            value = json.loads(held) if held.strip() else None
        except (ValueError, RecursionError):
            value = held
        return json.dumps({} if value is None else {"arguments": value}, ensure_ascii=False)

    def _kept(self, text: str) -> str:
        if self._header is not None:
            self._header += text
            return ""
        if self._arguments is not None:
            self._arguments += text
            if not self._arguments.lstrip().startswith("{"):
                return ""
            text, self._arguments = self._arguments, None
            return text
        if self._beginning is None:
            return text
        # The prompt ends with the speaker. The recipient may come first.
        begun = (self._beginning + text).lstrip()
        if begun.startswith(TO_FUNCTION) or TO_FUNCTION.startswith(begun):
            self._beginning += text
            return ""
        text, self._beginning = self._beginning + text, None
        return text
