"""Tool calls are parsed from every model family's text, for any split into pieces."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.app.generate.calls import CallArguments, CallReader, CallStart, Text, short_id
from neo_desktop.app.generate.history import explained, paired
from neo_desktop.app.generate.json_stream import complete_members
from neo_desktop.app.generate.tools import (
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


def read(
    tool_format: ToolFormat, pieces: list[str], *, is_cut: bool = False, **options: Any
) -> tuple[str, list[tuple[str, str]]]:
    """Return the text, and each call's (name, arguments)."""
    reader = CallReader(tool_format, NAMES, **options)
    found = [piece for text in pieces for piece in reader.feed(text)]
    found += reader.flush(is_cut=is_cut)
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
ADD_OBJECT = f'{{"name": "add", "arguments": {ADD[1]}}}'
MISTRAL_BOTH = (
    f'[TOOL_CALLS][{{"name": "add", "arguments": {ADD[1]}}}, {{"name": "weather", "arguments": {RAIN[1]}}}]'
)

CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, HERMES_ADD, "", [ADD]),
    (HERMES, f"Let me see.\n{HERMES_ADD}\n{HERMES_RAIN}\n", "Let me see.\n", [ADD, RAIN]),
    (HERMES, f"{HERMES_ADD}\nand then?", "and then?", [ADD]),
    (HERMES, "no call < at <tool all", "no call < at <tool all", []),
    (HERMES, "<tool_call>\nfoo\n</tool_call>", "<tool_call>\nfoo\n</tool_call>", []),
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
    (HARMONY, "<tool_call>add[1, 2]", "<tool_call>add[1, 2]", []),
    (HERMES, "the mark <tool_call> begins", "the mark <tool_call> begins", []),
    (MISTRAL_NAMES, '[TOOL_CALLS] begins a {"x": 1}', '[TOOL_CALLS] begins a {"x": 1}', []),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"arguments": " ", "name": "add"}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "null"}</tool_call>', "", [("add", "{}")]),
    (HERMES, f"<tool_call>\n[{ADD_OBJECT}, {ADD_OBJECT}]\n</tool_call>", "", [ADD, ADD]),
    (HERMES, f"<tool_call>[{ADD_OBJECT}, no]", ", no]", [ADD]),
    (HERMES, f"<tool_call>{ADD_OBJECT[:-1]}</tool_call>!", "!", [ADD]),
    (HERMES, f"<tool_call>{ADD_OBJECT}</tool_call>, then", ", then", [ADD]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": [1</tool_call>', "", [("add", '{"a": [1]}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1, b', ", b", [("add", '{"a": 1}')]),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": "x\n\ty\\d\\u12", "b": [None, True,],}}',
        "",
        [("add", r'{"a": "x\n\ty\\d\\u12", "b": [null, true]}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d\\ude00 \\ude00 \\ud83d"}}',
        "",
        [("add", r'{"a": "\ud83d\ude00 \ufffd \ufffd"}')],
    ),
]
CASES += [
    (HERMES, text := f'<tool_call>{{"name": "add", "arguments": {odd}}}</tool_call>', text, [])
    for odd in ("[1]", "1", "true", '"x"', '"[1]"', "add(1)", "NaN", '{"a"', "[" * 10_000)
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


FORMATS = [HERMES, LLAMA, MISTRAL, MISTRAL_NAMES, HARMONY]
PIECES = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=30)


@given(st.sampled_from(FORMATS), PIECES, st.booleans())
def test_any_cutting_of_a_text_gives_the_same(
    tool_format: ToolFormat, pieces: list[str], is_begun: bool
) -> None:
    text = "".join(pieces)
    found = [read(tool_format, each, is_begun=is_begun) for each in (pieces, [text], list(text))]
    assert found[0] == found[1] == found[2]


@given(st.sampled_from(FORMATS), PIECES, st.sampled_from(["", "x", "\n"]))
def test_what_is_no_call_is_text_and_arguments_are_an_object(
    tool_format: ToolFormat, pieces: list[str], end: str
) -> None:
    text = "".join(pieces) + end
    answer, calls = read(tool_format, [*pieces, end])
    if not calls:
        assert answer == text
    assert Counter(answer) <= Counter(text)
    for _, arguments in calls[:-1]:
        assert isinstance(json.loads(arguments), dict)
    for _, arguments in calls:
        assert isinstance(complete_members(arguments), dict)


@given(st.sampled_from(FORMATS), PIECES)
def test_a_cut_text_never_shows_half_a_mark(tool_format: ToolFormat, pieces: list[str]) -> None:
    text, mark = "x" + "".join(pieces), tool_format.opening
    before, found, _ = text.partition(mark)
    if not found:
        length = max(length for length in range(len(mark)) if text.endswith(mark[:length]))
        before = text[: len(text) - length]
    answer, calls = read(tool_format, ["x", *pieces], is_cut=True)
    assert answer == before or (found and answer.startswith(before))
    assert found or not calls


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda value: st.lists(value, max_size=3) | st.dictionaries(st.text(), value, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(FORMATS), st.dictionaries(st.text(), JSON), st.booleans(), st.data())
def test_any_arguments_come_through(
    tool_format: ToolFormat, arguments: dict[str, Any], is_ascii: bool, data: st.DataObject
) -> None:
    written = json.dumps(arguments, ensure_ascii=is_ascii)
    call = {"name": "add", tool_format.arguments_key: arguments}
    body = f"add{written}" if tool_format.has_names else json.dumps(call, ensure_ascii=is_ascii)
    cut = data.draw(st.integers(0, len(body)))
    text = tool_format.opening + body
    for marked in ([text], [tool_format.opening, body[:cut], body[cut:]], list(text)):
        answer, ((_, read_arguments),) = read(tool_format, marked)
        assert (answer, json.loads(read_arguments)) == ("", arguments)
    _, calls = read(tool_format, [tool_format.opening, body[:cut]], is_cut=True)
    for _, beginning in calls:
        kept = complete_members(beginning)
        assert kept.keys() <= arguments.keys()
        assert list(kept)[:-1] == list(arguments)[: max(0, len(kept) - 1)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        "<tool_call>" + " " * 1_000_000,
        '<tool_call>{"name": "add", "arguments": {"a": "' + "x" * 1_000_000,
        '<tool_call>{"name": "add", "arguments": {"a": [' + "1," * 100_000,
        f"<tool_call>{ADD_OBJECT}" * 2_000,
    ],
    ids=["marks", "spaces", "string", "list", "calls"],
)
def test_a_text_of_a_million_characters_is_read_in_linear_time(text: str) -> None:
    read(HERMES, [text])
    read(HERMES, list(text[:20_000]))


def test_json_that_is_no_call_comes_as_soon_as_that_is_clear() -> None:
    reader = CallReader(LLAMA, NAMES)
    assert list(reader.feed('{"answer"')) == [Text('{"answer"')]
    assert list(reader.feed(": 4")) == [Text(": 4")]


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(HERMES, NAMES)
    pieces = [list(reader.feed(char)) for char in HERMES_ADD]
    assert sum(isinstance(piece, CallArguments) for found in pieces for piece in found) > 8


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
