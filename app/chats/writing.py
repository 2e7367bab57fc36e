"""One answer while it is being written: its text and thought, and how fast they come."""

import time
from collections.abc import Iterable
from dataclasses import replace

from neo_desktop.app.chats.messages import Figures, Message, State
from neo_desktop.app.generate.calls import Piece, Text, Thought
from neo_desktop.app.generate.outputs import Outputs, Step


class GrowingAnswer:
    """Takes in the engine's outputs; `message` is the answer as far as it has come, in any run."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.saved = message
        self._outputs: Outputs | None = None  # once the engine has accepted it
        self._earlier = message.figures or Figures()
        self._earlier_thought_s = message.thought_s
        # On the clock of time.perf_counter:
        self._asked_s = time.perf_counter()
        self._thinks_since_s: float | None = None  # None: it does not think
        self._first_s: float | None = None  # the first token
        self._last_s = 0.0  # the last one
        self._num_tokens = 0  # of this run

    def begin(self, outputs: Outputs, model: str) -> None:
        """Take the outputs that the engine will write, by the model of this name."""
        self._outputs = outputs
        figures = replace(self._earlier, model=model, finish_reason=None, tokens_per_s=None)
        text = "".join(piece.text for piece in outputs.begun if isinstance(piece, Text))
        thought = "".join(piece.text for piece in outputs.begun if isinstance(piece, Thought))
        self.message = replace(self.message, thought=thought, text=text, figures=figures)

    def add(self, step: Step) -> None:
        now_s = time.perf_counter()
        if step.tokens:
            self._first_s = self._first_s or now_s
            self._last_s = now_s
            self._num_tokens += len(step.tokens)
        self._take(step.pieces, now_s)
        self.message = replace(self.message, state="streaming", figures=self._figures(step))

    def end(self, state: State, error: str | None = None) -> None:
        """Stop writing, and abort the request at once."""
        if self._outputs is not None:
            self._outputs.close()
            self._take(self._outputs.flush(), time.perf_counter())
        self.message = replace(self.message, state=state, error=error)

    def _take(self, pieces: Iterable[Piece], now_s: float) -> None:
        thought, text, thought_s = self.message.thought, self.message.text, self.message.thought_s
        for piece in pieces:
            if isinstance(piece, Thought):
                self._thinks_since_s = self._thinks_since_s or self._first_s or now_s
                thought += piece.text
            elif isinstance(piece, Text):
                text += piece.text
        if self._thinks_since_s is not None:
            thought_s = (self._earlier_thought_s or 0.0) + now_s - self._thinks_since_s
            if text:
                self._thinks_since_s = None
        self.message = replace(self.message, thought=thought, text=text, thought_s=thought_s)

    def _figures(self, step: Step) -> Figures:
        assert self._outputs is not None
        usage = self._outputs.usage
        first_token_s = self._earlier.first_token_s
        tokens_per_s = None
        if self._first_s is not None:
            first_token_s = self._first_s - self._asked_s if first_token_s is None else first_token_s
            if self._num_tokens > 1 and self._last_s > self._first_s:
                tokens_per_s = (self._num_tokens - 1) / (self._last_s - self._first_s)
        # Of an answer that is gone on with, the engine counts what was there to the prompt.
        prompt_tokens = self._earlier.prompt_tokens or usage.num_prompt_tokens
        num_tokens = usage.num_prompt_tokens + usage.num_output_tokens
        return Figures(
            first_token_s=first_token_s,
            tokens_per_s=tokens_per_s,
            output_tokens=num_tokens - prompt_tokens,
            prompt_tokens=prompt_tokens,
            finish_reason=step.end,
            model=self.message.figures.model if self.message.figures else None,
        )
