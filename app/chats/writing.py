"""One answer while it is being written: its text and thought, and how fast they come."""

import time
from collections.abc import Iterable
from dataclasses import replace

from neo_desktop.app.chats.messages import Figures, Message, State
from neo_desktop.app.generation import Generation
from neo_desktop.engine.request import RequestOutput
from neo_desktop.models.marks import ChatText, Marks
from neo_desktop.models.thoughts import CLOSING, OPENING, Part, Thoughts, ThoughtSplitter, is_open


class GrowingAnswer:
    """Takes in the engine's outputs; `message` is the answer as far as it has come.

    Args:
        message: without text, or what an earlier run has left, which is gone on with.
    """

    def __init__(self, message: Message) -> None:
        self.message = message
        self.saved = message
        self.generation: Generation | None = None  # once the engine has accepted it
        self._earlier = message.figures or Figures()
        self._earlier_thought_s = message.thought_s
        self._splitter = ThoughtSplitter()
        self.thoughts: Thoughts = "possible"  # in what the engine will write
        # On the clock of time.perf_counter:
        self._asked_s = time.perf_counter()
        self._thinks_since_s: float | None = None  # None: it does not think
        self._first_s: float | None = None  # the first token
        self._last_s = 0.0  # the last one
        self._num_tokens = 0  # of this run

    def begin(self, prompt: ChatText, model: str, marks: Marks) -> ChatText:
        """Return the prompt to submit: the chat as the template wrote it, then what is there already.

        Args:
            prompt: the chat.
            model: its name.
            marks: of its vocabulary; what is there already may hold those of thoughts and calls.
        """
        is_thinking = is_open(str(prompt))
        written = _as_written(self.message, is_thinking)
        self._splitter = ThoughtSplitter(is_thinking)
        # What comes depends on what is there; the beginning of a mark at its end is held back again.
        parts = list(self._splitter.feed(written)) if written else []
        self.thoughts = "open" if self._splitter.is_thinking else "possible"
        figures = replace(self._earlier, model=model, finish_reason=None, tokens_per_s=None)
        self.message = replace(
            self.message,
            thought="".join(text for kind, text in parts if kind == "thought"),
            text="".join(text for kind, text in parts if kind == "answer"),
            figures=figures,
        )
        return prompt + marks.split(written, is_spoken=True)

    def add(self, output: RequestOutput) -> None:
        """Take in what one iteration brought."""
        now_s = time.perf_counter()
        if output.tokens:
            self._first_s = self._first_s or now_s
            self._last_s = now_s
            self._num_tokens += len(output.tokens)
        self._take(self._splitter.feed(output.text), now_s)
        self.message = replace(self.message, state="streaming", figures=self._figures(output))

    def end(self, state: State, error: str | None = None) -> None:
        """Write no more; the engine is told at once."""
        if self.generation is not None:
            self.generation.close()
        self._take(self._splitter.flush(), time.perf_counter())
        self.message = replace(self.message, state=state, error=error)

    def _take(self, parts: Iterable[Part], now_s: float) -> None:
        thought, text, thought_s = self.message.thought, self.message.text, self.message.thought_s
        for kind, piece in parts:
            if kind == "thought":
                self._thinks_since_s = self._thinks_since_s or self._first_s or now_s
                thought += piece
            else:
                text += piece
        if self._thinks_since_s is not None:
            thought_s = (self._earlier_thought_s or 0.0) + now_s - self._thinks_since_s
            if text:
                self._thinks_since_s = None
        self.message = replace(self.message, thought=thought, text=text, thought_s=thought_s)

    def _figures(self, output: RequestOutput) -> Figures:
        first_token_s = self._earlier.first_token_s
        tokens_per_s = None
        if self._first_s is not None:
            first_token_s = self._first_s - self._asked_s if first_token_s is None else first_token_s
            if self._num_tokens > 1 and self._last_s > self._first_s:
                tokens_per_s = (self._num_tokens - 1) / (self._last_s - self._first_s)
        # Of an answer that is gone on with, the engine counts what was there to the prompt.
        prompt_tokens = self._earlier.prompt_tokens or output.num_prompt_tokens
        num_tokens = output.num_prompt_tokens + output.num_output_tokens
        return Figures(
            first_token_s=first_token_s,
            tokens_per_s=tokens_per_s,
            output_tokens=num_tokens - prompt_tokens,
            prompt_tokens=prompt_tokens,
            finish_reason=None if output.finish_reason is None else output.finish_reason.value,
            model=self.message.figures.model if self.message.figures else None,
        )


def _as_written(message: Message, is_open: bool) -> str:
    """The text of the model that makes this message; white space around the marks is as models write it."""
    if not message.thought:
        return f"{CLOSING}\n\n{message.text}" if is_open and message.text else message.text
    opening = "" if is_open else f"{OPENING}\n"
    return opening + message.thought + (f"{CLOSING}\n\n{message.text}" if message.text else "")
