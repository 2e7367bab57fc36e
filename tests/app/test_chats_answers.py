"""Answers that the server writes, saves and shows."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from neo_desktop.app.chats.database import StoreError
from neo_desktop.app.chats.store import ChatStore
from neo_desktop.app.generation import Generation
from neo_desktop.app.service import EngineService
from neo_desktop.app.shelf.hosting import ModelHost
from neo_desktop.app.web.server import Server, claim_port, create_app

from .chat_client import ChatClient
from .conftest import RunningServer, eventually, is_idle, running
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
    assert chat["context"] == {"used_tokens": len(prompt) + 5, "max_tokens": 512}
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
    variant = chats.ended(chats.post(f"/messages/{second['id']}/retry"))
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
    # Any message of a branch stands for the newest way down from it.
    assert chats.patch(chat_id, leaf_id=roots[0]["id"])["leaf_id"] == second["id"]
    variant = chats.ended(chats.post(f"/messages/{first['id']}/retry"))
    assert chats.chat(chat_id)["leaf_id"] == variant["id"]
    assert variant["parent_id"] == first["parent_id"]


def test_an_answer_goes_on_when_nobody_looks_and_is_stopped_at_once(
    chats: ChatClient, executor: FakeExecutor, page_server: RunningServer
) -> None:
    executor.open.clear()
    chat_id = chats.new_chat()
    with chats.events(chat=chat_id) as page:
        _, answer = chats.ask(chat_id, "one")
        executor.steps.release(3)
        page.read_until(lambda page: answer["id"] in page.nodes and bool(page.nodes[answer["id"]]["blocks"]))
    executor.steps.release(3)  # the page is gone
    grown = chats.until(answer, lambda node: len(node["text"]) >= 5)
    assert grown["state"] == "streaming"
    assert chats.get("/chats")["chats"][0]["is_streaming"]
    stopped = chats.post(f"/messages/{answer['id']}/stop")  # while an iteration runs
    assert stopped["state"] == "stopped"
    assert stopped["text"].startswith(grown["text"])
    executor.open.set()
    eventually(lambda: is_idle(page_server.service))
    eventually(lambda: not chats.get("/chats")["chats"][0]["is_streaming"])
    assert chats.node(chat_id, answer["id"]) == stopped


def test_what_was_stopped_can_be_continued(chats: ChatClient, executor: FakeExecutor) -> None:
    chat_id = chats.new_chat()
    executor.open.clear()
    _, answer = chats.ask(chat_id, "one")
    executor.steps.release(4)
    chats.until(answer, lambda node: len(node["text"]) >= 3)
    stopped = chats.post(f"/messages/{answer['id']}/stop")
    executor.open.set()
    chats.patch(chat_id, settings={"max_tokens": 4})
    resumed = chats.post(f"/messages/{answer['id']}/continue")
    assert (resumed["state"], resumed["text"]) == ("waiting", stopped["text"])
    whole = chats.ended(answer)
    count = len(stopped["text"]) + 4
    assert whole["text"] == letters("<user>one<assistant>", count)
    assert whole["figures"]["output_tokens"] == count
    assert whole["figures"]["prompt_tokens"] == len("<user>one<assistant>")


def test_several_chats_are_answered_at_once(
    chats: ChatClient, executor: FakeExecutor, page_server: RunningServer
) -> None:
    executor.open.clear()
    asked = [chats.ask(chats.new_chat(max_tokens=20), f"{number}")[1] for number in range(8)]
    eventually(lambda: page_server.service.num_queued == len(asked))
    executor.steps.release(6)
    for answer in asked:
        chats.until(answer, lambda node: bool(node["text"]))
    assert all(chat["is_streaming"] for chat in chats.get("/chats")["chats"])
    executor.open.set()
    assert {chats.ended(answer)["text"] for answer in asked} == {letters("<user>1<assistant>", 20)}


def test_all_who_look_see_the_same(chats: ChatClient, executor: FakeExecutor) -> None:
    executor.open.clear()
    chat_id = chats.new_chat(max_tokens=30)
    with chats.events(chat=chat_id) as first:
        _, answer = chats.ask(chat_id, "one")
        executor.steps.release(10)
        first.read_until(lambda page: bool(page.nodes.get(answer["id"], {}).get("blocks")))
        with chats.events(chat=chat_id) as second:  # comes in the middle
            second.read_until(lambda page: answer["id"] in page.nodes)
            executor.open.set()
            for page in (first, second):
                page.read_until(lambda page: page.nodes[answer["id"]]["state"] == "done")
                page.read_until(lambda page: not page.chats[0]["is_streaming"])
    assert first.nodes == second.nodes == {node["id"]: node for node in chats.chat(chat_id)["nodes"]}
    assert first.chat["leaf_id"] == answer["id"]
    assert "context" in first.names


@pytest.mark.parametrize(
    ("text", "settings", "reason"),
    [
        ("x" * 600, {}, "maximum context length is 512"),
        ("one", {"system_prompt": "refuse"}, "that I will not read"),
        ("one", {"max_tokens": 1000}, "1000 by max_tokens"),
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
    chats.patch(chat_id, settings={"max_tokens": 1})
    assert chats.answered(chat_id, "again", answer["id"])["state"] == "done"  # as if never asked


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
    for path, body in (
        (f"/messages/{answer['id']}/continue", None),
        (f"/chats/{chat_id}/messages", {"text": "two", "parent_id": answer["id"]}),
    ):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            chats.post(path, body)
        assert refused.value.response.status_code == 409
        assert "wait for its end" in refused.value.response.json()["error"]["message"]


def test_a_deleted_chat_is_answered_no_more_and_comes_back_with_what_it_had(
    chats: ChatClient, executor: FakeExecutor
) -> None:
    executor.open.clear()
    chat_id = chats.new_chat()
    _, answer = chats.ask(chat_id, "one")
    executor.steps.release(4)
    grown = chats.until(answer, lambda node: len(node["text"]) >= 3)
    chats.call("DELETE", f"/chats/{chat_id}")
    assert chats.titles() == []
    restored = chats.post(f"/chats/{chat_id}/restore")
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
    with chats.events(chat=chat_id) as page:
        _, answer = chats.ask(chat_id, "one")
        monkeypatch.setattr(ChatStore, "save", full)
        executor.steps.release(5)
        page.read_until(lambda page: "the disk is full" in (page.notice or ""))
        executor.open.set()
        page.read_until(lambda page: page.nodes[answer["id"]]["state"] == "done")
        monkeypatch.undo()
        page.read_until(lambda page: page.notice is None)
        page.read_until(lambda page: not page.chats[0]["is_streaming"])
    assert chats.ended(answer)["text"] == letters("<user>one<assistant>", 30)


def test_a_question_without_a_model_is_kept_and_can_be_answered_later(tmp_path: Path) -> None:
    with serving(ModelHost(), tmp_path) as chats:
        chat_id = chats.new_chat()
        assert chats.chat(chat_id)["context"] is None
        answer = chats.answered(chat_id, "one")
        assert (answer["state"], answer["text"]) == ("failed", "")
        assert "load one" in answer["error"]
        assert chats.get("/examples")["examples"]
    with running(make_engine(FakeExecutor()), data_folder=tmp_path) as server:
        chats = ChatClient(server.url)
        chats.patch(chat_id, settings={"max_tokens": 3})
        assert chats.ended(chats.post(f"/messages/{answer['id']}/retry"))["state"] == "done"
        chats.post(f"/messages/{answer['id']}/continue")
        assert chats.ended(answer)["text"] == letters("<user>one<assistant>", 3)


def test_a_question_waits_for_the_model_that_is_being_loaded(tmp_path: Path) -> None:
    may_load = threading.Event()

    def load(name: str, progress: Callable[[float, str], None]) -> EngineService:
        assert may_load.wait(30)
        return EngineService(make_engine(FakeExecutor()))

    with serving(ModelHost(load=load, name="slow"), tmp_path) as chats:
        chat_id = chats.new_chat(max_tokens=3)
        with chats.events(chat=chat_id) as page:
            _, answer = chats.ask(chat_id, "one")
            page.read_until(lambda page: answer["id"] in page.nodes)
            assert chats.node(chat_id, answer["id"])["state"] == "waiting"
            assert page.chat["context"] is None
            may_load.set()
            page.read_until(lambda page: page.nodes[answer["id"]]["state"] == "done")
            page.read_until(lambda page: (page.chat["context"] or {}).get("max_tokens") == 512)


@contextmanager
def serving(host: ModelHost, folder: Path) -> Iterator[ChatClient]:
    sock = claim_port("127.0.0.1", 0)
    is_ready = threading.Event()
    server = Server(create_app(host, data_folder=folder), is_ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    assert is_ready.wait(30)
    try:
        yield ChatClient(f"http://127.0.0.1:{sock.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(30)


def test_chats_need_the_key_like_everything_else(executor: FakeExecutor, tmp_path: Path) -> None:
    with running(make_engine(executor), data_folder=tmp_path, api_key="a-key") as server:
        for path in ("/api/chats", "/api/events"):
            assert httpx.get(f"{server.url}{path}", trust_env=False).status_code == 401
        # As a browser does that has asked for the key when it got the page.
        answer = httpx.get(f"{server.url}/api/chats", auth=("me", "a-key"), trust_env=False)
        assert answer.json() == {"chats": [], "notice": None}


def test_serve_has_no_chats(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/api/chats", trust_env=False).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/chats", b'{"settings": {"temperature": 1000}}', 400),
        ("POST", "/chats", b'{"settings": {"top_k": 1e300}}', 400),
        ("POST", "/chats", b'{"settings": {"max_tokens": 100000000000000000000}}', 400),
        ("POST", "/chats", b'{"settings": {"colour": 1}}', 400),
        ("POST", "/chats", b"[" * 100_000, 400),
        ("POST", "/chats/CHAT/messages", b'{"text": " "}', 400),
        ("POST", "/chats/CHAT/messages", b'{"text": "\\ud800"}', 400),
        ("POST", "/chats/CHAT/messages", b'{"text": "x", "parent_id": "none"}', 404),
        ("POST", "/chats/none/messages", b'{"text": "x"}', 404),
        ("PATCH", "/chats/CHAT", b'{"title": ""}', 400),
        ("PATCH", "/chats/CHAT", b'{"leaf_id": "none"}', 404),
        ("DELETE", "/chats/none", b"", 404),
        ("POST", "/messages/none/stop", b"", 404),
        ("GET", "/chats/%00", b"", 404),
        ("GET", "/nothing", b"", 404),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    chats: ChatClient, method: str, path: str, body: bytes, status: int
) -> None:
    chat_id = chats.new_chat()
    answer = chats.http.request(method, path.replace("CHAT", chat_id), content=body)
    assert answer.status_code == status
    assert len(answer.json()["error"]["message"]) > 10
    assert chats.chat(chat_id)["nodes"] == []
