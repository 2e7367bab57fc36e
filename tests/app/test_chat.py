"""Chats with tools, reasoning and structured output, as the openai client sees them."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .conftest import RunningServer, running
from .fake_engine import MODEL, ScriptedExecutor, make_engine

TEMPLATES = {
    "explained": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
    "hermes": (
        "{% if tools %}<tools>{{ tools | tojson }}<tool_call>{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}"
        "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments.place }}]{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
        "{% if enable_thinking %}<think>\n{% endif %}"
    ),
    "llama": (
        "{% if tools %}<|start_header_id|>parameters{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    ),
    "mistral": (
        "{% if tools %}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.id }}{% endfor %}{{ m.tool_call_id }}"
        "{% endfor %}<assistant>"
    ),
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}},
            "required": ["place"],
            "additionalProperties": False,
            "$defs": {"place": {"type": "string"}},
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
WIEN, ULM = '{"place": "Wien"}', '{"place": "Ulm"}'
ARGUMENTS = [("weather", WIEN), ("weather", ULM)]
BOTH = {
    "explained": f'<tool_call>\n{{"name": "weather", "arguments": {WIEN}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "weather", "arguments": {ULM}}}\n</tool_call>',
    "llama": f'{{"name": "weather", "parameters": {WIEN}}}; {{"name": "weather", "parameters": {ULM}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {WIEN}}}, '
    f'{{"name": "weather", "arguments": {ULM}}}]',
}
BOTH["hermes"] = BOTH["explained"]
OPENINGS = {"hermes": "<tool_call>\n", "explained": "<tool_call>\n", "mistral": "[TOOL_CALLS]", "llama": ""}


class Chat:
    """A server for one chat template, whose model writes the test's text."""

    def __init__(self, server: RunningServer, executor: ScriptedExecutor, family: str) -> None:
        self.client = server.client()
        self.executor = executor
        self.family = family
        self.prompts: list[str] = []
        submit = server.service.submit

        async def noting(prompts: Any, *args: Any, **options: Any) -> Any:
            self.prompts += map(str, prompts)
            return await submit(prompts, *args, **options)

        server.service.submit = noting  # type: ignore[method-assign]

    def ask(self, answer: str, **fields: Any) -> Any:
        self.executor.answers = [answer]
        messages = [{"role": "user", "content": "weather?"}]
        return self.client.chat.completions.create(**({"model": MODEL, "messages": messages} | fields))

    def stream(self, answer: str, **fields: Any) -> dict[str, Any]:
        """A stream's chunks, merged into one answer."""
        whole: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "ids": []}
        for part in self.ask(answer, stream=True, **fields):
            (choice,) = part.choices
            delta = choice.delta.model_dump()
            whole["content"] += delta.get("content") or ""
            whole["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(whole["calls"]):
                    whole["calls"].append((call["function"]["name"], ""))
                    whole["ids"].append(call["id"])
                name, arguments = whole["calls"][call["index"]]
                whole["calls"][call["index"]] = (name, arguments + call["function"]["arguments"])
            whole["end"] = choice.finish_reason
        return whole


def serve(family: str) -> Iterator[Chat]:
    executor = ScriptedExecutor()
    engine = make_engine(executor, template=TEMPLATES[family], context_tokens=4096, num_blocks=512)
    with running(engine) as server:
        yield Chat(server, executor, family)


@pytest.fixture(scope="module", params=list(TEMPLATES))
def chat(request: pytest.FixtureRequest) -> Iterator[Chat]:
    yield from serve(request.param)


@pytest.fixture(scope="module")
def hermes() -> Iterator[Chat]:
    yield from serve("hermes")


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def test_calls_in_one_piece_and_streamed(chat: Chat) -> None:
    (choice,) = chat.ask(BOTH[chat.family], tools=[WEATHER, TIME]).choices
    assert calls_of(choice.message) == ARGUMENTS
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert len({call.id for call in choice.message.tool_calls}) == 2
    streamed = chat.stream(BOTH[chat.family], tools=[WEATHER, TIME])
    assert (streamed["calls"], streamed["content"], streamed["end"]) == (ARGUMENTS, "", "tool_calls")
    assert len(set(streamed["ids"])) == 2


def test_an_answer_without_a_call_is_text(chat: Chat) -> None:
    (choice,) = chat.ask("Sunny, <15 degrees.", tools=[WEATHER]).choices
    assert (choice.message.content, choice.message.tool_calls) == ("Sunny, <15 degrees.", None)
    assert choice.finish_reason == "stop"
    assert chat.stream("Sunny.", tools=[WEATHER])["content"] == "Sunny."


def test_the_model_sees_the_tools_unless_it_may_not_call_them(chat: Chat) -> None:
    chat.ask("ok", tools=[WEATHER])
    if chat.family in ("explained", "hermes"):
        assert "The weather of a place." in chat.prompts[-1]
    chat.ask(BOTH[chat.family], tools=[WEATHER], tool_choice="none")
    assert "The weather of a place." not in chat.prompts[-1]
    (choice,) = chat.ask(BOTH[chat.family], tools=[WEATHER], tool_choice="none").choices
    assert choice.message.tool_calls is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_come_is_enforced(chat: Chat, choice: Any) -> None:
    asked = {"tools": [TIME, WEATHER], "tool_choice": choice}
    rest = BOTH[chat.family].removeprefix(OPENINGS[chat.family])  # the prompt already contains its opening
    (answer,) = chat.ask(rest, **asked).choices
    assert calls_of(answer.message) == ARGUMENTS
    assert answer.finish_reason == "tool_calls"
    assert chat.prompts[-1].endswith(f"<assistant>{OPENINGS[chat.family]}")
    assert chat.stream(rest, **asked)["calls"] == ARGUMENTS
    for wrong in ("I would rather talk.", rest.replace("weather", "wetter"), rest.replace("place", "plaza")):
        with pytest.raises(openai.BadRequestError, match="grammar"):
            chat.ask(wrong, **asked)


AGENT: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "properties": {
                "paths": {
                    "type": "array",
                    "items": {"type": "string", "format": "path"},
                    "uniqueItems": True,
                },
                "labels": {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
                "key": {"type": "string", "format": "password", "pattern": "^(?!admin)"},
            },
            "required": ["paths"],
        },
    },
}


