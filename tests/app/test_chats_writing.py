"""A growing answer: its thoughts, its figures, and continuation after a cut."""

import asyncio

import pytest

from neo_desktop.app.chats.messages import Message
from neo_desktop.app.chats.writing import GrowingAnswer
from neo_desktop.app.engines.generation import Generation
from neo_desktop.app.generate.conversation import Begun, Prepared, as_written
from neo_desktop.app.generate.outputs import Outputs
from neo_desktop.app.generate.tools import HERMES
from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.request import FinishReason, RequestOutput
from neo_desktop.models.marks import ChatText
from neo_desktop.models.thoughts import is_open
from neo_desktop.models.tokenizer import ByteTokenizer

EMPTY = Message("a", "chat", "q", "assistant", 0.0, "", state="waiting")


class Writer:
    """A model that writes one answer piece by piece."""

    def __init__(
        self, message: Message, prompt: str = "<user>", model: str = "a-model", prompt_tokens: int = 5
    ):
        begun = Begun(message.thought, message.text)
        is_thinking = is_open(prompt)
        self.begun = as_written(begun, is_thinking)
        prepared = Prepared(ChatText((prompt,)), HERMES, (), is_thinking, self.begun, False, True, None, None)
        self._generation = Generation(["1"], 1, lambda _: None)
        self._outputs = Outputs(self._generation, ByteTokenizer(), prepared, "")
        self._prompt_tokens, self._num_tokens = prompt_tokens, 0
        self.answer = GrowingAnswer(message)
        self.answer.begin(self._outputs, model)

    def write(self, text: str, end: FinishReason | None = None) -> None:
        self._num_tokens += 1
        output = ("1", 0, text, (SampledToken(1),), end, None, self._prompt_tokens, 0, self._num_tokens)
        self._generation.put(RequestOutput(*output))

        async def read() -> None:
            self.answer.add(await anext(aiter(self._outputs)))

        asyncio.run(read())


def grown(message: Message, prompt: str, pieces: list[str]) -> GrowingAnswer:
    writer = Writer(message, prompt)
    for piece in pieces:
        writer.write(piece)
    return writer.answer


def test_thoughts_are_kept_apart_and_timed() -> None:
    writer = Writer(EMPTY)
    answer = writer.answer
    for piece in ("<thi", "nk>\nlet me ", "see"):
        writer.write(piece)
    assert (answer.message.thought, answer.message.text) == ("let me see", "")
    assert answer.message.state == "streaming"
    first_s = answer.message.thought_s
    assert first_s is not None
    writer.write("\n</think>\n\nIt is")
    thought_s = answer.message.thought_s
    assert thought_s is not None
    assert thought_s > first_s
    writer.write(" so.", end=FinishReason.STOP)
    answer.end("done")
    message = answer.message
    assert (message.thought, message.text, message.thought_s) == ("let me see\n", "It is so.", thought_s)
    assert message.figures is not None
    assert (message.figures.output_tokens, message.figures.prompt_tokens) == (5, 5)
    assert message.figures.finish_reason == "stop"


def test_an_answer_without_thoughts_took_no_time_for_them() -> None:
    answer = grown(EMPTY, "<user>", ["a", " < b"])
    answer.end("done")
    assert (answer.message.text, answer.message.thought_s) == ("a < b", None)


@pytest.mark.parametrize("prompt", ["<user>hi<assistant>", "<user>hi<assistant><think>\n"])
@pytest.mark.parametrize("num_pieces", range(7))
def test_what_was_cut_anywhere_goes_on_as_if_it_had_not_been(prompt: str, num_pieces: int) -> None:
    pieces = ["let me ", "see", "\n", "</think>\n\n", "It ", "is so."]
    if not prompt.endswith("<think>\n"):
        pieces[0] = "<think>\n" + pieces[0]
    begun = grown(EMPTY, prompt, pieces[:num_pieces])
    begun.end("cut")
    resumed = Writer(begun.message, prompt)
    if num_pieces != 4:  # a closing mark without an answer is left out; the model writes it again
        assert resumed.begun == "".join(pieces[:num_pieces])
    rest = pieces[num_pieces:] if num_pieces != 4 else pieces[3:]
    for piece in rest:
        resumed.write(piece)
    resumed.answer.end("done")
    message = resumed.answer.message
    assert (message.thought, message.text) == ("let me see\n", "It is so.")


def test_going_on_counts_all_tokens_of_the_answer() -> None:
    begun = grown(EMPTY, "<user>", ["a", "b", "c"])  # 5 tokens of prompt
    begun.end("stopped")
    resumed = Writer(begun.message, model="another-model", prompt_tokens=8)
    resumed.write("d")
    resumed.write("e", end=FinishReason.LENGTH)
    resumed.answer.end("done")
    figures, earlier = resumed.answer.message.figures, begun.message.figures
    assert figures is not None
    assert earlier is not None
    assert (figures.prompt_tokens, figures.output_tokens) == (5, 5)
    assert figures.first_token_s == earlier.first_token_s
    assert (figures.model, figures.finish_reason) == ("another-model", "length")
