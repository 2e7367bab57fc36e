"""Ends a thought that has used up its tokens: its closing marks are forced."""

from collections import deque

import numpy as np

from neo_desktop.models import harmony
from neo_desktop.models.harmony import HarmonyStream
from neo_desktop.models.thoughts import CLOSING, ThoughtSplitter
from neo_desktop.models.tokenizer import Tokenizer

# The tokens of an iteration that runs are unknown when the next one is planned.
MOST_PENDING = 2


class ThoughtBudget:
    """The thoughts of one output: masks of allowed tokens once the budget is spent.

    A model with channels may choose its next channel after a forced end, except the one of thoughts.

    Args:
        num_tokens: tokens of thought before the end is forced.
        is_open: the prompt has opened a thought.
        num_bits: of a mask: the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, is_open: bool, num_bits: int) -> None:
        self._left, self._num_bits = num_tokens, num_bits
        self._stream = tokenizer.decode_stream(is_chat=True)
        self._splitter = ThoughtSplitter(is_open)
        self._has_channels = isinstance(self._stream, HarmonyStream)
        ends = f"{harmony.END}{harmony.START}assistant" if self._has_channels else CLOSING
        self._closing = tokenizer.encode(ends, add_special_tokens=False)
        self._forced: deque[int] = deque()
        self._is_header = False  # of a message after a forced end
        names = harmony.CHANNEL, harmony.MESSAGE, "analysis"
        self._marks = [tokenizer.encode(name, add_special_tokens=False)[0] for name in names]
        self._last: int | None = None
        self._check()

    @property
    def is_thinking(self) -> bool:
        """True while the output is a thought, or its end is forced."""
        return bool(self._forced) or self._is_header or self._splitter.is_thinking

    @property
    def is_due(self) -> bool:
        """True if one of the next tokens may be forced, so that choosing it requires all earlier ones."""
        is_near = self._splitter.is_thinking and self._left <= MOST_PENDING
        return bool(self._forced) or self._is_header or is_near

    def accept(self, token_id: int) -> None:
        self._last = token_id
        deque(self._splitter.feed(self._stream.step(token_id)), maxlen=0)
        if self._forced:
            self._forced.popleft()
            self._is_header = self._has_channels and not self._forced
        elif self._is_header:
            self._is_header = token_id != self._marks[1]
        elif self._splitter.is_thinking:
            self._left -= 1
            self._check()

    def _check(self) -> None:
        is_header = isinstance(self._stream, HarmonyStream) and self._stream.is_header
        if self._splitter.is_thinking and self._left <= 0 and not is_header:
            self._forced.extend(self._closing)

    def mask(self) -> bytes | None:
        """Return the allowed tokens as one bit each; None: all that a grammar allows."""
        if not self._forced and not (self._is_header and self._last == self._marks[0]):
            return None
        allowed = np.full(self._num_bits, not self._forced)
        allowed[self._forced[0] if self._forced else self._marks[2]] = bool(self._forced)
        return np.packbits(allowed, bitorder="little").tobytes()
