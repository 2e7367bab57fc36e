"""Incremental conversion of tokens to text, with stop strings."""

from collections.abc import Iterable, Sequence

from neo_desktop.models.harmony import HarmonyStream
from neo_desktop.models.thoughts import AnyPart, Thoughts, ThoughtSplitter
from neo_desktop.models.tokenizer import DecodeStream


class IncrementalText:
    """The output text of one request: it grows with every token, and ends before a stop string.

    Text that may be the start of a stop string is held back until that is decided, so that a streaming client
    never sees a part of one. Stop strings count only in the answer, not in thoughts and their delimiters.

    Args:
        thoughts: position of thoughts in the output; None: the output is all answer.
    """

    def __init__(
        self, stream: DecodeStream | HarmonyStream, stop: Sequence[str], thoughts: Thoughts | None = None
    ) -> None:
        self.stopped_by: str | None = None  # the stop string found
        self._stream = stream
        self._channels = stream if thoughts and isinstance(stream, HarmonyStream) else None
        self._thoughts = ThoughtSplitter(thoughts == "open") if thoughts and not self._channels else None
        self._stop = tuple(stop)
        self._ready = ""  # certain text for take()
        self._held = ""  # the text after it, which may belong to a stop string
        self._undecoded: list[int] = []  # tokens to decode on demand

    def push(self, token_id: int) -> bool:
        """Add one token; return True if it completes a stop string, which cuts off the text."""
        if not self._stop:
            self._undecoded.append(token_id)
            return False
        return self._step(token_id)

    def finish(self) -> bool:
        """Release held text; return True if the last characters completed a stop string."""
        if self.stopped_by is not None:
            return False
        self._decode()
        is_answer = self._is_answer
        stopped = self._append(self._stream.flush(), is_answer)
        if self._thoughts is not None and not stopped:
            stopped = self._take_parts(self._thoughts.flush())
        if not stopped:
            self._release(len(self._held))
        return stopped

    def take(self) -> str:
        """Return the text that became certain since the last call."""
        self._decode()
        text, self._ready = self._ready, ""
        return text

    @property
    def _is_answer(self) -> bool:
        return self._channels is None or self._channels.is_answer

    def _decode(self) -> None:
        for token_id in self._undecoded:
            self._step(token_id)
        self._undecoded.clear()

    def _step(self, token_id: int) -> bool:
        is_answer = self._is_answer  # a token that ends a message belongs to that message
        return self._append(self._stream.step(token_id), is_answer)

    def _append(self, piece: str, is_answer: bool) -> bool:
        if not piece:
            return False
        if not self._stop:
            self._ready += piece
            return False
        if self._thoughts is not None:
            return self._take_parts(self._thoughts.split(piece))
        return self._take_parts([("answer" if is_answer else "mark", piece)])

    def _take_parts(self, parts: Iterable[AnyPart]) -> bool:
        for kind, text in parts:
            if kind != "answer":
                self._release(len(self._held))
                self._ready += text
            elif self._search(text):
                return True
        return False

    def _search(self, text: str) -> bool:
        self._held += text
        matches = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if matches:
            at, self.stopped_by = min(matches, key=lambda each: each[0])
            self._release(at)
            self._held = ""
            return True
        self._release(len(self._held) - self._longest_open_stop())
        return False

    def _release(self, count: int) -> None:
        self._ready += self._held[:count]
        self._held = self._held[count:]

    def _longest_open_stop(self) -> int:
        """Return the length of the longest suffix of the held text that starts a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
