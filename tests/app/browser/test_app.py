"""The whole program: the command, its model, and the chat in a real browser."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from .conftest import ChatPage

pytestmark = pytest.mark.browser

CHAT = (sys.executable, "-m", "neo_desktop.app.entry", "chat")
KEY = "a-secret-key"
ARTIFACTS = Path(__file__).parents[3] / "artifacts"


class Program:
    """`neo-desktop chat` as a process, with its own data folder."""

    def __init__(self, data: Path) -> None:
        self.url = ""
        self._environment = {**os.environ, "NEO_DESKTOP_DATA": str(data)}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the program, and wait until it answers."""
        self._process = subprocess.Popen(
            [*CHAT, "--no-browser", "--port", "0", "--api-key", KEY],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
        )
        assert self._process.stdout is not None
        said = ""
        while not (found := re.search(r"API:\s+(http://\S+)/v1", said)):
            line = self._process.stdout.readline()
            assert line, f"the app did not come up:\n{said}"
            said += line
        self.url = found[1]

    def end(self, by: signal.Signals) -> None:
        """Send a signal, and wait until the process has ended."""
        if self._process is None:
            return
        self._process.send_signal(by)
        self._process.communicate(timeout=60)
        self._process = None


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.end(signal.SIGKILL)


def test_built_in_model_answers_in_the_browser_that_has_the_key(
    program: Program, new_page: Callable[..., ChatPage]
) -> None:
    program.start()
    answer = httpx.get(program.url, trust_env=False, timeout=30)
    assert answer.status_code == 401
    assert "Basic" in answer.headers["www-authenticate"]
    credentials = {"username": "me", "password": KEY}
    chat = new_page(program.url, viewport={"width": 1280, "height": 800}, http_credentials=credentials)
    chat.page.get_by_text("What is a KV cache?").first.click()
    expect(chat.figures).to_contain_text(re.compile(r"\d+ tokens · .* tokens/s · first token after"))
    chat.ask("hi")
    expect(chat.answers).to_have_count(2)
    ARTIFACTS.mkdir(exist_ok=True)
    chat.page.screenshot(path=ARTIFACTS / "chat.png")

    # Ctrl-C ends the program even while a page is open.
    program.end(signal.SIGINT)
    chat.page.close()
    chat.problems.clear()  # the page noticed the server's end
