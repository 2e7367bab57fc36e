"""`neo-desktop worker` as a process: it serves an engine, ends on request, may leave and return any time."""

import json
import os
import re
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from idle import assert_is_idle
from worker_process import WorkerProcess
from worker_requests import ONE, Answers, expected, make_engine, prompts

from neo_desktop.engine.request import FinishReason


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret of sixteen letters at least\n")
    return path


@pytest.fixture
def worker(secret: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(secret) as worker:
        yield worker


def test_a_worker_attends_and_ends_when_it_is_asked(
    checkpoint: Path, secret: Path, worker: WorkerProcess
) -> None:
    batch = prompts()
    with make_engine(checkpoint, secret, str(worker.address)) as engine:
        answers = Answers(engine, batch)
        answers.until(lambda: engine.stats().num_running_at[ONE] > 1)
        assert answers.end() == expected(checkpoint, batch)
        assert engine.stats().num_cpu_decodes > 0
        assert_is_idle(engine)
    assert worker.end() == 0
    assert worker.said.rstrip().endswith("Stopped.")


def test_a_new_secret_is_for_its_owner_alone_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "made" / "secret"
    with WorkerProcess(path) as worker:
        assert "A secret was made: copy" in worker.said
    made = path.read_text()
    assert len(made.strip()) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with WorkerProcess(path) as worker:
        assert "secret" not in worker.said
    assert path.read_text() == made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen", "127.0.0.1:x"), "is not a worker address"),
        (("--device", "tpu"), "choose cpu, cuda or cuda:N"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(secret: Path, options: tuple[str, ...], words: str) -> None:
    command = (
        sys.executable,
        "-m",
        "neo_desktop.app.entry",
        "worker",
        "--worker-secret",
        str(secret),
        *options,
    )
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert words in " ".join(result.stderr.split())


def test_a_killed_worker_loses_nothing_and_another_takes_its_place(
    checkpoint: Path, secret: Path, worker: WorkerProcess
) -> None:
    """The device recomputes the lost requests; the engine uses a worker that returns at the same address."""
    batch = prompts()
    with make_engine(checkpoint, secret, str(worker.address)) as engine:
        answers = Answers(engine, batch)
        answers.until(lambda: engine.stats().num_running_at[ONE] > 1 and len(answers.tokens["0"]) > 5)
        worker.kill()
        answers.until(lambda: engine.stats().pools[ONE].num_blocks == 0)
        assert engine.stats().num_running_at[ONE] == 0
        assert engine.stats().num_preemptions > 1
        answers.until(lambda: len(answers.tokens["0"]) > 9)
        with WorkerProcess(secret, worker.address.port) as other:
            assert answers.end() == expected(checkpoint, batch)
            assert set(answers.reasons.values()) == {FinishReason.LENGTH}
            again = Answers(engine, batch)
            again.until_back(ONE)
            assert again.end() == expected(checkpoint, batch)
            assert_is_idle(engine)
            assert other.end() == 0


@pytest.mark.sample(0)
def test_without_any_other_memory_requests_wait_for_the_worker_to_come_back(
    checkpoint: Path, secret: Path, worker: WorkerProcess
) -> None:
    batch = prompts(2)
    with make_engine(checkpoint, secret, str(worker.address), gpu_cache_tokens=16) as engine:
        answers = Answers(engine, batch)
        answers.until(lambda: len(answers.tokens["0"]) > 5)
        worker.kill()
        for _ in range(20):
            answers.step()
        assert not answers.reasons
        with WorkerProcess(secret, worker.address.port):
            assert answers.end() == expected(checkpoint, batch)


def test_a_stopped_worker_is_lost_after_a_while_and_comes_back(
    checkpoint: Path, secret: Path, worker: WorkerProcess
) -> None:
    batch = prompts()
    with make_engine(checkpoint, secret, str(worker.address), timeout_s=1.0) as engine:
        answers = Answers(engine, batch)
        answers.until(lambda: engine.stats().num_running_at[ONE] > 1 and len(answers.tokens["0"]) > 5)
        worker.pause()
        answers.until(lambda: engine.stats().pools[ONE].num_blocks == 0)
        worker.go_on()
        assert answers.end() == expected(checkpoint, batch)
        again = Answers(engine, batch)
        again.until_back(ONE)
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
            server.wait(60)


def test_a_chat_is_answered_with_its_memory_in_a_worker(
    secret: Path, worker: WorkerProcess, tmp_path: Path
) -> None:
    """The README's commands: a worker, and a server whose own memory holds no chat."""
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
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read()
        decodes = re.search(rb"neo_desktop_cpu_decodes_total ([\d.]+)", metrics)
        assert decodes is not None
        assert float(decodes[1]) > 0
