"""An answer as it grows: thoughts, figures, going on where it was cut."""

import pytest

from neo_desktop.app.chats.messages import Message
from neo_desktop.app.chats.writing import GrowingAnswer
from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.request import FinishReason, RequestOutput
from neo_desktop.models.marks import ChatText, Marks

MARKS = Marks(["<user>"], ["<think>", "</think>"])
EMPTY = Message("a", "chat", "q", "assistant", 0.0, "", state="waiting")


def output(text: str, num_tokens: int, prompt: int = 5, end: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("1", 0, text, (SampledToken(1),), end, None, prompt, 0, num_tokens)


def grown(message: Message, prompt: str, pieces: list[str]) -> GrowingAnswer:
    answer = GrowingAnswer(message)
    answer.begin(ChatText((prompt,)), "a-model", MARKS)
    for number, piece in enumerate(pieces, 1):
        answer.add(output(piece, number))
    return answer


def test_thoughts_are_kept_apart_and_timed() -> None:
    answer = grown(EMPTY, "<user>", ["<thi", "nk>\nlet me ", "see"])
    assert (answer.message.thought, answer.message.text) == ("let me see", "")
    assert answer.message.state == "streaming"
    first_s = answer.message.thought_s
    assert first_s is not None
    answer.add(output("\n</think>\n\nIt is", 4))
    thought_s = answer.message.thought_s
    assert thought_s is not None
    assert thought_s > first_s
    answer.add(output(" so.", 5, end=FinishReason.STOP))
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
    resumed = GrowingAnswer(begun.message)
    submitted = str(resumed.begin(ChatText((prompt,)), "a-model", MARKS))
    if num_pieces != 4:  # a mark that ends a thought without an answer behind it is left out; it comes again
        assert submitted == prompt + "".join(pieces[:num_pieces])
    rest = pieces[num_pieces:] if num_pieces != 4 else pieces[3:]
    for number, piece in enumerate(rest, 1):
        resumed.add(output(piece, number))
    resumed.end("done")
    assert (resumed.message.thought, resumed.message.text) == ("let me see\n", "It is so.")


def test_going_on_counts_all_tokens_of_the_answer() -> None:
    begun = grown(EMPTY, "<user>", ["a", "b", "c"])  # 5 tokens of prompt
    begun.end("stopped")
    resumed = GrowingAnswer(begun.message)
    resumed.begin(ChatText(("<user>",)), "another-model", MARKS)
    resumed.add(output("d", 1, prompt=8))
    resumed.add(output("e", 2, prompt=8, end=FinishReason.LENGTH))
    resumed.end("done")
    figures, earlier = resumed.message.figures, begun.message.figures
    assert figures is not None
    assert earlier is not None
    assert (figures.prompt_tokens, figures.output_tokens, figures.num_tokens) == (5, 5, 10)
    assert figures.first_token_s == earlier.first_token_s
    assert (figures.model, figures.finish_reason) == ("another-model", "length")
