"""One answer while it is being written: its text, thought and calls, and how fast they come."""

import time
from collections.abc import Sequence
from dataclasses import replace

from neo_desktop.app.chats.messages import CallState, Figures, Message, Round, State, ToolCall
from neo_desktop.app.generate.calls import Piece, Thought
from neo_desktop.app.generate.outputs import Answer, Outputs, Step


class GrowingAnswer:
    """Takes in the engine's outputs; `message` is the answer as far as it has come, in any run."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.saved = message
        self._outputs: Outputs | None = None  # once the engine has accepted it
        self._answer = Answer()  # of this round
        self._earlier = message.figures or Figures()
        self._earlier_thought_s = message.thought_s
        self._earlier_output_tokens = 0  # of earlier rounds, that are now part of the prompt
        # On the clock of time.perf_counter:
        self._asked_s = time.perf_counter()
        self._thinks_since_s: float | None = None  # None: it does not think
        self._first_s: float | None = None  # the first token
        self._last_s = 0.0  # the last one
        self._num_tokens = 0  # of this run

    def begin(self, outputs: Outputs, model: str) -> None:
        """Take the outputs that the engine will write, by the model of this name."""
        self._outputs = outputs
        self._earlier = self.message.figures or Figures()
        self._earlier_thought_s = self.message.thought_s
        self._thinks_since_s, self._first_s, self._num_tokens = None, None, 0
        if self.message.rounds and not (self.message.thought or self.message.text):
            self._earlier_output_tokens = self._earlier.output_tokens or 0
            self._earlier = replace(self._earlier, prompt_tokens=None)
        figures = replace(self._earlier, model=model, finish_reason=None, tokens_per_s=None)
        self._answer = answer = Answer()
        answer.take(outputs.begun)
        self.message = replace(self.message, thought=answer.thought, text=answer.text, figures=figures)

    def add(self, step: Step) -> None:
        now_s = time.perf_counter()
        if step.tokens:
            self._first_s = self._first_s or now_s
            self._last_s = now_s
            self._num_tokens += len(step.tokens)
        self._take(step.pieces, now_s)
        self.message = replace(self.message, state="streaming", figures=self._figures(step))

    def end_round(self) -> bool:
        """Keep the calls that the model has written as a round; False: the answer is complete."""
        message = self.message
        if message.figures is None or message.figures.finish_reason != "tool_calls":
            return False
        calls = tuple(ToolCall(call.call_id, call.name, call.arguments) for call in self._answer.calls)
        ended = Round(calls, message.text, message.thought, message.thought_s)
        rounds = (*message.rounds, ended)
        self.message = replace(message, rounds=rounds, text="", thought="", thought_s=None)
        self._outputs = None
        return True

    @property
    def open_calls(self) -> list[tuple[int, ToolCall]]:
        """The calls of the last round that have no result, with their places in it."""
        calls = self.message.rounds[-1].calls if self.message.rounds else ()
        return [(place, call) for place, call in enumerate(calls) if call.result is None]

    def change_call(self, place: int, state: CallState, result: str | None = None, server: str = "") -> None:
        """Note what became of a call of the last round."""
        *before, last = self.message.rounds
        calls = list(last.calls)
        calls[place] = replace(calls[place], state=state, result=result, server=server or calls[place].server)
        self.message = replace(self.message, rounds=(*before, replace(last, calls=tuple(calls))))

    def end(self, state: State, error: str | None = None) -> None:
        """Stop writing, and abort the request at once."""
        if self._outputs is not None:
            self._outputs.close()
            self._take(self._outputs.flush(), time.perf_counter())
        self.message = replace(self.message, state=state, error=error)

    def _take(self, pieces: Sequence[Piece], now_s: float) -> None:
        answer, thought_s = self._answer, self.message.thought_s
        answer.take(pieces)
        if any(isinstance(piece, Thought) for piece in pieces):
            self._thinks_since_s = self._thinks_since_s or self._first_s or now_s
        if self._thinks_since_s is not None:
            thought_s = (self._earlier_thought_s or 0.0) + now_s - self._thinks_since_s
            if answer.text or answer.calls:
                self._thinks_since_s = None
        self.message = replace(self.message, thought=answer.thought, text=answer.text, thought_s=thought_s)

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
        prompt_tokens = self._earlier.prompt_tokens or usage.num_prompt_tokens - self._earlier_output_tokens
        num_tokens = usage.num_prompt_tokens + usage.num_output_tokens
        return Figures(
            first_token_s=first_token_s,
            tokens_per_s=tokens_per_s,
            output_tokens=num_tokens - prompt_tokens,
            prompt_tokens=prompt_tokens,
            finish_reason=step.end,
            model=self.message.figures.model if self.message.figures else None,
        )