def test_the_schema_of_a_tool_is_enforced_as_far_as_possible_or_refused(
    chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = '{"paths": ["a", "a"], "key": "admin"}'
    rest = BOTH[chat.family].removeprefix(OPENINGS[chat.family]).replace("weather", "search")
    rest = rest.replace(WIEN, arguments).replace(ULM, arguments)
    (answer,) = chat.ask(rest, tools=[TIME, AGENT], tool_choice="required").choices
    assert calls_of(answer.message) == [("search", arguments)] * 2
    with pytest.raises(openai.BadRequestError, match="grammar") as failure:
        chat.ask(rest.replace('"key"', '"password"'), tools=[TIME, AGENT], tool_choice="required")
    assert (failure.value.param, failure.value.code) == ("tools", "grammar_dead_end")
    strict = {"type": "function", "function": AGENT["function"] | {"strict": True}}
    with pytest.raises(openai.BadRequestError) as refusal:
        chat.ask(rest, tools=[TIME, strict], tool_choice="required")
    assert refusal.value.body["message"] == (  # type: ignore[index]
        "tools cannot be enforced: tool 'search', $.properties.paths: 'uniqueItems' cannot be enforced: "
        "remove it, or turn strict off"
    )


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "array"}, "tool 'odd', $: 'type' must be \"object\""),
        (
            {"required": ["a"], "additionalProperties": False},
            "the schema of tool 'odd' cannot be used: Unsatisfiable schema: required property 'a'",
        ),
        (
            {"properties": {"a": {"enum": []}}, "required": ["a"]},
            "the schema of tool 'odd' cannot be used: Unsatisfiable schema: required property 'a'",
        ),
        (
            {
                "properties": {"a": {"type": "string", "allOf": [{"maxLength": 2}, {"format": "date"}]}},
                "required": ["a"],
            },
            "the schema of tool 'odd' cannot be used: Unsatisfiable schema",
        ),
    ],
)
def test_a_tool_that_cannot_be_called_is_named(hermes: Chat, parameters: Any, reason: str) -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError) as refusal:
        hermes.ask("", tools=[TIME, odd], tool_choice="required")
    message = refusal.value.body["message"]  # type: ignore[index]
    assert message.startswith(f"tools cannot be enforced: {reason}")
    assert len(message) < 250
    assert "call_0" not in message


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_a_tool_without_parameters_takes_no_arguments(chat: Chat, parameters: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    rest = BOTH[chat.family].removeprefix(OPENINGS[chat.family])
    with pytest.raises(openai.BadRequestError, match="grammar"):
        chat.ask(rest, tools=[tool], tool_choice="required")
    empty = rest.replace(WIEN, "{}").replace(ULM, "{}")
    answer = chat.ask(empty, tools=[tool], tool_choice="required").choices[0]
    assert calls_of(answer.message) == [("weather", "{}")] * 2


def test_a_call_that_is_cut_shows_nothing_else(chat: Chat) -> None:
    rest = BOTH[chat.family].removeprefix(OPENINGS[chat.family])
    written = rest[: rest.index(WIEN) + 9]
    for cut in (3, 12, len(written)):
        answer = chat.ask(rest, tools=[WEATHER], tool_choice="required", max_tokens=cut).choices[0]
        assert answer.finish_reason == "length"
        assert not answer.message.content or chat.family == "llama"
    assert calls_of(answer.message) == [("weather", WIEN[:9])]


def test_one_call_at_a_time(chat: Chat) -> None:
    asked = {"tools": [WEATHER], "parallel_tool_calls": False}
    assert calls_of(chat.ask(BOTH[chat.family], **asked).choices[0].message) == ARGUMENTS[:1]
    rest = BOTH[chat.family].removeprefix(OPENINGS[chat.family])
    rest = rest.replace("}, {", "}], {")  # close the list after the first call
    answer = chat.ask(rest, tool_choice="required", **asked)
    assert calls_of(answer.choices[0].message) == ARGUMENTS[:1]
    assert answer.usage.completion_tokens < len(rest)  # the answer ends there


def test_calls_and_results_go_back_to_the_model(chat: Chat) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": WIEN}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert chat.ask("ok", messages=messages, tools=[WEATHER]).choices[0].message.content == "ok"
    prompt = chat.prompts[-1]
    assert "rain" in prompt
    if chat.family == "explained":
        assert f'{{"name": "weather", "arguments": {WIEN}}}' in prompt
    elif chat.family == "hermes":
        assert "<assistant>[weather Wien]" in prompt
    elif chat.family == "mistral":
        (call_id,) = {word[:9] for word in prompt.split("[TOOL_CALLS]")[1:]}
        assert prompt.count(call_id) == 2  # of nine characters, the same in call and result


def test_thoughts_are_told_apart(hermes: Chat) -> None:
    answer = hermes.ask("<think>\nhm, hm\n</think>\n\nRain.")
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == ("Rain.", "hm, hm\n")
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    streamed = hermes.stream("<think>\nhm, hm\n</think>\n\nRain.")
    assert (streamed["content"], streamed["reasoning_content"]) == ("Rain.", "hm, hm\n")
    assert "reasoning_content" not in hermes.ask("Rain.").choices[0].message.model_extra


@pytest.mark.parametrize(
    "fields",
    [{"reasoning_effort": "high"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}],
)
def test_thinking_can_be_turned_on(hermes: Chat, fields: dict[str, Any]) -> None:
    (choice,) = hermes.ask(f"hm\n</think>\n\n{BOTH['hermes']}", tools=[WEATHER], **fields).choices
    assert choice.message.reasoning_content == "hm\n"
    assert calls_of(choice.message) == ARGUMENTS
    assert hermes.prompts[-1].endswith("<think>\n")


def test_thinking_comes_before_what_is_enforced(hermes: Chat) -> None:
    thinking = {"reasoning_effort": "high", "tools": [WEATHER]}
    (choice,) = hermes.ask(f"hm\n</think>\n\n{BOTH['hermes']}", tool_choice="required", **thinking).choices
    assert calls_of(choice.message) == ARGUMENTS
    assert choice.message.reasoning_content == "hm\n"
    form = {"response_format": {"type": "json_object"}, "reasoning_effort": "high"}
    (choice,) = hermes.ask('hm\n</think>{"a": 1}', **form).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("hm\n", '{"a": 1}')


def test_thoughts_of_earlier_answers_go_back_to_the_model(hermes: Chat) -> None:
    earlier = {"role": "assistant", "content": "Rain.", "reasoning_content": "hm"}
    hermes.ask("ok", messages=[earlier, {"role": "user", "content": "Why?"}])
    assert "<assistant>hmRain.<user>" in hermes.prompts[-1]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"b": [1]}', "[1]"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        '{"a": 1}',
        '{"a": "1"}',
    ),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 1}', "{}"),
    ({"json_schema": SCHEMA}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"regex": "[0-9]+ (apples|pears)"}}, "12 pears", "12 plums"),
    ({"structured_outputs": {"choice": ["a.b", "c"]}}, "a.b", "a-b"),
    ({"structured_outputs": {"choice": ['"a b"\n', "ä"]}}, '"a b"\n', "a b"),
    ({"structured_outputs": {"choice": ["\x01\x7f\x85", "b"]}}, "\x01\x7f\x85", "a"),
    ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x5", "y5"),
    ({"grammar": 'root ::= "x" [0-9]+ item?\nitem ::= "!"'}, "x55!", "x!"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "nah"),
    ({"response_format": {"type": "json_object"}, "tools": [WEATHER]}, '{"b": [1]}', "[1]"),
]


