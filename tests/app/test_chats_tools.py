"""Tools of MCP servers in chats: asked for, run or refused, told to the model, kept."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from neo_desktop.app.chats import answers
from neo_desktop.app.chats.messages import Round, to_send
from neo_desktop.app.chats.store import ChatStore
from neo_desktop.app.chats.tool_calls import REFUSED

from .chat_client import ChatClient, Json, RefusedError
from .conftest import RunningServer, eventually, running
from .fake_engine import MODEL, ScriptedExecutor, make_engine
from .mcp_server import SECRET, Notes, notes_server

# Its tools are explained, since it shows none; text of the model comes back unchanged.
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
QUESTION = "What is 1 + 2?"


def call_text(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD = call_text("add", a=1, b=2)
SLOW = call_text("slow")


@pytest.fixture(scope="module")
def shared_notes() -> Iterator[Notes]:
    with notes_server() as server:
        yield server


@pytest.fixture
def notes(shared_notes: Notes) -> Notes:
    shared_notes.calls.clear()
    return shared_notes


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor()


@pytest.fixture
def start(
    executor: ScriptedExecutor, notes: Notes, tmp_path: Path
) -> Callable[[], AbstractContextManager[RunningServer]]:
    """Start a server on the test's folder, with the MCP servers `notes` and `gone`."""
    config = {"mcpServers": {"notes": notes.config, "gone": {"command": "no-such-program"}}}
    (tmp_path / "mcp.json").write_text(json.dumps(config))
    engine = partial(make_engine, executor, num_blocks=4096, context_tokens=20_000, template=TEMPLATE)
    return lambda: running(engine(), data_folder=tmp_path)


@pytest.fixture
def server(start: Callable[[], AbstractContextManager[RunningServer]]) -> Iterator[RunningServer]:
    with start() as server:
        yield server


@pytest.fixture
def chats(server: RunningServer) -> ChatClient:
    return ChatClient(server.url)


def calls_of(answer: Json) -> list[Json]:
    return [call for one in answer["rounds"] for call in one["calls"]]


def asked(chats: ChatClient, chat_id: str, text: str = QUESTION) -> Json:
    """Ask, and wait until the user is asked about the call."""
    return chats.until(chats.ask(chat_id, text)[1], is_asked)


def is_asked(answer: Json) -> bool:
    return any(call["state"] == "asked" for call in calls_of(answer))


