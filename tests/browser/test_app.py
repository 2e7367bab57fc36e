"""The whole program: the command, its built-in model, and the chat in a real browser."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from .chat_page import ChatPage
from .conftest import free_port

pytestmark = pytest.mark.browser

ARTIFACTS = Path(__file__).parents[2] / "artifacts"


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def app(browser: Browser) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program as a user starts it, and its address."""
    port = free_port()
    command = [sys.executable, "-m", "neo_desktop.app.cli", "chat", "--no-browser", "--port", str(port)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + 120
            while not is_up(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    pytest.fail(
                        f"the app did not come up:\n{process.stdout.read() if process.stdout else ''}"
                    )
                time.sleep(0.2)
            yield process, url
        finally:
            process.kill()


def test_built_in_model_answers_in_the_browser(
    app: tuple[subprocess.Popen[str], str], new_page: Callable[..., ChatPage]
) -> None:
    process, url = app
    chat = new_page(url, viewport={"width": 1200, "height": 800})
    chat.ask("hi")
    expect(chat.last_answer).to_contain_text(
        re.compile(r"\w+.*first token after .* tokens/s · \d+ tokens", re.DOTALL)
    )
    chat.ask("What is a KV cache?")
    expect(chat.answers).to_have_count(2)
    ARTIFACTS.mkdir(exist_ok=True)
    chat.page.screenshot(path=ARTIFACTS / "chat.png")

    # Ctrl-C ends the program, also while a page is open.
    process.send_signal(signal.SIGINT)
    process.wait(timeout=15)
    chat.page.close()
    chat.problems.clear()  # the page saw its server go
