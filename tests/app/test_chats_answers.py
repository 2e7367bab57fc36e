"""Answers: generation, saving and display by the server."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from neo_desktop.app.application import create_app
from neo_desktop.app.chats.database import StoreError
from neo_desktop.app.chats.store import ChatStore
from neo_desktop.app.engines.generation import Generation
from neo_desktop.app.engines.service import EngineService
from neo_desktop.app.shelf.hosting import ModelHost

from .chat_client import ChatClient, RefusedError, chats_file, install, message
from .conftest import RunningServer, eventually, is_idle, running, served
from .fake_engine import MODEL, FakeExecutor, make_engine


@pytest.fixture
def page_server(executor: FakeExecutor, tmp_path: Path) -> Iterator[RunningServer]:
    with running(make_engine(executor, num_blocks=512), data_folder=tmp_path) as server:
        yield server


@pytest.fixture
def chats(page_server: RunningServer) -> ChatClient:
    return ChatClient(page_server.url)


def letters(prompt: str, count: int) -> str:
    return "".join(chr(ord("a") + (len(prompt) + i) % 26) for i in range(count))


def test_a_question_is_answered_and_kept(chats: ChatClient) -> None:
    chat_id = chats.new_chat(max_tokens=5)
    question, answer = chats.ask(chat_id, "What is  this?")
    assert (answer["state"], answer["parent_id"]) == ("waiting", question["id"])
    answer = chats.ended(answer)
    prompt = "<user>What is  this?<assistant>"
    assert answer["text"] == letters(prompt, 5)
    assert answer["state"] == "done"
    figures = answer["figures"]
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (len(prompt), 5)
    assert (figures["finish_reason"], figures["model"]) == ("length", MODEL)
    assert figures["first_token_s"] > 0
    chat = chats.chat(chat_id)
    assert chat["title"] == "What is this?"
    assert chat["leaf_id"] == answer["id"]
    assert chat["used_tokens"] == len(prompt) + 5
    assert [node["id"] for node in chat["nodes"]] == [question["id"], answer["id"]]


def test_the_model_reads_the_branch_that_is_asked_on(
    chats: ChatClient, monkeypatch: pytest.MonkeyPatch, page_server: RunningServer
) -> None:
    prompts: list[str] = []
    submit = page_server.service.submit

    async def listen(asked: Sequence[object], *args: Any, **options: Any) -> Generation:
        prompts.extend(map(str, asked))
        return await submit(asked, *args, **options)

    monkeypatch.setattr(page_server.service, "submit", listen)
    chat_id = chats.new_chat(max_tokens=2, system_prompt="Be brief.")
    first = chats.answered(chat_id, "one")
    second = chats.answered(chat_id, "two", first["id"])
    variant = chats.ended(chats.call("retry", second["id"]))
    chats.answered(chat_id, "other", first["id"])
    chats.answered(chat_id, "three", variant["id"])
    start = f"<system>Be brief.<user>one<assistant>{first['text']}"
    two = f"{start}<user>two<assistant>"
    assert prompts == [
        "<system>Be brief.<user>one<assistant>",
        two,
        two,
        f"{start}<user>other<assistant>",
        f"{two}{variant['text']}<user>three<assistant>",
    ]


def test_branches_and_variants_stay_and_can_be_shown(chats: ChatClient) -> None:
    chat_id = chats.new_chat(max_tokens=1)
    first = chats.answered(chat_id, "one")
    second = chats.answered(chat_id, "two", first["id"])
    edited = chats.answered(chat_id, "uno")
    chat = chats.chat(chat_id)
    assert len(chat["nodes"]) == 6
    assert chat["leaf_id"] == edited["id"]
    roots = [node for node in chat["nodes"] if node["parent_id"] is None]
    assert [node["text"] for node in roots] == ["one", "uno"]
    # Any message of a branch selects the newest path below it.
    chats.call("show", chat_id, roots[0]["id"])
    assert chats.chat(chat_id)["leaf_id"] == second["id"]
    variant = chats.ended(chats.call("retry", first["id"]))
    assert chats.chat(chat_id)["leaf_id"] == variant["id"]
    assert variant["parent_id"] == first["parent_id"]


def test_an_answer_goes_on_when_nobody_looks_and_is_stopped_at_once(
    chats: ChatClient, executor: FakeExecutor, page_server: RunningServer
) -> None:
    executor.open.clear()
    chat_id = chats.new_chat()
    _, answer = chats.ask(chat_id, "one")
    executor.steps.release(6)
    grown = chats.until(answer, lambda node: len(node["text"]) >= 5)
    assert grown["state"] == "streaming"
    assert chats.entries()[0]["is_streaming"]
    stopped = chats.call("stop", answer["id"])  # while an iteration runs
    assert stopped["state"] == "stopped"
    assert stopped["text"].startswith(grown["text"])
    executor.open.set()
    eventually(lambda: is_idle(page_server.service))
    eventually(lambda: not chats.entries()[0]["is_streaming"])
    assert chats.node(chat_id, answer["id"]) == stopped


def test_what_was_stopped_can_be_continued(chats: ChatClient, executor: FakeExecutor) -> None:
    chat_id = chats.new_chat()
    executor.open.clear()
    _, answer = chats.ask(chat_id, "one")
    executor.steps.release(4)
    chats.until(answer, lambda node: len(node["text"]) >= 3)
    stopped = chats.call("stop", answer["id"])
    executor.open.set()
    chats.call("set", chat_id, max_tokens=4)
    resumed = chats.call("resume", answer["id"])
    assert (resumed["state"], resumed["text"]) == ("waiting", stopped["text"])
    whole = chats.ended(answer)
    count = len(stopped["text"]) + 4
    assert whole["text"] == letters("<user>one<assistant>", count)
    assert whole["figures"]["output_tokens"] == count
    assert whole["figures"]["prompt_tokens"] == len("<user>one<assistant>")


@pytest.mark.parametrize(
    ("thought", "text", "thoughts"), [("hm", "", "open"), ("hm", "So", "possible"), ("", "So", "possible")]
)
def test_a_continued_answer_thinks_as_long_as_its_thought_is_open(
    executor: FakeExecutor, tmp_path: Path, thought: str, text: str, thoughts: str
) -> None:
    """Stop strings apply after the end of the thought only."""
    engine = make_engine(executor, num_blocks=512, template="<assistant><think>")
    answer = message("assistant", "a", id="b", text=text, thought=thought, state="cut")
    file = json.dumps(chats_file(message("user", text="one"), answer, leaf_id="b"))
    with running(engine, data_folder=tmp_path) as server:
        chats = ChatClient(server.url)
        (chat_id,) = chats.call("add", file)
        chats.call("set", chat_id, max_tokens=2)
        node = chats.chat(chat_id)["nodes"][-1]
        chats.call("resume", node["id"])
        chats.ended(node)
    assert executor.seen[-1].params.thoughts == thoughts


@pytest.mark.parametrize(
    ("text", "settings", "reason"),
    [
        ("x" * 600, {}, "maximum context length is 512"),
        ("one", {"system_prompt": "refuse"}, "that I will not read"),
    ],
)
def test_what_cannot_be_answered_says_why_and_keeps_the_question(
    chats: ChatClient, text: str, settings: dict[str, object], reason: str
) -> None:
    chat_id = chats.new_chat(**settings)
    answer = chats.answered(chat_id, text)
    assert answer["state"] == "failed"
    assert reason in answer["error"]
    assert chats.chat(chat_id)["nodes"][0]["text"] == text
    chats.call("set", chat_id, max_tokens=1)
    assert chats.answered(chat_id, "again", answer["id"])["state"] == "done"  # the failed turn is ignored


def test_the_longest_answer_is_a_limit_not_a_need(chats: ChatClient) -> None:
    assert chats.answered(chats.new_chat(max_tokens=100_000), "one")["state"] == "done"


def test_an_engine_that_fails_is_told(chats: ChatClient, executor: FakeExecutor) -> None:
    executor.error = RuntimeError("a broken kernel")
    answer = chats.answered(chats.new_chat(), "one")
    assert answer["state"] == "failed"
    assert "broken kernel" in answer["error"]


def test_an_answer_under_way_cannot_be_followed_or_continued(
    chats: ChatClient, executor: FakeExecutor
) -> None:
    executor.open.clear()
    chat_id = chats.new_chat()
    _, answer = chats.ask(chat_id, "one")
    for call in (("resume", answer["id"]), ("ask", chat_id, answer["id"], "two")):
        with pytest.raises(RefusedError, match="wait for its end") as refused:
            chats.call(*call)
        assert refused.value.kind == "NotPossibleError"


def test_a_deleted_chat_is_answered_no_more_and_comes_back_with_what_it_had(
    chats: ChatClient, executor: FakeExecutor
) -> None:
    executor.open.clear()
    chat_id = chats.new_chat()
    _, answer = chats.ask(chat_id, "one")
    executor.steps.release(4)
    grown = chats.until(answer, lambda node: len(node["text"]) >= 3)
    chats.call("delete", chat_id)
    assert chats.titles() == []
    chats.call("restore", chat_id)
    restored = chats.chat(chat_id)
    assert restored["nodes"][1]["state"] == "stopped"
    assert restored["nodes"][1]["text"].startswith(grown["text"])
    assert chats.titles() == ["one"]


def test_answers_that_cannot_be_saved_go_on_and_are_saved_later(
    chats: ChatClient, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreError("the disk is full. Make room on it")

    executor.open.clear()
    chat_id = chats.new_chat(max_tokens=30)
    _, answer = chats.ask(chat_id, "one")
    monkeypatch.setattr(ChatStore, "save", full)
    executor.steps.release(5)
    eventually(lambda: "the disk is full" in (chats.call("notice") or ""))
    executor.open.set()
    assert chats.ended(answer)["state"] == "done"
    monkeypatch.undo()
    eventually(lambda: chats.call("notice") is None)
    eventually(lambda: not chats.entries()[0]["is_streaming"])
    assert chats.ended(answer)["text"] == letters("<user>one<assistant>", 30)


def test_a_question_without_a_model_is_kept_and_can_be_answered_later(tmp_path: Path) -> None:
    with serving(ModelHost(), tmp_path) as chats:
        chat_id = chats.new_chat()
        answer = chats.answered(chat_id, "one")
        assert (answer["state"], answer["text"]) == ("failed", "")
        assert "load one" in answer["error"]
    with running(make_engine(FakeExecutor()), data_folder=tmp_path) as server:
        chats = ChatClient(server.url)
        chats.call("set", chat_id, max_tokens=3)
        assert chats.ended(chats.call("retry", answer["id"]))["state"] == "done"
        chats.call("resume", answer["id"])
        assert chats.ended(answer)["text"] == letters("<user>one<assistant>", 3)


def test_a_question_waits_for_the_model_that_is_being_loaded(tmp_path: Path) -> None:
    may_load = threading.Event()

    def load(name: str, progress: Callable[[float, str], None]) -> EngineService:
        assert may_load.wait(30)
        return EngineService(make_engine(FakeExecutor()))

    with serving(ModelHost(load=load, name="slow"), tmp_path) as chats:
        chat_id = chats.new_chat(max_tokens=3)
        _, answer = chats.ask(chat_id, "one")
        assert chats.node(chat_id, answer["id"])["state"] == "waiting"
        may_load.set()
        assert chats.ended(answer)["state"] == "done"


@contextmanager
def serving(host: ModelHost, folder: Path) -> Iterator[ChatClient]:
    app = create_app(host, data_folder=folder)
    install(app)
    with served(app) as url:
        yield ChatClient(url)


@pytest.mark.parametrize(
    ("call", "settings", "kind"),
    [
        (("new_chat",), {"temperature": 1000}, "SettingError"),
        (("new_chat",), {"max_tokens": -5}, "SettingError"),
        (("set", "CHAT"), {"temperature": 1000}, "SettingError"),
        (("ask", "CHAT", None, " "), {}, "NotPossibleError"),
        (("ask", "CHAT", None, "x" * 2_000_001), {}, "NotPossibleError"),
        (("ask", "CHAT", None, "x", ["file"] * 21), {}, "NotPossibleError"),
        (("new_chat",), {"system_prompt": "x" * 2_000_001}, "NotPossibleError"),
        (("ask", "CHAT", "none", "x"), {}, "NotFoundError"),
        (("ask", "none", None, "x"), {}, "NotFoundError"),
        (("show", "CHAT", "none"), {}, "NotFoundError"),
        (("delete", "none"), {}, "NotFoundError"),
        (("stop", "none"), {}, "NotFoundError"),
        (("chat", "\0"), {}, "NotFoundError"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    chats: ChatClient, call: tuple[str | None, ...], settings: dict[str, Any], kind: str
) -> None:
    chat_id = chats.new_chat()
    with pytest.raises(RefusedError, match=r".{10}") as refused:
        chats.call(*(chat_id if one == "CHAT" else one for one in call), **settings)
    assert refused.value.kind == kind
    assert chats.chat(chat_id)["nodes"] == []
