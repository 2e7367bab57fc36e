"""A real Chromium on the real page, in front of a fake server."""

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, expect, sync_playwright

from neo_desktop.ui.page import mount

from .chat_page import ChatPage
from .fake_server import FakeServer

CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="package")  # not longer: meanwhile nothing else can run an event loop in this thread
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        reason = "no Chromium: apt-get install -y --no-install-recommends chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    expect.set_options(timeout=15_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@contextmanager
def serving(app: FastAPI, port: int) -> Iterator[str]:
    """Serve app from a thread; yields its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), f"nothing can be served at port {port}"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def fake() -> FakeServer:
    """The server behind the page. Each test has its own: a request may arrive after its page was closed."""
    return FakeServer()


@pytest.fixture
def url(fake: FakeServer) -> Iterator[str]:
    port = free_port()
    with serving(mount(fake.app()), port) as url:
        yield url


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., ChatPage]]:
    """Open a page at an address, in a browser of its own; it must run without error to the end."""
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


@pytest.fixture
def chat(url: str, new_page: Callable[..., ChatPage]) -> ChatPage:
    """The page in front of the fake server."""
    return new_page(url)


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a tab at an address; the page must run without any error, refused styles included."""
    problems: list[str] = []
    pages: list[Page] = []

    def open_tab(url: str, width: int = 1280, height: int = 900, **options: Any) -> Page:
        page = browser.new_context(viewport={"width": width, "height": height}, **options).new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console", lambda said: problems.append(said.text) if "Security Policy" in said.text else None
        )
        page.goto(url)
        pages.append(page)
        return page

    yield open_tab
    for page in pages:
        page.context.close()
    assert problems == []
