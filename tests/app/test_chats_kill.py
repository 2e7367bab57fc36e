"""A server that dies in mid-answer, and its successor on the same file."""

import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from held_process import HeldProcess, held_process

from .chat_client import ChatClient, Json, RefusedError
from .conftest import eventually

PROGRAM = """
    import sys, threading
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from app import chat_client
    from app.fake_engine import FakeExecutor, make_engine
    from neo_desktop.app.shelf.hosting import ModelHost
    from neo_desktop.app.application import create_app
    from neo_desktop.app.web.server import claim_port, serve
    from neo_desktop.app.engines.service import EngineService

    executor = FakeExecutor()
    executor.open.clear()

    def obey():  # a number: so many iterations; anything else: go on
        for line in sys.stdin:
            executor.steps.release(int(line)) if line.strip().isdigit() else executor.open.set()

    threading.Thread(target=obey, daemon=True).start()
    sock = claim_port("127.0.0.1", 0)
    service = EngineService(make_engine(executor, num_blocks=512))
    app = create_app(ModelHost(service), data_folder=Path({folder!r}))
    chat_client.install(app)
    serve(app, sock, app.state.host.stop, lambda: print(sock.getsockname()[1], flush=True))
    print("the end", flush=True)
"""


class Program:
    """A server process with a held engine."""

    def __init__(self, process: HeldProcess) -> None:
        self.process = process.process
        self.chats = ChatClient(f"http://127.0.0.1:{process.read_line()}")
        self.tell, self.kill = process.tell, process.kill


@contextmanager
def started(folder: Path) -> Iterator[Program]:
    with held_process(PROGRAM, folder=str(folder)) as process:
        yield Program(process)


def saved(folder: Path, message_id: str) -> str:
    with closing(sqlite3.connect(folder / "chats.sqlite", timeout=30)) as file:
        row = file.execute("SELECT text FROM messages WHERE id = ?", (message_id,)).fetchone()
    return "" if row is None else str(row[0])


def has_at_least(count: int) -> Callable[[Json], bool]:
    return lambda node: len(node["text"]) >= count


def letters(prompt: str, count: int) -> str:
    return "".join(chr(ord("a") + (len(prompt) + i) % 26) for i in range(count))


def test_what_was_shown_survives_a_kill_and_is_gone_on_with(tmp_path: Path) -> None:
    with started(tmp_path) as program:
        chats = program.chats
        chat_ids = [chats.new_chat(max_tokens=60) for _ in range(3)]
        answers = [chats.ask(chat_id, "one")[1] for chat_id in chat_ids]
        for count in (10, 20):  # a part is saved while the rest still streams
            program.tell("10")  # the later questions may arrive an iteration or two after the first
            shown = [chats.until(answer, has_at_least(count // 2)) for answer in answers]
            # The server saves by itself, after a while.
            for node in shown:
                eventually(lambda node=node: saved(tmp_path, node["id"]).startswith(node["text"]))
        program.kill()
    with started(tmp_path) as program:
        chats = program.chats
        program.tell("go on")
        assert [entry["is_streaming"] for entry in chats.entries()] == [False] * 3
        for chat_id, node in zip(chat_ids, shown, strict=True):
            chat = chats.chat(chat_id)
            question, cut = chat["nodes"]
            assert question["text"] == "one"
            assert (cut["id"], cut["state"]) == (node["id"], "cut")
            assert cut["text"].startswith(node["text"])
            assert cut["figures"]["output_tokens"] == len(cut["text"])
            chats.call("resume", cut["id"])
            whole = chats.ended(cut)
            assert whole["text"] == letters("<user>one<assistant>", len(cut["text"]) + 60)


def test_a_server_that_ends_orderly_loses_nothing(tmp_path: Path) -> None:
    with started(tmp_path) as program:
        chats = program.chats
        chat_id = chats.new_chat()
        _, answer = chats.ask(chat_id, "one")
        program.tell("10")
        shown = chats.until(answer, has_at_least(5))
        program.process.send_signal(signal.SIGTERM)
        program.tell("go on")
        assert program.process.wait(30) == 0
    with started(tmp_path) as program:
        cut = program.chats.node(chat_id, answer["id"])
        assert cut["state"] == "cut"
        assert cut["text"].startswith(shown["text"])


def test_two_servers_share_a_file(tmp_path: Path) -> None:
    with started(tmp_path) as first:
        chat_id = first.chats.new_chat(max_tokens=20)
        _, answer = first.chats.ask(chat_id, "one")
        first.tell("5")
        first.chats.until(answer, has_at_least(4))
        eventually(lambda: len(saved(tmp_path, answer["id"])) >= 4)
        with started(tmp_path) as second:
            seen = second.chats.node(chat_id, answer["id"])
            assert (seen["state"], seen["text"][:4]) == ("streaming", letters("<user>one<assistant>", 4))
            for what in ("stop", "resume"):
                with pytest.raises(RefusedError):
                    second.chats.call(what, answer["id"])
            second.tell("go on")
            other = second.chats.answered(second.chats.new_chat(max_tokens=3), "two")
            assert other["state"] == "done"
            version = second.chats.call("version")
            first.tell("go on")
            eventually(lambda: second.chats.call("version") != version)  # servers notice each other's changes
            assert first.chats.ended(answer)["text"] == letters("<user>one<assistant>", 20)
            whole = second.chats.ended(answer)
            assert whole["state"] == "done"
            assert sorted(first.chats.titles()) == sorted(second.chats.titles()) == ["one", "two"]
            _, left = first.chats.ask(chat_id, "three", answer["id"])
            first.kill()
            # The surviving server sees that the answer has no writer.
            assert second.chats.ended(left)["state"] in ("cut", "done")
