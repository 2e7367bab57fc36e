"""/v1/messages, as the anthropic client sees it."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from neo_desktop.app.api.messages import MessagesRequest
from neo_desktop.app.generate.conversation import EFFORT_TOKENS
from neo_desktop.app.web.warnings import HEADER

from .conftest import RunningServer, running
from .fake_engine import MODEL, ScriptedExecutor, make_engine
from .test_chat import BOTH, TEMPLATES, ULM, WIEN

TOOL: Any = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
QUESTION: Any = [{"role": "user", "content": "weather?"}]


@pytest.fixture(scope="module")
def executor() -> ScriptedExecutor:
    return ScriptedExecutor()


@pytest.fixture(scope="module")
def server(executor: ScriptedExecutor) -> Iterator[RunningServer]:
    engine = make_engine(executor, template=TEMPLATES["hermes"], context_tokens=4096, num_blocks=512)
    with running(engine, api_key="key") as shared:
        yield shared


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def ask(claude: anthropic.Anthropic, executor: ScriptedExecutor) -> Any:
    def asking(answer: str, **fields: Any) -> anthropic.types.Message:
        """Ask twice, unstreamed and streamed, and compare the answers."""
        asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 1000} | fields
        executor.answers = [answer]
        whole = claude.messages.create(**asked)
        with claude.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert without_ids(streamed) == without_ids(whole)
        return whole

    return asking


def without_ids(message: Any) -> Any:
    fields = message.to_dict()
    del fields["id"]
    fields.pop("stop_details", None)  # a field of the client alone
    usage = fields.pop("usage")
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in fields.pop("content")]
    return fields, blocks, prompt, usage["output_tokens"]


def test_text(ask: Any) -> None:
    message = ask("Rain.")
    (block,) = message.content
    assert (block.type, block.text) == ("text", "Rain.")
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.usage.output_tokens == len("Rain.") + 1
    assert ask("Rain.", max_tokens=2).stop_reason == "max_tokens"


def test_stop_sequences(ask: Any) -> None:
    message = ask("one two three", stop_sequences=["four", "two"])
    assert message.content[0].text == "one "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
    assert ask("one", stop_sequences=["two"]).stop_reason == "end_turn"


def test_thinking(ask: Any, prompts: list[str]) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = ask("hm\n</think>\n\nRain.", thinking=thinking, max_tokens=2000)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("hm\n", "Rain.")
    assert prompts[-1].endswith("<think>\n")
    ask("Rain.", thinking={"type": "disabled"})
    assert prompts[-1].endswith("<assistant>")


def test_a_budget_limits_thoughts() -> None:
    body = {"model": "m", "max_tokens": 9000, "messages": [{"role": "user", "content": "Hm?"}]}
    budget = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    low = {"output_config": {"effort": "low"}}
    for fields, template, limit in (
        ({}, "enable_thinking", None),
        (budget, "enable_thinking", 1024),
        (budget | low, "reasoning_effort", 1024),
        (low, "enable_thinking", EFFORT_TOKENS["low"]),
        (low, "reasoning_effort", None),
    ):
        request = MessagesRequest.model_validate(body | fields)
        assert request.conversation(template).thought_tokens == limit


def test_tools(ask: Any, prompts: list[str]) -> None:
    message = ask(f"Let me see. {BOTH['hermes']}", tools=[TOOL])
    text, first, second = message.content
    assert text.text == "Let me see. "
    assert (first.name, first.input) == ("weather", {"place": "Wien"})
    assert (second.name, second.input) == ("weather", {"place": "Ulm"})
    assert message.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": first.id, "content": "rain"},
        {
            "type": "tool_result",
            "tool_use_id": second.id,
            "is_error": True,
            "content": [{"type": "text", "text": "no"}],
        },
        {"type": "text", "text": "So?"},
    ]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": [block.to_dict() for block in message.content]},
        {"role": "user", "content": results},
    ]
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    assert ask("Rain.", messages=messages, tools=[TOOL], system=system).content[0].text == "Rain."
    assert "<system>Be kind.<user>weather?<assistant>Let me see. [weather Wien][weather Ulm]" in prompts[-1]
    assert prompts[-1].endswith("<tool>rain<tool>Error: no<user>So?<assistant>")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_must_come(ask: Any, choice: Any) -> None:
    rest = BOTH["hermes"].removeprefix("<tool_call>\n")
    message = ask(rest, tools=[TOOL], tool_choice=choice)
    assert [block.input for block in message.content] == [{"place": "Wien"}, {"place": "Ulm"}]
    assert ask(BOTH["hermes"], tools=[TOOL], tool_choice={"type": "none"}).stop_reason == "end_turn"


def test_a_schema_for_the_answer(ask: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "schema": schema}}
    assert ask('{"a": 5}', output_config=form).content[0].text == '{"a": 5}'


def test_hints_of_agents_are_taken(ask: Any, prompts: list[str]) -> None:
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    extra = {"context_management": keep, "output_config": {"effort": "high"}, "metadata": {"user_id": "x"}}
    assert ask("hm</think>Rain.", extra_body=extra).content[1].text == "Rain."
    assert prompts[-1].endswith("<think>\n")


def test_an_answer_may_have_been_begun(ask: Any, prompts: list[str]) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "It is"}]
    assert ask(" rain.", messages=begun).content[0].text == " rain."
    assert prompts[-1].endswith("<assistant>It is")


def test_arguments_that_were_cut_are_not_lost(
    claude: anthropic.Anthropic, executor: ScriptedExecutor
) -> None:
    executor.answers = [BOTH["hermes"]]
    written = f'<tool_call>\n{{"name": "weather", "arguments": {WIEN}'
    for cut, arguments in (
        (len(written), json.loads(WIEN)),
        (len(written) - len(WIEN) + 8, {}),
        (len(written) - len(WIEN) - 3, {}),
        (len("<tool_cal"), None),
    ):
        message = claude.messages.create(model=MODEL, messages=QUESTION, tools=[TOOL], max_tokens=cut)
        assert [block.input for block in message.content if block.type == "tool_use"] == (
            [] if arguments is None else [arguments]
        )
        assert message.stop_reason == "max_tokens"
        assert not [block for block in message.content if block.type == "text"]


KEPT = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
# A request of Claude Code.
CLAUDE_CODE: Any = {
    "model": "claude-sonnet-9",
    "max_tokens": 64_000,
    "tools": [
        TOOL | {"cache_control": KEPT, "eager_input_streaming": True, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "adaptive", "display": "omitted"},
    "metadata": {"user_id": "u"},
    "extra_body": {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 1000}},
        "speed": "fast",
    },
    "extra_headers": {"anthropic-beta": "claude-code-20250219,context-management-2025-06-27"},
}


def test_claude_codes_requests_are_answered(ask: Any, prompts: list[str]) -> None:
    history = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": KEPT}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {}, "cache_control": KEPT},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "rain", "cache_control": KEPT}
            ],
        },
    ]
    seen = []
    for secret in ("a", "b"):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={secret};"},
            {"type": "text", "text": "Be kind.", "cache_control": KEPT},
        ]
        assert (
            ask("</think>Rain.", messages=history, system=system, **CLAUDE_CODE).content[-1].text == "Rain."
        )
        seen.append(prompts[-1])
    assert "<system>Be kind.<user>hi" in seen[0]
    assert seen[0] == seen[1]


def test_max_tokens_above_the_context_take_what_there_is(
    ask: Any, claude: anthropic.Anthropic, executor: ScriptedExecutor
) -> None:
    question = [{"role": "user", "content": "y" * 3600}]
    message = ask("x" * 5000, max_tokens=100_000, messages=question)
    assert message.stop_reason == "max_tokens"
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) + len(
        message.content[0].text
    ) == pytest.approx(4096, abs=2)
    for length in (4096, 400_000):
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4095 maximum"):
            claude.messages.create(
                model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "x" * length}]
            )


def test_what_is_left_out_is_said(claude: anthropic.Anthropic, executor: ScriptedExecutor) -> None:
    executor.answers = ["ok"]
    asked: Any = {"messages": QUESTION} | CLAUDE_CODE
    raw = claude.messages.with_raw_response.create(**asked)
    assert raw.headers.get_list(HEADER) == [
        "a part of type 'web_search_20250305' is left out: this server has no tools of its own"
    ]


def test_events_of_a_stream(server: RunningServer, executor: ScriptedExecutor) -> None:
    executor.answers = [f"Hm. {BOTH['hermes']}"]
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 1000, "stream": True, "tools": [TOOL]}
    headers = {"x-api-key": "key"}
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False, headers=headers) as http:
        text = http.post("/v1/messages", json=body).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    kinds = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    assert ULM.replace('"', '\\"')[-8:] not in text  # arguments arrive in many pieces


def test_tokens_can_be_counted(claude: anthropic.Anthropic, executor: ScriptedExecutor) -> None:
    executor.answers = ["ok"]
    asked: Any = {"model": MODEL, "messages": QUESTION, "tools": [TOOL], "system": "Be kind."}
    usage = claude.messages.create(max_tokens=5, **asked).usage
    counted = claude.messages.count_tokens(**asked).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"extra_body": {"temperature": "hot"}},
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"system": [{"type": "text", "text": "x", "anything": 1}]},
        {"messages": [{"role": "assistant", "content": [{"type": "compaction", "content": "x"}]}]},
        {"tool_choice": {"type": "any"}},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"extra_body": {"beam_width": 4}},
    ],
    ids=str,
)
def test_a_bad_field_is_named(claude: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError) as refusal:
        claude.messages.create(**({"model": MODEL, "messages": QUESTION, "max_tokens": 5} | fields))
    body: Any = refusal.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    name = next(iter(fields.get("extra_body", fields)))
    assert name in body["error"]["message"]


def test_errors_have_anthropics_shape(server: RunningServer, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match=f"'{MODEL}' is"):
        claude.messages.create(model="other", messages=QUESTION, max_tokens=5)
    stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError, match="API key") as refusal:
        stranger.messages.create(model=MODEL, messages=QUESTION, max_tokens=5)
    assert refusal.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_an_engine_failure_is_an_event(
    claude: anthropic.Anthropic, executor: ScriptedExecutor, ask: Any
) -> None:
    executor.error = RuntimeError("no memory left")
    fields: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 5}
    with pytest.raises(anthropic.InternalServerError, match="no memory left"):
        claude.messages.create(**fields)
    with (
        pytest.raises(anthropic.APIStatusError, match="no memory left"),
        claude.messages.stream(**fields) as events,
    ):
        list(events)
    executor.error = None
    assert ask("Rain.").content[0].text == "Rain."