def test_a_call_runs_when_it_is_allowed_and_the_model_goes_on_with_the_result(
    chats: ChatClient,
    executor: ScriptedExecutor,
    notes: Notes,
    server: RunningServer,
    prompts: list[str],
    tmp_path: Path,
) -> None:
    executor.answers = [f"<think>hm</think>I add.\n{ADD}", "It is 3.", "Welcome."]
    chat_id = chats.new_chat(servers=["notes"])
    answer = asked(chats, chat_id)
    assert notes.calls == []
    assert answer["state"] == "streaming"
    chats.call("decide", "allow", answer["id"], "0.0")
    answer = chats.ended(answer)
    assert notes.calls == [(1, 2)]
    assert (answer["state"], answer["text"]) == ("done", "It is 3.")
    (one,) = answer["rounds"]
    assert (one["thought"], one["text"].strip()) == ("hm", "I add.")
    (call,) = one["calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1, "b": 2})
    assert (call["server"], call["state"], call["result"]) == ("notes", "done", "3")
    chats.answered(chat_id, "Thanks", answer["id"])
    first, second, third = prompts
    assert "Add two numbers" in first
    assert "<user><tool_response>\n3\n</tool_response><assistant>" in second
    assert "<tool_response>\n3\n</tool_response><assistant>It is 3.<user>Thanks" in third
    # All that the model wrote counts, and nothing that it read.
    written = len(f"<think>hm</think>I add.\n{ADD}") + len("It is 3.") + 2
    assert answer["figures"]["output_tokens"] == written
    assert answer["figures"]["prompt_tokens"] + written == len(second) + len("It is 3.") + 1
    saved = chats.call("export", chat_id)
    (copy,) = chats.call("add", saved)
    assert chats.chat(copy)["nodes"][1]["rounds"] == answer["rounds"]
    assert "*Tool: add {" in chats.call("export", chat_id, as_markdown=True)
    server.stop()
    store = ChatStore(tmp_path)
    chat = store.chat(chat_id)
    store.close()
    assert chat.settings.servers == ("notes",)
    assert chat.messages[1].rounds[0].calls[0].result == "3"
    assert [message["role"] for message in to_send(list(chat.messages[:3]), chat.settings)] == [
        *("user", "assistant", "tool", "assistant", "user")
    ]


def test_a_refused_call_does_not_run_and_the_model_is_told(
    chats: ChatClient, executor: ScriptedExecutor, notes: Notes, prompts: list[str]
) -> None:
    executor.answers = [ADD, "Then I guess."]
    answer = asked(chats, chats.new_chat(servers=["notes"]))
    chats.call("decide", "refuse", answer["id"], "0.0")
    answer = chats.ended(answer)
    assert (answer["state"], answer["text"]) == ("done", "Then I guess.")
    assert [call["state"] for call in calls_of(answer)] == ["refused"]
    assert notes.calls == []
    assert f"<tool_response>\n{REFUSED}" in prompts[-1]


def test_always_holds_for_this_tool_in_this_chat_until_the_program_ends(
    start: Callable[[], AbstractContextManager[RunningServer]], executor: ScriptedExecutor, notes: Notes
) -> None:
    executor.answers = [f"{ADD}\n{ADD}", ADD, "Three times 3.", ADD, "3", ADD]
    with start() as server:
        chats = ChatClient(server.url)
        chat_id = chats.new_chat(servers=["notes"])
        answer = asked(chats, chat_id)
        with pytest.raises(RefusedError, match="waits for no decision"):
            chats.call("decide", "allow", answer["id"], "0.1")
        chats.call("decide", "always", answer["id"], "0.0")
        answer = chats.ended(answer)
        assert [call["result"] for call in calls_of(answer)] == ["3", "3", "3"]
        answer = chats.answered(chat_id, "again", answer["id"])
        assert answer["text"] == "3"
        asked(chats, chats.new_chat(servers=["notes"]))
    assert len(notes.calls) == 4
    executor.answers = [ADD]
    executor._begun.clear()  # the next engine counts its requests from 0
    with start() as server:
        chats = ChatClient(server.url)
        chats.until(chats.ask(chat_id, "and now", answer["id"])[1], is_asked)
    assert len(notes.calls) == 4


def test_a_stopped_question_is_asked_again_when_the_answer_is_continued(
    chats: ChatClient, executor: ScriptedExecutor, notes: Notes
) -> None:
    executor.answers = [ADD, "It is 3."]
    answer = asked(chats, chats.new_chat(servers=["notes"]))
    stopped = chats.call("stop", answer["id"])
    assert stopped["state"] == "stopped"
    eventually(lambda: not chats.entries()[0]["is_streaming"])
    with pytest.raises(RefusedError, match="waits for no decision"):
        chats.call("decide", "allow", answer["id"], "0.0")
    chats.call("resume", answer["id"])
    chats.until(answer, lambda node: bool(node["state"] == "waiting" and is_asked(node)))
    eventually(lambda: _tried(chats, answer))
    answer = chats.ended(answer)
    assert (answer["state"], answer["text"]) == ("done", "It is 3.")
    assert notes.calls == [(1, 2)]


def test_an_interrupted_call_may_have_run_and_is_never_repeated_without_asking(
    chats: ChatClient, executor: ScriptedExecutor
) -> None:
    executor.answers = [SLOW, "Nothing."]
    answer = asked(chats, chats.new_chat(servers=["notes"]))
    chats.call("decide", "always", answer["id"], "0.0")
    chats.until(answer, lambda node: calls_of(node)[0]["state"] == "running")
    answer = chats.call("stop", answer["id"])
    one = TypeAdapter(Round).validate_python(answer["rounds"][0])
    assert "may have run" in one.messages()[-1]["content"]
    eventually(lambda: not chats.entries()[0]["is_streaming"])
    chats.call("resume", answer["id"])
    chats.until(answer, lambda node: bool(node["state"] == "waiting" and is_asked(node)))


def _tried(chats: ChatClient, answer: Json) -> bool:
    try:
        chats.call("decide", "allow", answer["id"], "0.0")
    except RefusedError:
        return False
    return True


def test_only_a_chat_that_switched_a_server_on_has_its_tools(
    chats: ChatClient, server: RunningServer, executor: ScriptedExecutor, notes: Notes, prompts: list[str]
) -> None:
    executor.answers = [ADD]
    answer = chats.answered(chats.new_chat(), QUESTION)
    assert (answer["rounds"], answer["text"]) == ([], ADD)
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    assert server.client().chat.completions.create(**body).choices[0].message.content == ADD
    chat_id = chats.new_chat(servers=["notes"])
    saved = chats.call("export", chat_id)
    (copy,) = chats.call("add", saved)
    assert chats.chat(copy)["settings"]["servers"] == []  # a file switches nothing on
    assert not any("Add two numbers" in prompt for prompt in prompts)
    assert notes.calls == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (call_text("fail"), "Error executing tool fail"),
        (call_text("add", a="one"), "Error executing tool add"),
        (call_text("a_long_one"), "[The result has 100,000 characters; these are the first 20,000.]"),
        (call_text("rm", all=True), "Error: there is no tool 'rm', only: add, fail, a_long_one, slow"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model(
    chats: ChatClient, executor: ScriptedExecutor, prompts: list[str], text: str, told: str
) -> None:
    executor.answers = [text, "I see."]
    _, answer = chats.ask(chats.new_chat(servers=["notes"], max_tokens=200), QUESTION)
    chats.until(answer, lambda node: bool(calls_of(node)))
    if "rm" not in text:
        eventually(lambda: _tried(chats, answer))
    answer = chats.ended(answer)
    (call,) = calls_of(answer)
    assert told in call["result"]
    assert SECRET not in call["result"]
    if "long" not in text:  # the result alone fills the context of this model
        assert call["state"] == "failed"
        assert answer["text"] == "I see."
        assert told in prompts[-1]


def test_a_server_that_does_not_start_fails_the_answer_in_words(chats: ChatClient) -> None:
    answer = chats.answered(chats.new_chat(servers=["gone"]), QUESTION)
    assert answer["state"] == "failed"
    assert "the MCP server 'gone' does not start: 'no-such-program' was not found" in answer["error"]


def test_a_model_that_calls_for_ever_is_stopped_and_can_be_continued(
    chats: ChatClient, executor: ScriptedExecutor, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_ROUNDS", 3)
    executor.answers = [ADD]
    answer = asked(chats, chats.new_chat(servers=["notes"]))
    chats.call("decide", "always", answer["id"], "0.0")
    answer = chats.ended(answer)
    assert answer["state"] == "stopped"
    assert "called tools 3 times in a row" in answer["error"]
    assert len(answer["rounds"]) == 3
    assert len(notes.calls) == 2
    executor.answers = ["Enough."]
    chats.call("resume", answer["id"])
    answer = chats.ended(answer)
    assert (answer["state"], answer["text"], len(notes.calls)) == ("done", "Enough.", 3)
