"""What the model is told is what was said, whatever the page draws around it."""

import gradio as gr
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.ui.messages import answer, question, said, stopped, to_send

texts = st.text(alphabet="ab \n`<>/p*$\\", min_size=1).filter(lambda text: text.strip())


def as_the_page_returns_it(shown: list[dict[str, object]]) -> list[dict[str, object]]:
    """Through gradio's component, as on every turn."""
    chatbot = gr.Chatbot(reasoning_tags=[("<think>", "</think>")])
    return chatbot.preprocess(chatbot.postprocess(shown))


@given(text=texts, line=st.text(min_size=1))
def test_the_line_under_an_answer_is_not_part_of_it(text: str, line: str) -> None:
    # An open code block is closed, or the line would be drawn inside it.
    assert said(answer(text, line)) in (text.rstrip(), f"{text}\n```")


@given(text=texts)
def test_a_question_is_sent_as_it_was_typed(text: str) -> None:
    shown = as_the_page_returns_it([question("x" + text + "x")])
    assert to_send(shown, "") == [{"role": "user", "content": "x" + text + "x"}]


@given(
    exchange=st.lists(st.sampled_from(["question", "answer", "error", "thought"])),
    system=st.sampled_from(["", "s"]),
)
def test_what_is_sent_alternates_and_ends_with_the_question(exchange: list[str], system: str) -> None:
    makers = {
        "question": lambda: question("q"),
        "answer": lambda: answer("a", "figures"),
        "error": lambda: answer("", "busy", "error"),
        "thought": lambda: answer("<think>hm</think>a", "figures"),
    }
    # As on the page: every question is followed by one answer, or by none that has text.
    shown = []
    for kind in exchange:
        shown += [question("q")] if kind == "question" else [question("q"), makers[kind]()]
    sent = to_send(as_the_page_returns_it([*shown, question("last")]), system)
    roles = [turn["role"] for turn in sent]
    if system:
        assert roles.pop(0) == "system"
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    assert sent[-1]["content"] == "last"
    assert all(turn["content"] in ("q", "a", "last") for turn in sent[bool(system) :])


def test_stopping_keeps_the_text_and_says_so() -> None:
    shown = [question("q"), answer("half an ans", "first token after 0.10 s")]
    ended = stopped(as_the_page_returns_it(shown))
    assert said(ended[-1]) == "half an ans"
    assert "stopped · first token after 0.10 s" in ended[-1]["content"][0]["text"]
    assert stopped(as_the_page_returns_it(ended)) == as_the_page_returns_it(ended)  # told once
