"""Answers of gpt-oss are parsed like those of other reasoning models."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from neo_desktop.models.harmony import MARKS
from neo_desktop.models.thoughts import ThoughtSplitter
from neo_desktop.models.tokenizer import Tokenizer

from .chat_client import ChatClient, chats_file, message
from .conftest import running
from .fake_engine import MODEL, ScriptedExecutor, make_engine

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
THOUGHT = "<|channel|>analysis<|message|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
TEMPLATE = """\
{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}
{%- if m.role == "assistant" %}<|channel|>final{% endif %}<|message|>
{%- if m.tool_calls %}{{ m.thinking }} {{ m.tool_calls[0].function.arguments | tojson }}
{%- else %}{{ m.content }}{% endif %}<|end|>{% endfor %}<|start|>assistant"""


def tokenizer_with(marks: tuple[str, ...]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True) for text in (*marks, "<|return|>", "<|constrain|>", "<|call|>")]
    )
    return Tokenizer(backend, {"eos_token": "<|return|>"})


def read(tokenizer: Tokenizer, text: str) -> str:
    stream = tokenizer.decode_stream()
    return "".join([stream.step(token) for token in tokenizer.encode(text)]) + stream.flush()


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        (
            f"{THOUGHT}Hm, \u00e4.<|end|>{ANSWER}Yes \U0001f642<|return|>",
            "<think>Hm, \u00e4.</think>Yes \U0001f642",
        ),
        ("<|channel|>final<|message|>Yes", "Yes"),
        (
            f"{THOUGHT}One.<|end|><|start|>assistant{THOUGHT}Two.<|end|>{ANSWER}Yes",
            "<think>One.Two.</think>Yes",
        ),
        (f"{THOUGHT}cut off", "<think>cut off"),
        (
            f"{THOUGHT}Hm.<|end|><|start|>assistant{CALL}",
            '<think>Hm.</think><tool_call>add{"a": 1}',
        ),
        (
            f"{THOUGHT}Hm.<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>1",
            '<think>Hm.</think><tool_call>add{"arguments": 1}',
        ),
        (' to=functions.add<|channel|>commentary<|message|>{"a": 1}', '<tool_call>add{"a": 1}'),
        (
            "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}",
            "<tool_call>f{}",
        ),
        (" to=functions.f<|constrain|>json<|message|> {}", "<tool_call>f {}"),
        ("<|channel|>commentary<|message|>I look it up.<|end|>", "I look it up."),
        ("<|return|>", ""),
        (" to=functions.", " to=functions."),
        (" today", " today"),
        (f"{THOUGHT}Hm.<|end|><|start|>assi", "<think>Hm."),
        ("a completion, without any mark", "a completion, without any mark"),
        ("", ""),
    ],
)
def test_thoughts_are_marked_and_headers_are_no_text(written: str, read_as: str) -> None:
    assert read(tokenizer_with(MARKS), written) == read_as


TEXTS = st.sampled_from(["Hm.", "a <think> b", "</think>c", "<tool_call>", "ä 🙂", "", "{"])
ARGUMENTS = st.sampled_from(['{"a": 1}', " {}", "", "[1, 2]", "print(1)", '"x"', "3", "null"])
NAMES = st.sampled_from(["add", "f.g", "get-it"])
ENDS = st.sampled_from(["<|end|>", "<|call|>"])
Message = tuple[str, str, str]  # kind, text, the model's raw output


@st.composite
def harmony_messages(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from(["thought", "answer", "preamble", "call"]))
    if kind != "call":
        channel = {"thought": "analysis", "answer": "final", "preamble": "commentary"}[kind]
        text = draw(TEXTS)
        return kind, text, f"<|start|>assistant<|channel|>{channel}<|message|>{text}<|end|>"
    name, arguments = draw(NAMES), draw(ARGUMENTS)
    to, space = f"to=functions.{name}", draw(st.sampled_from(["", " "]))
    form = draw(st.sampled_from(["", "json", "<|constrain|>json", "code"]))
    form = f"{space if form.startswith('<') else ' '}{form}" if form else space
    header = draw(
        st.sampled_from(
            [
                f" {to}<|channel|>commentary{form}",
                f"<|channel|>commentary {to}{form}",
                f"<|channel|>analysis {to}{form}",
                f" {to}{form}",
            ]
        )
    )
    called = f"{name} {as_object(arguments)}"
    return "call", called, f"<|start|>assistant{header}<|message|>{arguments}{draw(ENDS)}"


def as_object(arguments: str) -> str:
    """Return the arguments as an object; a value that is no object is wrapped in one, raw or as text."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = arguments
    return json.dumps(value if isinstance(value, dict) else {} if value is None else {"arguments": value})


