"""Tokens to text, one at a time, with stop strings."""

from collections.abc import Sequence
from typing import Protocol


class TextStream(Protocol):
    """Decodes one request's tokens incrementally (`models.tokenizer`)."""

    def step(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is unfinished."""
        ...

    def flush(self) -> str:
        """Return what an unfinished character left behind."""
        ...


class IncrementalText:
    """The output text of one request: grows with every token, ends before a stop string.

    Text that may turn out to be the beginning of a stop string is held back until that is decided, so
    that a streaming client never sees a part of it.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str]) -> None:
        self._stream = stream
        self._stop = tuple(stop)
        self._ready = ""  # to be handed out by take()
        self._held = ""  # behind it: what a stop string may still claim
        self._is_cut = False  # a stop string was found
        self._undecoded: list[int] = []  # tokens whose text nobody needed yet

    def push(self, token_id: int) -> bool:
        """Add one token; return True when a stop string is complete, which cuts the text before it."""
        if not self._stop:
            self._undecoded.append(token_id)
            return False
        return self._append(self._stream.step(token_id))

    def finish(self) -> bool:
        """Release everything held back; return True when the last characters completed a stop string."""
        if self._is_cut:
            return False
        self._decode()
        stopped = self._append(self._stream.flush())
        self._release(len(self._held))
        return stopped

    def take(self) -> str:
        """Return the text that became certain since the last call."""
        self._decode()
        text, self._ready = self._ready, ""
        return text

    def _decode(self) -> None:
        for token_id in self._undecoded:
            self._append(self._stream.step(token_id))
        self._undecoded.clear()

    def _append(self, piece: str) -> bool:
        if not piece:
            return False
        self._held += piece
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self._release(min(found))
            self._held = ""
            self._is_cut = True
            return True
        self._release(len(self._held) - self._longest_open_stop())
        return False

    def _release(self, count: int) -> None:
        self._ready += self._held[:count]
        self._held = self._held[count:]

    def _longest_open_stop(self) -> int:
        """Length of the longest suffix of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
