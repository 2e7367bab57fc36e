"""The whole program: the command, its model, and the chat in a real browser."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from .conftest import ChatPage

pytestmark = pytest.mark.browser

ARTIFACTS = Path(__file__).parents[3] / "artifacts"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Program:
    """`neo-desktop chat` as a process, with its own data folder."""

    def __init__(self, data: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {**os.environ, "NEO_DESKTOP_DATA": str(data)}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the program, and wait until it answers."""
        program = [sys.executable, "-m", "neo_desktop.app.entry"]
        self._process = subprocess.Popen(
            [*program, "chat", "--no-browser", "--port", str(self.port)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
        )
        deadline_s = time.monotonic() + 120
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self._process.kill()
                said = self._process.stdout.read() if self._process.stdout else ""
                pytest.fail(f"the app did not come up:\n{said}")
            time.sleep(0.2)

    def end(self, by: signal.Signals) -> None:
        """Send a signal, and wait until the process has ended."""
        if self._process is None:
            return
        self._process.send_signal(by)
        self._process.communicate(timeout=30)
        self._process = None

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.end(signal.SIGKILL)


def test_built_in_model_answers_in_the_browser(program: Program, new_page: Callable[..., ChatPage]) -> None:
    program.start()
    chat = new_page(program.url, viewport={"width": 1280, "height": 800})
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