@given(st.lists(harmony_messages(), min_size=1, max_size=5))
def test_messages_in_any_order_are_told_apart(messages: list[Message]) -> None:
    tokenizer = tokenizer_with(MARKS)
    written = "".join(text for _, _, text in messages).removeprefix("<|start|>assistant")
    stream, splitter = tokenizer.decode_stream(is_chat=True), ThoughtSplitter()
    found = {"thought": "", "answer": ""}
    for token in tokenizer.encode_chat(tokenizer.marks.split(written)):
        for kind, text in splitter.feed(stream.step(token)):
            found[kind] += text
    for kind, text in [*splitter.feed(stream.flush()), *splitter.flush()]:
        found[kind] += text
    assert found["thought"] == "".join(text for kind, text, _ in messages if kind == "thought")
    rest = found["answer"]
    for kind, text, _ in messages:
        if kind == "call":
            name, _, arguments = text.partition(" ")
            rest = rest.removeprefix(f"<tool_call>{name}").lstrip()
            value, end = json.JSONDecoder().raw_decode(rest)
            assert value == json.loads(arguments)
            rest = rest[end:]
        elif kind != "thought":
            assert rest.startswith(text)
            rest = rest.removeprefix(text)
    assert rest == ""


def test_the_page_and_the_api_tell_them_apart() -> None:
    splitter, tokenizer = ThoughtSplitter(), tokenizer_with(MARKS)
    stream, parts = tokenizer.decode_stream(), []
    for token in tokenizer.encode(f"{THOUGHT}Hm.<|end|>{ANSWER}Yes."):
        parts += list(splitter.feed(stream.step(token)))
    parts += list(splitter.flush())
    kinds = {kind: "".join(text for of, text in parts if of == kind) for kind in ("thought", "answer")}
    assert kinds == {"thought": "Hm.", "answer": "Yes."}


def test_other_vocabularies_are_read_as_before() -> None:
    assert read(tokenizer_with(MARKS[:3]), "<|start|>a<|message|>b") == "ab"


ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": ADD["function"]["parameters"]}}


class Chat:
    def __init__(self, client: openai.OpenAI, executor: ScriptedExecutor) -> None:
        self._client, self.executor = client, executor
        self.url = str(client.base_url).removesuffix("/v1/")

    def ask(self, answer: str, **fields: Any) -> Any:
        self.executor.answers = [answer]
        messages = fields.pop("messages", [{"role": "user", "content": "1 + 1?"}])
        return self._client.chat.completions.create(model=MODEL, messages=messages, **fields).choices[0]


@pytest.fixture(scope="module")
def chat() -> Iterator[Chat]:
    tokenizer = tokenizer_with(MARKS)
    executor = ScriptedExecutor(tokenizer=tokenizer)
    engine = make_engine(
        executor, template=TEMPLATE, tokenizer=tokenizer, context_tokens=2048, num_blocks=256
    )
    with running(engine) as server:
        yield Chat(server.client(), executor)


def test_a_call_is_told_as_one(chat: Chat) -> None:
    choice = chat.ask(f"{THOUGHT}Hm.<|end|><|start|>assistant{CALL}", tools=[ADD])
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert (choice.message.reasoning_content, choice.finish_reason) == ("Hm.", "tool_calls")
    assert chat.ask(f"{THOUGHT}Hm.<|end|>{ANSWER}2.", tools=[ADD]).message.content == "2."


