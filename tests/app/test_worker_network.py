"""A worker on another host, behind realistic networks: narrow, slow, lossy, and cut."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cable import Condition
from checkpoints import save_checkpoint
from idle import assert_is_idle
from network import Host, NoNetworkError, another_host
from worker_process import WorkerProcess
from worker_requests import ONE, Answers, expected, make_engine, prompts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret of sixteen letters at least\n")
    return path


@pytest.fixture
def host() -> Iterator[Host]:
    hosts = another_host()
    try:
        host = hosts.__enter__()
    except NoNetworkError as error:
        pytest.skip(f"needs network namespaces: {error}")
    yield host
    hosts.__exit__(None, None, None)


@pytest.fixture
def worker(host: Host, secret: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(secret, host=host.address, prefix=host.prefix) as worker:
        yield worker


TEN_GIGABITS = Condition(delay_s=0.0005, bits_per_s=1e10)  # a round trip of 1 ms


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "condition",
    [TEN_GIGABITS, Condition(delay_s=0.001, bits_per_s=1e8), Condition(delay_s=0.002, loss=0.01)],
    ids=["10 Gbit/s", "slow", "lossy"],
)
def test_no_network_changes_a_token(
    checkpoint: Path, secret: Path, host: Host, worker: WorkerProcess, condition: Condition
) -> None:
    host.cable.set(condition)
    batch = prompts(4)
    with make_engine(checkpoint, secret, str(worker.address)) as engine:
        answers = Answers(engine, batch)
        answers.until(lambda: engine.stats().num_running_at[ONE] > 0)
        assert answers.end() == expected(checkpoint, batch)
        assert engine.stats().num_cpu_decodes > 0
        assert engine.live_view().workers[ONE].num_losses == 0


def test_a_cut_cable_loses_nothing_and_the_worker_comes_back_with_it(
    checkpoint: Path, secret: Path, host: Host, worker: WorkerProcess
) -> None:
    """Neither the engine nor the worker receives a sign that the connection is dead."""
    batch = prompts()
    with make_engine(checkpoint, secret, str(worker.address), timeout_s=1.0) as engine:
        answers = Answers(engine, batch)
        answers.until(lambda: engine.stats().num_running_at[ONE] > 1 and len(answers.tokens["0"]) > 5)
        host.cable.set(Condition(is_cut=True))
        answers.until(lambda: engine.stats().pools[ONE].num_blocks == 0)
        state = engine.live_view().workers[ONE]
        assert state.num_losses >= 1  # a busy computer may also look like a cut cable
        assert "has not answered for 1 s" in (state.lost or "")
        assert answers.end() == expected(checkpoint, batch)
        host.cable.set(Condition())
        again = Answers(engine, batch)
        again.until_back(ONE)
        assert engine.live_view().workers[ONE].lost is None
        assert again.end() == expected(checkpoint, batch)
        assert_is_idle(engine)


def ask(port: int, chat: dict[str, object]) -> Iterator[str]:
    """Yield the pieces of an answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(chat | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as events:
        for line in events:
            if line.startswith(b"data: {"):
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    yield choice["delta"].get("content") or ""


@contextmanager
def served(*options: str, cache: Path) -> Iterator[int]:
    """Run the server; yield its port."""
    command = (sys.executable, "-m", "neo_desktop.app.entry", "serve", "--device", "cpu", "--port", "0")
    environment = os.environ | {"NEO_DESKTOP_CACHE": str(cache), "COLUMNS": "200"}
    with subprocess.Popen((*command, *options), stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            said = ""
            while not (found := re.search(r"127\.0\.0\.1:(\d+)/v1", said)):
                line = server.stdout.readline()
                assert line, said
                said += line
            yield int(found[1])
        finally:
            server.terminate()
            server.wait(20)


def test_a_chat_is_answered_with_its_memory_on_the_other_host(
    secret: Path, host: Host, worker: WorkerProcess, tmp_path: Path
) -> None:
    """The README's commands: a worker there and the server here, whose own memory holds no chat.

    The chat also survives if the worker is killed in mid-answer and another one takes its place.
    """
    host.cable.set(TEN_GIGABITS)
    options = ("--workers", str(worker.address), "--worker-secret", str(secret), "--dtype", "float32")
    chat: dict[str, object] = {
        "messages": [{"role": "user", "content": "What is a KV cache?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    with served("--policy", "gpu-only", "--gpu-cache-tokens", "4096", cache=tmp_path) as port:
        alone = "".join(ask(port, chat))
    assert alone
    here = ("--gpu-cache-tokens", "0", "--cpu-cache-tokens", "0")
    with served(*here, *options, cache=tmp_path) as port:
        assert "".join(ask(port, chat)) == alone
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).read()
        decodes = re.search(rb"neo_desktop_cpu_decodes_total ([\d.]+)", metrics)
        assert decodes is not None
        assert float(decodes[1]) > 0
        pieces = ask(port, chat)
        begun = next(piece for piece in pieces if piece)
        worker.kill()
        with WorkerProcess(secret, worker.address.port, host.address, host.prefix):
            assert begun + "".join(pieces) == alone