@pytest.mark.parametrize(("form", "right", "wrong"), FORMS, ids=[str(form)[:40] for form, _, _ in FORMS])
def test_the_form_of_an_answer_is_enforced(
    hermes: Chat, form: dict[str, Any], right: str, wrong: str
) -> None:
    assert hermes.ask(right, extra_body=form).choices[0].message.content == right
    assert hermes.stream(right, extra_body=form)["content"] == right
    with pytest.raises(openai.BadRequestError, match="grammar"):
        hermes.ask(wrong, extra_body=form)


def test_a_call_may_come_in_place_of_the_form(hermes: Chat) -> None:
    asked = {"response_format": {"type": "json_object"}, "tools": [WEATHER]}
    assert calls_of(hermes.ask(BOTH["hermes"], **asked).choices[0].message) == ARGUMENTS


def test_raw_completions_take_a_form_too(hermes: Chat) -> None:
    hermes.executor.answers = ["x5"]
    fields: Any = {"model": MODEL, "prompt": "say"}
    answer = hermes.client.completions.create(**fields, extra_body={"grammar": 'root ::= "x" [0-9]'})
    assert answer.choices[0].text == "x5"


def test_a_prompt_can_be_echoed(hermes: Chat) -> None:
    hermes.executor.answers = ["b"]
    fields: Any = {"model": MODEL, "prompt": ["a", "aa"], "echo": True, "n": 2}
    whole = hermes.client.completions.create(**fields)
    assert [choice.text for choice in whole.choices] == ["ab", "ab", "aab", "aab"]
    texts = ["", "", "", ""]
    for part in hermes.client.completions.create(stream=True, **fields):
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == ["ab", "ab", "aab", "aab"]


def test_a_message_can_be_continued(hermes: Chat) -> None:
    begun = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two "}]
    (choice,) = hermes.ask("three", messages=begun, extra_body={"continue_final_message": True}).choices
    assert choice.message.content == "three"
    assert hermes.prompts[-1].endswith("<assistant>one two ")


def test_what_llama_cpp_and_vllm_call_it(hermes: Chat) -> None:
    extra = {"n_predict": 2, "repeat_penalty": 1.2, "cache_prompt": True, "skip_special_tokens": True}
    answer = hermes.ask("many words", extra_body=extra)
    assert answer.usage.completion_tokens == 2
    assert hermes.executor.seen[-1].params.repetition_penalty == 1.2
    assert hermes.ask("many words", extra_body={"n_predict": -1}).choices[0].finish_reason == "stop"


def test_logit_bias(hermes: Chat) -> None:
    hermes.ask("x", logit_bias={"5": -100, "7": 2})
    assert hermes.executor.seen[-1].params.logit_bias == {5: -100.0, 7: 2.0}
