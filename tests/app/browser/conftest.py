"""A real Chromium on the real page of a real server, whose engine writes the test's text."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from neo_desktop.ui.page import mount

from ..conftest import RunningServer, running
from ..fake_engine import ScriptedExecutor, make_engine

CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


class ChatPage:
    """The page from a user's view; it records contacted hosts and errors."""

    def __init__(self, page: Page) -> None:
        self.page = page
        page.set_default_timeout(30_000)
        self.hosts: set[str] = set()
        self.problems: list[str] = []
        page.on("request", lambda request: self._note_host(request.url))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda said: "Security Policy" in said.text and self.problems.append(said.text))
        self.box = page.locator("#question textarea")
        self.stop = page.locator("#question .stop-button")
        self.questions = page.locator("#messages .user .message")
        self.answers = page.locator("#messages .bot .message")
        self.figures = page.locator("#figures")
        self.chats = page.locator("#chats a")

    def _note_host(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob"):
            self.hosts.add(parts.hostname or url)

    def open(self, url: str) -> None:
        self.page.goto(url)
        expect(self.box).to_be_editable()
        expect(self.page.locator(".model-line")).to_be_visible()

    def send(self, text: str) -> None:
        self.box.fill(text)
        self.box.press("Enter")

    def ask(self, text: str) -> None:
        """Send, and wait until the answer is complete."""
        self.send(text)
        expect(self.questions.last).to_contain_text(text)
        expect(self.figures).to_contain_text("first token after")
        expect(self.stop).to_have_count(0)

    def option(self, name: str) -> Locator:
        return self.page.locator("#messages").get_by_role("button", name=name)


@pytest.fixture(scope="package")  # not longer: no other event loop can run in this thread meanwhile
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        reason = "no Chromium: apt-get install -y --no-install-recommends chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = make_engine(ScriptedExecutor(), num_blocks=4096, context_tokens=20_000, template=TEMPLATE)
    with running(engine, data_folder=tmp_path_factory.mktemp("data"), mount=mount) as server:
        yield server


@pytest.fixture
def executor(server: RunningServer) -> ScriptedExecutor:
    """Executor of the server; it writes "yes" unless a test sets other answers."""
    executor: ScriptedExecutor = server.engine.executor
    executor.answers, executor.steps = ["yes"], threading.Semaphore(0)
    executor.open.set()
    return executor


@pytest.fixture(scope="module")
def new_page(browser: Browser) -> Iterator[Callable[..., ChatPage]]:
    """Open a page at an address, in its own browser context; assert at the end that it had no errors."""
    opened: list[ChatPage] = []

    def open_page(url: str, **options: Any) -> ChatPage:
        opened.append(ChatPage(browser.new_context(**options).new_page()))
        opened[-1].open(url)
        return opened[-1]

    yield open_page
    for chat in opened:
        chat.page.context.close()
        assert chat.problems == []
        assert chat.hosts == {"127.0.0.1"}


@pytest.fixture(scope="module")
def _page(server: RunningServer, new_page: Callable[..., ChatPage]) -> ChatPage:
    return new_page(server.url)


@pytest.fixture
def chat(_page: ChatPage, server: RunningServer, executor: ScriptedExecutor) -> ChatPage:
    """The page that a module's tests share, with a new chat: a load costs seconds."""
    if not _page.page.locator("#new-chat").is_visible():
        _page.open(server.url)
    _page.page.locator("#new-chat").click()
    expect(_page.questions).to_have_count(0)
    expect(_page.box).to_be_editable()
    return _page
