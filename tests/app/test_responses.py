"""/v1/responses, as the openai client sees it."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from neo_desktop.app.api import responses
from neo_desktop.app.api.responses import ResponseStore, StoredResponse
from neo_desktop.app.errors import ApiError
from neo_desktop.app.web.warnings import HEADER

from .conftest import RunningServer, running
from .fake_engine import MODEL, ScriptedExecutor, make_engine
from .test_chat import ARGUMENTS, BOTH, TEMPLATES, WEATHER, WIEN

TOOL: Any = {"type": "function"} | WEATHER["function"]


@pytest.fixture(scope="module")
def executor() -> ScriptedExecutor:
    return ScriptedExecutor()


@pytest.fixture(scope="module")
def server(executor: ScriptedExecutor) -> Iterator[RunningServer]:
    engine = make_engine(executor, template=TEMPLATES["hermes"], context_tokens=4096, num_blocks=512)
    with running(engine) as shared:
        yield shared


@pytest.fixture
def ask(client: openai.OpenAI, executor: ScriptedExecutor) -> Any:
    def asking(answer: str, **fields: Any) -> Any:
        """Ask twice, unstreamed and streamed, and compare the answers."""
        asked: Any = {"model": MODEL, "input": "weather?"} | fields
        executor.answers = [answer]
        whole = client.responses.create(**asked)
        events = list(client.responses.create(stream=True, **asked))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == f"response.{whole.status}"
        assert without_ids(events[-1].response) == without_ids(whole)
        return whole

    return asking


def without_ids(response: Any) -> Any:
    fields = response.to_dict()
    for item in fields["output"]:
        del item["id"]
        item.pop("call_id", None)
    del fields["usage"]["input_tokens_details"]
    return {name: value for name, value in fields.items() if name not in ("id", "created_at", "completed_at")}


def test_text(ask: Any) -> None:
    response = ask("Rain.", metadata={"a": "b"})
    assert (response.output_text, response.status, response.metadata) == ("Rain.", "completed", {"a": "b"})
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.usage.output_tokens == len("Rain.") + 1
    cut = ask("Rain.", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"


def test_events_of_text_and_thoughts(client: openai.OpenAI, executor: ScriptedExecutor) -> None:
    executor.answers = ["<think>hm</think>Rain."]
    events = list(client.responses.create(model=MODEL, input="weather?", stream=True))
    kinds = [event.type for event in events]
    told = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    thought = ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    item = ["output_item.added", "output_item.done"]
    expected = [*item[:1], *thought, *item[1:], *item[:1], *text, *item[1:]]
    assert told == [f"response.{kind}" for kind in ("created", "in_progress", *expected, "completed")]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Rain."


def test_thoughts(ask: Any, prompts: list[str]) -> None:
    response = ask("hm\n</think>\n\nRain.", reasoning={"effort": "high"})
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm\n")
    assert message.content[0].text == "Rain."
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    ask("ok", input=[*(item.to_dict() for item in response.output), {"role": "user", "content": "Why?"}])
    assert prompts[-1] == "<assistant>hm\nRain.<user>Why?<assistant>"


def test_calls_and_results(ask: Any, prompts: list[str]) -> None:
    response = ask(f"Let me see. {BOTH['hermes']}", tools=[TOOL])
    message, *calls = response.output
    assert message.content[0].text == "Let me see. "
    assert [(call.name, call.arguments) for call in calls] == ARGUMENTS
    results = [
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": calls[1].call_id,
            "output": [{"type": "input_text", "text": "no"}],
        },
    ]
    question = {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}
    conversation = [question, *(item.to_dict() for item in response.output), *results]
    assert ask("Rain.", input=conversation, tools=[TOOL], instructions="Be kind.").output_text == "Rain."
    expected = (
        "<system>Be kind.<user>weather?<assistant>Let me see. [weather Wien][weather Ulm]<tool>rain<tool>no"
    )
    assert expected in prompts[-1]


PATCH = '*** Begin Patch\n"a" \\ é 😀\n*** End Patch'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'}
# A request of Codex.
CODEX: Any = {
    "instructions": "You are a coding agent.",
    "tools": [
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": GRAMMAR},
        {"type": "web_search", "external_web_access": True},
        {"type": "namespace", "name": "mcp__docs__", "description": "Docs.", "tools": [TOOL]},
        TOOL,
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "high", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "session",
    "service_tier": "priority",
    "text": {"verbosity": "low"},
    "extra_body": {"client_metadata": {"session": "s"}},
}


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_agents_tools_are_told_as_their_clients_read_them(ask: Any, prompts: list[str]) -> None:
    (patch,) = ask(f"</think>{call('apply_patch', {'input': PATCH})}", **CODEX).output
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", PATCH)
    (named,) = ask(f"</think>{call('mcp__docs__weather', {'place': 'Wien'})}", **CODEX).output
    assert (named.type, named.name, named.namespace) == ("function_call", "weather", "mcp__docs__")
    results = ("done", "rain")
    history = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "patch"},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAA"},
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        patch.to_dict(),
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
        named.to_dict(),
        {"type": "function_call_output", "call_id": named.call_id, "output": "rain"},
    ]
    ask("</think>ok", input=history, **CODEX)
    for said in ("[apply_patch ", "[mcp__docs__weather", *map("<tool>{}".format, results)):
        assert said in prompts[-1]


def test_events_of_a_custom_call(client: openai.OpenAI, executor: ScriptedExecutor) -> None:
    executor.answers = [f"</think>{call('apply_patch', {'input': PATCH})}"]
    with client.responses.stream(model=MODEL, input="?", tools=CODEX["tools"]) as stream:
        events: list[Any] = list(stream)
        final: Any = stream.get_final_response()
    kinds = [event.type for event in events]
    told = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    texts = ("custom_tool_call_input.delta", "custom_tool_call_input.done")
    item = ("output_item.added", *texts, "output_item.done", "completed")
    assert told[-5:] == [f"response.{kind}" for kind in item]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 10
    assert "".join(deltas) == PATCH == final.output[-1].input


def test_what_is_left_out_is_said(client: openai.OpenAI, executor: ScriptedExecutor) -> None:
    executor.answers = ["ok"]
    raw = client.responses.with_raw_response.create(model=MODEL, input="?", **CODEX)
    warnings = raw.headers.get_list(HEADER)
    assert len(warnings) == 3
    for what in ("'web_search' is left out", "verbosity is left out", "the grammar of the tool"):
        assert any(what in warning for warning in warnings)
    assert HEADER not in client.responses.with_raw_response.create(model=MODEL, input="?").headers


def test_stored_items_may_be_referred_to(ask: Any, client: openai.OpenAI, prompts: list[str]) -> None:
    message = ask("</think>Rain.").output[-1]
    ask("ok", input=[{"type": "item_reference", "id": message.id}, {"role": "user", "content": "Why?"}])
    assert prompts[-1].endswith("Rain.<user>Why?<assistant>")
    with pytest.raises(openai.BadRequestError, match="no item 'msg_0'"):
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_0"}])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_that_must_come(ask: Any, choice: Any) -> None:
    response = ask(BOTH["hermes"].removeprefix("<tool_call>\n"), tools=[TOOL], tool_choice=choice)
    assert [(call.name, call.arguments) for call in response.output] == ARGUMENTS


def test_a_form_for_the_answer(ask: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    assert ask('{"a": 5}', text=form).output_text == '{"a": 5}'
    assert ask('{"b": 5}', text={"format": {"type": "json_object"}}).output_text == '{"b": 5}'


def test_logprobs(client: openai.OpenAI, executor: ScriptedExecutor) -> None:
    executor.answers = ["Rain."]
    asked: Any = {"model": MODEL, "input": "?", "include": ["message.output_text.logprobs"]}
    assert client.responses.create(**asked).output_text == "Rain."


def test_a_conversation_goes_on(
    client: openai.OpenAI, executor: ScriptedExecutor, prompts: list[str]
) -> None:
    executor.answers = ["Rain.", BOTH["hermes"], "ok"]
    first = client.responses.create(model=MODEL, input="weather?", instructions="Be kind.")
    asked: Any = {"model": MODEL, "tools": [TOOL], "previous_response_id": first.id}
    second = client.responses.create(input="And in Wien?", **asked)
    assert prompts[-1].endswith("<user>weather?<assistant>Rain.<user>And in Wien?<assistant>")
    assert "Be kind." not in prompts[-1]  # instructions apply to one response
    result: Any = {"type": "function_call_output", "call_id": second.output[0].call_id, "output": "rain"}
    asked["previous_response_id"] = second.id
    client.responses.create(input=[result], **asked)
    assert prompts[-1].endswith("<assistant>[weather Wien][weather Ulm]<tool>rain<assistant>")
    list(client.responses.create(input="Again?", stream=True, **asked))
    assert prompts[-1].endswith("[weather Ulm]<user>Again?<assistant>")


def test_responses_are_stored(client: openai.OpenAI, executor: ScriptedExecutor) -> None:
    executor.answers = ["Rain."]
    response = client.responses.create(model=MODEL, input="weather?")
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="no response"):
            call(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="?", previous_response_id=response.id)
    unstored = client.responses.create(model=MODEL, input="?", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_STORED_BYTES", 1000)
    store = ResponseStore()
    for number in range(50):
        store.add(StoredResponse({"id": str(number), "text": "x" * 100}, []))
    assert store.get("49").body["id"] == "49"
    with pytest.raises(ApiError):
        store.get("0")
    store.add(StoredResponse({"id": "long", "text": "x" * 2000}, []))
    with pytest.raises(ApiError):
        store.get("long")
    store.add(StoredResponse({"id": "short"}, []))
    assert store.get("short").body == {"id": "short"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"tools": [{"type": "nonsense"}]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"extra_body": {"beam_width": 4}}, "beam_width"),
    ],
    ids=str,
)
def test_a_bad_field_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(**({"model": MODEL, "input": "?"} | fields))
    assert refusal.value.param == param


def test_an_engine_failure_is_an_event(client: openai.OpenAI, executor: ScriptedExecutor) -> None:
    executor.error = RuntimeError("no memory left")
    with pytest.raises(openai.InternalServerError, match="no memory left"):
        client.responses.create(model=MODEL, input="?")
    *_, last = client.responses.create(model=MODEL, input="?", stream=True)
    executor.error = None
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "no memory left" in last.response.error.message


def test_arguments_that_were_cut(client: openai.OpenAI, executor: ScriptedExecutor) -> None:
    executor.answers = [BOTH["hermes"]]
    cut = len(f'<tool_call>\n{{"name": "weather", "arguments": {WIEN[:8]}')
    response = client.responses.create(model=MODEL, input="?", tools=[TOOL], max_output_tokens=cut)
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.arguments, call.status, response.status) == (WIEN[:8], "incomplete", "incomplete")
