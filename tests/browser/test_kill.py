"""The page in front of the real server: a reload in mid-answer, a server that is killed and started again."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from held_process import HeldProcess, held_process
from playwright.sync_api import expect

from .chat_page import ChatPage
from .conftest import free_port

pytestmark = pytest.mark.browser

# An engine that writes the alphabet, as many letters as it is told to.
PROGRAM = """
    import sys, threading
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from app.fake_engine import FakeExecutor, make_engine
    from neo_desktop.app.shelf.hosting import ModelHost
    from neo_desktop.app.web.server import claim_port, create_app, serve
    from neo_desktop.app.service import EngineService
    from neo_desktop.ui.page import mount

    executor = FakeExecutor()
    executor.open.clear()

    def obey():
        for line in sys.stdin:
            executor.steps.release(int(line))

    threading.Thread(target=obey, daemon=True).start()
    service = EngineService(make_engine(executor, num_blocks=512))
    app = mount(create_app(ModelHost(service), data_folder=Path({folder!r})))
    serve(app, claim_port("127.0.0.1", {port}), lambda: print("ready", flush=True))
"""


class Server:
    """A server process whose engine is led by hand."""

    def __init__(self, process: HeldProcess) -> None:
        self._process = process
        assert process.read_line() == "ready"

    def write(self, num_letters: int) -> None:
        self._process.tell(str(num_letters))


@contextmanager
def started(folder: Path, port: int) -> Iterator[Server]:
    """Run a server; in the end it is killed in the middle of whatever it does."""
    with held_process(PROGRAM, folder=str(folder), port=port) as process:
        yield Server(process)


def test_an_answer_outlives_a_reload_and_a_killed_server(
    tmp_path: Path, new_page: Callable[..., ChatPage]
) -> None:
    port = free_port()
    with started(tmp_path, port) as server:
        chat = new_page(f"http://127.0.0.1:{port}")
        chat.set("Max tokens", "400")
        server.write(40)
        chat.send("hi")
        expect(chat.last_text).to_have_text(re.compile(r"[a-z]{30}"))
        chat.page.reload()
        expect(chat.questions.locator(".bubble")).to_have_text(["hi"])
        expect(chat.stop_button).to_be_visible()
        server.write(40)
        expect(chat.last_text).to_have_text(re.compile(r"[a-z]{70}"))
        shown = chat.last_text.inner_text()
    expect(chat.page.locator("#connection")).to_contain_text("No connection to the server.")
    expect(chat.last_text).to_have_text(re.compile(r"[a-z]{70}"))  # what was said stays on the page
    with started(tmp_path, port) as server:
        expect(chat.page.locator("#connection")).to_be_hidden()
        expect(chat.last_answer).to_contain_text("cut off when the server ended")
        kept = chat.last_text.inner_text()
        assert kept
        assert shown.startswith(kept)
        expect(chat.chats).to_have_text(["hi"])
        server.write(40)
        chat.button("Continue").click()
        expect(chat.last_text).to_have_text(re.compile(kept + "[a-z]{20}"))
        chat.page.keyboard.press("Escape")
        server.write(40)
        expect(chat.last_answer).to_contain_text("stopped")
        expect(chat.answers).to_have_count(1)
        chat.problems.clear()
        chat.page.close()


def test_branches_settings_and_files_on_the_real_server(
    tmp_path: Path, new_page: Callable[..., ChatPage]
) -> None:
    port = free_port()
    with started(tmp_path, port) as server:
        server.write(10_000)
        chat = new_page(f"http://127.0.0.1:{port}")
        chat.set("Max tokens", "12")
        chat.set("Temperature", "-1")
        expect(chat.page.locator("#settings").get_by_role("alert")).to_be_empty()  # no chat to refuse it yet
        chat.set("Temperature", "0.5")
        chat.page.locator("input[type=file]").set_input_files(
            {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"12345"}
        )
        expect(chat.page.locator(".composer .chip")).to_contain_text("notes.txt")
        chat.ask("first")
        expect(chat.questions.first).to_contain_text("notes.txt")
        expect(chat.last_answer).to_contain_text("12 tokens · cut at the token limit")
        chat.retry_button.click()
        expect(chat.last_answer).to_contain_text("2/2")
        chat.wait_until_idle()
        chat.box.press("ArrowUp")
        chat.page.get_by_role("textbox", name="Edit your question").fill("changed")
        chat.page.keyboard.press("Enter")
        expect(chat.questions.locator(".bubble")).to_have_text(["changed"])
        expect(chat.questions.first).to_contain_text("notes.txt")
        chat.wait_until_idle()
        chat.page.reload()
        expect(chat.questions.locator(".bubble")).to_have_text(["changed"])
        chat.button("Previous variant").click()
        expect(chat.questions.locator(".bubble")).to_have_text(["first"])
        expect(chat.last_answer).to_contain_text("2/2")
        chat.page.locator("input[type=file]").set_input_files(
            {"name": "photo.png", "mimeType": "image/png", "buffer": b"\x89PNG\x00\x01"}
        )
        expect(chat.page.locator(".toast").last).to_contain_text(re.compile("text|PDF"))
        chat.problems.clear()
        chat.set("Top-p", "7")
        expect(chat.page.locator("#settings").get_by_role("alert")).to_contain_text("Top-p must be")
        chat.problems.clear()
        chat.page.close()
