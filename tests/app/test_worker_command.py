"""`neo-desktop worker` as a process: it serves an engine, ends on request, may leave and return any time."""

import stat
import subprocess
import sys
from collections.abc import Iterator
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
        (("--tls-cert", "no-such.pem"), "no-such.pem and its key cannot be used"),
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


def test_of_workers_that_divide_the_heads_a_killed_one_loses_all_and_comes_back(
    checkpoint: Path, secret: Path, worker: WorkerProcess
) -> None:
    """Each worker holds a part of every request's KV, and one part alone is useless."""
    batch = prompts()
    with WorkerProcess(secret) as second:
        workers = f"{worker.address},{second.address}"
        with make_engine(checkpoint, secret, workers, partition="heads") as engine:
            assert [place for place in engine.stats().pools if place.is_remote] == [ONE]
            answers = Answers(engine, batch)
            answers.until(lambda: engine.stats().num_running_at[ONE] > 1 and len(answers.tokens["0"]) > 5)
            second.kill()
            answers.until(lambda: engine.stats().pools[ONE].num_blocks == 0)
            assert engine.stats().num_running_at[ONE] == 0
            assert str(second.address) in (engine.live_view().workers[ONE].lost or "")
            with WorkerProcess(secret, second.address.port):
                assert answers.end() == expected(checkpoint, batch)
                again = Answers(engine, batch)
                again.until_back(ONE)
                assert again.end() == expected(checkpoint, batch)
                assert_is_idle(engine)


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
