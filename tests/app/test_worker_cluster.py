"""Workers of a Ray cluster: an engine requests some, and computers join, die and return."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from checkpoints import save_checkpoint
from worker_requests import ONE, Answers, expected, make_engine, prompts

from neo_desktop.engine.remote import cluster

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="needs Ray: pip install 'neo-desktop[workers]'"
)
TIMEOUT_S = 400.0  # a cluster starts a dozen processes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret of sixteen letters at least\n")
    return path


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = int(unused.getsockname()[1])
    monkeypatch.setattr(cluster, "HEAD_PORT", port)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return port


@contextmanager
def joined(port: int, secret: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Let a computer join, in its own session, so that a test can kill all its processes."""
    options = ("--connect", f"127.0.0.1:{port}", "--memory", "0.02", "--worker-secret", str(secret))
    with subprocess.Popen(
        (sys.executable, "-m", "neo_desktop.app.entry", "worker", *options), start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def kill_all(process: "subprocess.Popen[bytes]") -> None:
    for each in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
        os.kill(each.pid, signal.SIGKILL)
    process.wait(20)


@pytest.mark.sample(0)
@pytest.mark.timeout(900)
def test_workers_join_die_and_come_back(checkpoint: Path, secret: Path, port: int) -> None:
    batch = prompts()
    with make_engine(checkpoint, secret, "1") as engine:
        assert Answers(engine, batch[:2]).end() == expected(checkpoint, batch[:2])  # no worker has joined yet
        for _ in range(2):
            with joined(port, secret) as process:
                answers = Answers(engine, batch)
                answers.until_back(ONE, TIMEOUT_S)
                kill_all(process)
                assert answers.end() == expected(checkpoint, batch)
        deadline = time.monotonic() + TIMEOUT_S
        while engine.live_view().workers[ONE].lost is None and time.monotonic() < deadline:
            Answers(engine, batch).end()  # the engine notices the loss at the next use
        assert engine.live_view().workers[ONE].lost is not None