def test_a_call_that_must_come_follows_the_thought(chat: Chat) -> None:
    thought, called = (
        f"{THOUGHT}Hm.<|end|>",
        "<|start|>assistant<|channel|>commentary to=functions.add<|message|>",
    )
    choice = chat.ask(f'{thought}{called}{{"a": 1}}', tools=[ADD], tool_choice="required")
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert choice.message.reasoning_content == "Hm."
    for wrong in (f"{ANSWER}2.", f'{called}{{"b": 1}}', f'{called.replace("add", "sub")}{{"a": 1}}'):
        with pytest.raises(openai.BadRequestError, match="grammar"):
            chat.ask(thought + wrong, tools=[ADD], tool_choice="required")


@pytest.mark.parametrize("tools", [{}, {"tools": [ADD]}])
def test_the_form_of_an_answer_is_enforced_after_the_thought(chat: Chat, tools: Any) -> None:
    thought = f"{THOUGHT}Hm.<|end|>{ANSWER}"
    choice = chat.ask(f'{thought}{{"a": 2}}', response_format=SCHEMA, **tools)
    assert (choice.message.content, choice.message.reasoning_content) == ('{"a": 2}', "Hm.")
    with pytest.raises(openai.BadRequestError, match="grammar"):
        chat.ask(f"{thought}two", response_format=SCHEMA, **tools)


def test_calls_and_the_thoughts_that_led_to_them_go_back(chat: Chat) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: Any = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "reasoning_content": "A sum.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    chat.executor.prompts.clear()
    assert chat.ask(f"{ANSWER}2.", messages=messages, tools=[ADD]).message.content == "2."
    (prompt,) = chat.executor.prompts.values()
    written = chat.executor.tokenizer.decode(prompt, skip_special_tokens=False)
    assert 'A sum. {"a": 1}<|end|><|start|>tool<|message|>2' in written


def test_stop_strings_count_in_answers_alone(chat: Chat) -> None:
    call = CALL.replace("1", '"bye"')
    written = f"{THOUGHT}bye<|end|><|start|>assistant{call}<|end|>{ANSWER}Hello. Human: bye"
    choice = chat.ask(written, tools=[ADD], stop=["bye", "assistant"])
    assert choice.message.content == "Hello. Human: "
    assert choice.message.reasoning_content == "bye"
    assert choice.message.tool_calls[0].function.arguments == '{"a": "bye"}'
    with anthropic.Anthropic(base_url=chat.url, api_key="key", max_retries=0) as client:
        for stop, reason in (("Human:", "stop_sequence"), ("bye", "stop_sequence"), ("final", "end_turn")):
            message = client.messages.create(
                model=MODEL,
                messages=[{"role": "user", "content": "?"}],
                stop_sequences=["none", stop],
                max_tokens=999,
            )
            assert message.stop_reason == reason
            assert message.stop_sequence == (stop if reason == "stop_sequence" else None)


@pytest.mark.parametrize(
    ("thought", "text", "written"),
    [
        ("Hm", "", f"{THOUGHT}Hm<|end|><|start|>assistant"),
        ("Hm", "So", f"{THOUGHT}Hm<|end|>{ANSWER}So"),
        ("", "a <|end|> b", "<|channel|>final<|message|>a <|end|> b"),
    ],
)
def test_a_continued_answer_keeps_its_channels(tmp_path: Path, thought: str, text: str, written: str) -> None:
    tokenizer, executor = tokenizer_with(MARKS), ScriptedExecutor()
    executor.tokenizer = tokenizer
    answer = message("assistant", "a", id="b", text=text, thought=thought, state="cut")
    file = json.dumps(chats_file(message("user", text="one"), answer, leaf_id="b"))
    engine = make_engine(executor, template=TEMPLATE, tokenizer=tokenizer)
    with running(engine, data_folder=tmp_path) as server:
        chats = ChatClient(server.url)
        (chat_id,) = chats.call("add", file)
        node = chats.chat(chat_id)["nodes"][-1]
        chats.call("resume", node["id"])
        chats.ended(node)
    prompt = next(iter(executor.prompts.values()))
    asked = "<|start|>user<|message|>one<|end|><|start|>assistant"
    assert tokenizer.decode(prompt, skip_special_tokens=False).startswith(asked + written)
    # Marks inside the text are not control tokens.
    (end,) = tokenizer.encode("<|end|>")
    assert prompt.count(end) == (asked + written).count("<|end|>") - text.count("<|end|>")
