"""A worker on another host, behind a network as they are: slow, lossy, and cut."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
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


@pytest.mark.parametrize(("delay_s", "loss"), [(0.001, 0.0), (0.002, 0.01)], ids=["slow", "lossy"])
def test_delay_and_loss_change_no_token(
    checkpoint: Path, secret: Path, host: Host, worker: WorkerProcess, delay_s: float, loss: float
) -> None:
    host.cable.delay_s, host.cable.loss = delay_s, loss
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
    """Nobody is told that the connection is dead: neither the engine nor the worker."""
    batch = prompts()
    with make_engine(checkpoint, secret, str(worker.address), timeout_s=1.0) as engine:
        answers = Answers(engine, batch)
        answers.until(lambda: engine.stats().num_running_at[ONE] > 1 and len(answers.tokens["0"]) > 5)
        host.cable.is_cut = True
        answers.until(lambda: engine.stats().pools[ONE].num_blocks == 0)
        state = engine.live_view().workers[ONE]
        assert state.num_losses >= 1  # a busy computer may look like a cut cable, too
        assert "has not answered for 1 s" in (state.lost or "")
        assert answers.end() == expected(checkpoint, batch)
        host.cable.is_cut = False
        again = Answers(engine, batch)
        again.until_back(ONE)
        assert engine.live_view().workers[ONE].lost is None
        assert again.end() == expected(checkpoint, batch)
        assert_is_idle(engine)


def ask(port: int, api: str, body: object = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{api}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    assert isinstance(found, dict)
    return found


def test_a_chat_is_answered_with_its_memory_on_the_other_host(
    secret: Path, host: Host, worker: WorkerProcess, tmp_path: Path
) -> None:
    """By the commands of the README: a worker there, the server here, whose own memory holds no chat."""
    host.cable.delay_s = 0.001
    command = (sys.executable, "-m", "neo_desktop.app.entry", "serve", "--device", "cpu", "--port", "0")
    options = ("--workers", str(worker.address), "--worker-secret", str(secret), "--dtype", "float32")
    chat = {
        "messages": [{"role": "user", "content": "What is a KV cache?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    texts = []
    for size, more in (("4096", ("--policy", "gpu-only")), ("0", ("--cpu-cache-tokens", "0", *options))):
        with subprocess.Popen(
            (*command, "--gpu-cache-tokens", size, *more),
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"NEO_DESKTOP_CACHE": str(tmp_path), "COLUMNS": "200"},
        ) as server:
            try:
                assert server.stdout is not None
                said = ""
                while not (found := re.search(r"127\.0\.0\.1:(\d+)/v1", said)):
                    line = server.stdout.readline()
                    assert line, said
                    said += line
                port = int(found[1])
                choices = ask(port, "/v1/chat/completions", chat)["choices"]
                assert isinstance(choices, list)
                texts.append(choices[0]["message"]["content"])
                metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).read()
            finally:
                server.terminate()
                server.wait(20)
    assert texts[0] == texts[1] != ""
    decodes = re.search(rb"neo_desktop_cpu_decodes_total ([\d.]+)", metrics)
    assert decodes is not None
    assert float(decodes[1]) > 0
