"""Earlier tool calls and results reach the model: each once, in its turn, the result after its call."""

from typing import Any

import pytest
from chat_families import FAMILIES
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.app.generate.history import arguments_of, explained, paired, with_thinking
from neo_desktop.app.generate.tools import EXPLAINED, HARMONY, HERMES, LLAMA, MISTRAL, ToolFormat, format_of
from neo_desktop.app.templates.chat_template import ChatTemplate

FORMATS = {
    "ChatML": HERMES,
    "Llama 3": LLAMA,
    "Mistral": MISTRAL,
    "harmony": HARMONY,
    "Gemma": EXPLAINED,
    "Phi": EXPLAINED,
    "SmolLM2": EXPLAINED,
}


@st.composite
def chats(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[list[tuple[str, str | None]]]]:
    """Draw a chat, and each turn's calls with their results. Turns reuse the ids, or leave them out."""
    messages: list[dict[str, Any]] = []
    turns = []
    for turn in range(draw(st.integers(1, 3))):
        has_ids = draw(st.booleans())
        num_calls = draw(st.integers(1, 3))
        names = [f"f{turn}-{number}!" for number in range(num_calls)]
        ids = draw(st.permutations(["call_0", "call_1", "call_2"])) if has_ids else [""] * 3
        num_results = num_calls if has_ids or draw(st.booleans()) else draw(st.integers(0, num_calls))
        answered = draw(st.permutations(range(num_calls)) if has_ids else st.just(range(num_results)))
        if has_ids:
            answered = answered[: draw(st.integers(0, num_calls))]
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}
            for name, call_id in zip(names, ids, strict=False)
        ]
        messages.append({"role": "user", "content": f"question {turn}!"})
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        results: list[str | None] = [None] * num_calls
        for number in answered:
            results[number] = f"r{turn}-{number}!"
            given_id = {"tool_call_id": ids[number]} if has_ids or draw(st.booleans()) else {}
            messages.append({"role": "tool", "content": results[number], **given_id})
        if (has_ids or None not in results) and draw(st.booleans()):
            lost = draw(st.sampled_from(["strange", *ids[:1]])) if has_ids else "strange"
            if lost == "strange" or results[0] is not None:
                messages.append({"role": "tool", "content": f"r{turn}-lost!", "tool_call_id": lost})
                results.append(f"r{turn}-lost!")
                names.append(names[-1])
        turns.append(list(zip(names, results, strict=True)))
    return messages, turns


def written(family: str, tool_format: ToolFormat, messages: list[dict[str, Any]]) -> str:
    messages = with_thinking(paired(messages, single_calls=tool_format.single_calls))
    if not tool_format.in_template:
        messages = explained(messages, [])
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(FAMILIES[family].source, roles).render(messages)


@pytest.mark.parametrize("family", FORMATS)
@given(chats())
def test_each_result_is_there_once_after_its_call(family: str, chat: Any) -> None:
    messages, turns = chat
    text = written(family, FORMATS[family], messages)
    assert format_of(FAMILIES[family].source) == FORMATS[family]
    for turn, calls in enumerate(turns):
        start = text.index(f"question {turn}!")
        end = text.find(f"question {turn + 1}!") % (len(text) + 1)
        places = []
        for name, result in calls:
            if result is None:
                continue
            assert text.count(result) == 1
            places.append(text.index(result))
            assert start < text.rindex(name, 0, text.index(result)) < places[-1] < end
            if FORMATS[family].single_calls and not result.endswith("lost!"):
                between = text[text.index(name) : places[-1]]
                assert not any(other in between for other, _ in calls if other != name)
        assert places == sorted(places)


def test_calls_without_an_id_or_with_the_same_one_get_one_each() -> None:
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": {}}}
    results = [{"role": "tool", "content": text} for text in "ab"]
    head, *answers = paired([{"role": "assistant", "content": "", "tool_calls": [call, call]}, *results])
    ids = [call["id"] for call in head["tool_calls"]]
    assert len(set(ids)) == 2
    assert [answer["tool_call_id"] for answer in answers] == ids


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ("{}", {}),
        ('{"a": 1}', {"a": 1}),
        ("[1]", "[1]"),
        ("{bad", "{bad"),
    ],
)
def test_arguments_are_an_object_where_they_can_be(text: str, arguments: object) -> None:
    assert arguments_of(text) == arguments
