"""Thoughts are separated from answers, for any split of the text into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.models.thoughts import ThoughtSplitter

PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "<th", "ink>", "</", "</think", ">", " ", "\n", "a", "b c"]),
    max_size=12,
)


def split(pieces: list[str], is_open: bool = False) -> tuple[str, str]:
    splitter = ThoughtSplitter(is_open)
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    parts += splitter.flush()
    assert all(text for _, text in parts)
    kinds = [kind for kind, _ in parts]
    assert kinds == sorted(kinds, reverse=True)  # an answer follows its thought
    return (
        "".join(text for kind, text in parts if kind == "thought"),
        "".join(text for kind, text in parts if kind == "answer"),
    )


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm\n", "yes"),
        ("\n<think>hm</think>yes", "hm", "yes"),
        ("<think>\n\n</think>\n\nyes", "", "yes"),
        ("<think>never ends", "never ends", ""),
        ("<think>a < b </ c</think>d", "a < b </ c", "d"),
        ("plain <think>not at the beginning</think>", "", "plain <think>not at the beginning</think>"),
        ("  plain", "", "  plain"),
        ("<thin", "", "<thin"),
        ("<think>x</think>y<think>z", "x", "y<think>z"),
    ],
)
def test_thought_and_answer(text: str, thought: str, answer: str) -> None:
    assert split([text]) == (thought, answer)
    assert split(list(text)) == (thought, answer)


@given(PIECES, st.booleans())
def test_any_cutting_of_a_text_gives_the_same(pieces: list[str], is_open: bool) -> None:
    text = "".join(pieces)
    assert split(pieces, is_open) == split([text], is_open) == split(list(text), is_open)


def test_a_prompt_may_have_opened_the_thought() -> None:
    assert split(["\nhm</thi", "nk>\n", "\nyes"], is_open=True) == ("hm", "yes")


def test_without_a_thought_nothing_waits() -> None:
    splitter = ThoughtSplitter()
    assert list(splitter.feed("I")) == [("answer", "I")]
    assert list(splitter.feed(" <")) == [("answer", " <")]
