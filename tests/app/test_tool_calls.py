"""Tool calls are read from the text of each family, however it is cut into pieces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.app.api.calls import CallArguments, CallReader, CallStart, Text, short_id
from neo_desktop.app.api.history import explained, paired
from neo_desktop.app.api.tools import (
    EXPLAINED,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMES,
    Tool,
    ToolFormat,
    format_of,
)

NAMES = {"add", "weather"}


def read(tool_format: ToolFormat, pieces: list[str], **options: Any) -> tuple[str, list[tuple[str, str]]]:
    """The text, and (name, arguments) of each call."""
    reader = CallReader(tool_format, NAMES, **options)
    found = [piece for text in pieces for piece in reader.feed(text)]
    found += reader.flush()
    texts, calls = [], []
    for piece in found:
        if isinstance(piece, Text):
            assert piece.text
            texts.append(piece.text)
        elif isinstance(piece, CallStart):
            assert piece.number == len(calls)
            calls.append((piece.name, ""))
        else:
            assert isinstance(piece, CallArguments)
            assert piece.number == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return "".join(texts), calls


ADD = ("add", '{"a": 1, "b": [2, {"c": "}"}]}')
RAIN = ("weather", '{"place": "Sankt \\"Pölten\\"\\\\"}')
HERMES_ADD = f'<tool_call>\n{{"name": "add", "arguments": {ADD[1]}}}\n</tool_call>'
HERMES_RAIN = f'<tool_call>\n{{"arguments": {RAIN[1]}, "name": "weather"}}\n</tool_call>'
LLAMA_ADD = f'{{"name": "add", "parameters": {ADD[1]}}}'
LLAMA_RAIN = f'{{"type": "function", "name": "weather", "parameters": {RAIN[1]}}}'
MISTRAL_BOTH = (
    f'[TOOL_CALLS][{{"name": "add", "arguments": {ADD[1]}}}, {{"name": "weather", "arguments": {RAIN[1]}}}]'
)

CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, HERMES_ADD, "", [ADD]),
    (HERMES, f"Let me see.\n{HERMES_ADD}\n{HERMES_RAIN}\n", "Let me see.\n", [ADD, RAIN]),
    (HERMES, f"{HERMES_ADD}\nand then?", "and then?", [ADD]),
    (HERMES, "no call < at <tool all", "no call < at <tool all", []),
    (HERMES, "<tool_call>\nfoo\n</tool_call>", "<tool_call>foo\n</tool_call>", []),
    (HERMES, "<tool_call>", "<tool_call>", []),
    (HERMES, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    (HERMES, '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    (HERMES, '{"name": "add", "arguments": {}}', '{"name": "add", "arguments": {}}', []),
    (LLAMA, LLAMA_ADD, "", [ADD]),
    (LLAMA, f"\n<|python_tag|>{LLAMA_ADD}; {LLAMA_RAIN}", "\n", [ADD, RAIN]),
    (LLAMA, '{"name": "Ada", "age": 36} is JSON', '{"name": "Ada", "age": 36} is JSON', []),
    (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA, f"It is {LLAMA_ADD}", f"It is {LLAMA_ADD}", []),
    (MISTRAL, MISTRAL_BOTH, "", [ADD, RAIN]),
    (MISTRAL, f"Well. {MISTRAL_BOTH}", "Well. ", [ADD, RAIN]),
    (MISTRAL, "[1, 2] is a list", "[1, 2] is a list", []),
    (MISTRAL_NAMES, f"[TOOL_CALLS]add[ARGS]{ADD[1]}[TOOL_CALLS]weather{RAIN[1]}", "", [ADD, RAIN]),
    (MISTRAL_NAMES, f"[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{ADD[1]}", "", [ADD]),
    (HARMONY, f"I look. <tool_call>add{ADD[1]}", "I look. ", [ADD]),
    (HARMONY, "<tool_call>add", "<tool_call>add", []),
]


@pytest.mark.parametrize(("tool_format", "text", "answer", "calls"), CASES)
def test_calls_and_text(
    tool_format: ToolFormat, text: str, answer: str, calls: list[tuple[str, str]]
) -> None:
    assert read(tool_format, [text]) == (answer, calls)
    assert read(tool_format, list(text)) == (answer, calls)


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    '{"name": "add", ',
    '"arguments": ',
]
FRAGMENTS += ["{", "}", "[", "]", '"', "\\", ":", ",", ";", " ", "\n", "a", "<tool", LLAMA_ADD, HERMES_ADD]


@given(st.sampled_from([HERMES, LLAMA, MISTRAL, MISTRAL_NAMES]), st.lists(st.sampled_from(FRAGMENTS)))
def test_any_cutting_of_a_text_gives_the_same(tool_format: ToolFormat, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert read(tool_format, pieces) == read(tool_format, [text]) == read(tool_format, list(text))


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(HERMES, NAMES)
    pieces = [list(reader.feed(char)) for char in HERMES_ADD]
    assert sum(isinstance(piece, CallArguments) for found in pieces for piece in found) > 10


def test_text_without_a_mark_does_not_wait() -> None:
    for tool_format in (HERMES, LLAMA, MISTRAL):
        reader = CallReader(tool_format, NAMES)
        assert list(reader.feed("I")) == [Text("I")]
        assert list(reader.feed(" am")) == [Text(" am")]


def test_calls_beyond_those_allowed_are_left_out() -> None:
    assert read(HERMES, [HERMES_ADD + HERMES_RAIN + "text"], max_calls=1) == ("", [ADD])
    assert read(MISTRAL, [MISTRAL_BOTH], max_calls=1) == ("", [ADD])


def test_a_call_may_have_been_begun_by_the_prompt() -> None:
    assert read(HERMES, [HERMES_ADD.removeprefix("<tool_call>\n")], is_begun=True) == ("", [ADD])
    assert read(LLAMA, [LLAMA_ADD], is_begun=True) == ("", [ADD])
    assert read(MISTRAL, [MISTRAL_BOTH.removeprefix("[TOOL_CALLS]")], is_begun=True) == ("", [ADD, RAIN])


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        (None, EXPLAINED),
        ("{{ messages }}", EXPLAINED),
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}<tool_call><function={% endif %}", EXPLAINED),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}", MISTRAL_NAMES),
        ("{% if tools %}<|start_header_id|>{'name': name, 'parameters': {}}{% endif %}", LLAMA),
        ("{% if tools %}<|channel|>commentary{% endif %}", HARMONY),
        ("{% if tools %}something else{% endif %}", EXPLAINED),
    ],
)
def test_the_family_is_told_by_the_template(template: str | None, tool_format: ToolFormat) -> None:
    assert format_of(template) == tool_format


def test_a_template_without_tools_gets_them_as_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "tool", "content": "3", "tool_call_id": "2"},
    ]
    tools = [Tool("add", "Adds.", {"type": "object"})]
    question, answer, result = explained(chat, tools)
    assert '"name": "add"' in question["content"]
    assert question["content"].endswith("\n\n1 + 1?")
    assert read(EXPLAINED, [answer["content"]]) == ("", [("add", '{"a": 1}')] * 2)
    assert (result["role"], set(result)) == ("user", {"role", "content"})
    assert result["content"] == ("<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>")
    system, *_ = explained([{"role": "system", "content": "Be kind."}, *chat], tools)
    assert system["content"].startswith("Be kind.\n\nYou can call tools.")


@given(st.text())
def test_short_ids(call_id: str) -> None:
    short = short_id(call_id)
    assert len(short) == 9
    assert short.isascii()
    assert short.isalnum()
    assert short_id(short) == short


def test_a_template_that_takes_one_call_per_message_gets_them_one_by_one() -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in ("a", "b")
    ]
    chat = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "well", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
        {"role": "assistant", "content": "done"},
    ]
    assert paired(chat, single_calls=True) == [
        chat[0],
        {"role": "assistant", "content": "well", "tool_calls": calls[:1]},
        chat[2],
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
        chat[3],
        chat[4],
    ]


def test_a_schema_within_a_grammar_is_valid_json() -> None:
    lark = HERMES.grammar([Tool("add", None, {"properties": {"ä\n": {}}})], is_parallel=True)
    schema = lark[lark.index("%json") + 5 :]
    assert json.loads(schema)["properties"] == {"ä\n": {}}
