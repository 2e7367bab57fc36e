"""A divided model with attention workers: the tokens of a model alone, whatever happens to a worker."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from idle import assert_is_idle
from worker_process import WorkerProcess
from worker_requests import ONE, Answers, expected, make_engine, prompts
from workers import SECRET, running_worker

from neo_desktop.engine.placement import Place
from neo_desktop.engine.request import FinishReason
from neo_desktop.models.rank import Rank

DIVISIBLE = {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 16}
SINKS = {"num_key_value_heads": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    (path / "secret").write_bytes(SECRET + b"\n")
    save_checkpoint(path / "llama", "llama", **DIVISIBLE)
    save_checkpoint(path / "gpt-oss", "gpt-oss", **SINKS)
    return path


@pytest.fixture(scope="module")
def greedy(folder: Path) -> list[list[int]]:
    return expected(folder / "llama", prompts())


@pytest.mark.parametrize(
    ("family", "ranks", "num_workers", "partition", "policy"),
    [
        ("llama", 2, 1, "requests", "neo"),
        ("llama", 2, 2, "requests", "auto"),
        ("llama", 2, 2, "heads", "fastdecode"),
        ("llama", 4, 2, "requests", "neo"),
        ("gpt-oss", 2, 1, "heads", "neo"),
    ],
)
def test_tokens_are_those_of_the_model_alone(
    stack: ExitStack,
    folder: Path,
    greedy: list[list[int]],
    family: str,
    ranks: int,
    num_workers: int,
    partition: str,
    policy: str,
) -> None:
    """Requests live on workers, move there and back, are preempted and computed again."""
    batch = prompts()
    workers = [stack.enter_context(running_worker()) for _ in range(num_workers)]
    named = ",".join(str(address) for _, address in workers)
    engine = stack.enter_context(
        make_engine(
            folder / family, folder / "secret", named, partition=partition, policy=policy, ranks=ranks
        )
    )
    answers, seen = Answers(engine, batch), set[Place]()

    def look() -> bool:
        seen.update(place for place, count in engine.stats().num_running_at.items() if count)
        return False

    answers.until(look)
    assert answers.end() == (greedy if family == "llama" else expected(folder / family, batch))
    assert all(set(worker._sessions) == {Rank(n, ranks) for n in range(ranks)} for worker, _ in workers)
    num_places = 1 if partition == "heads" else num_workers
    assert {place for place in seen if place.is_remote} == {Place.worker(n + 1) for n in range(num_places)}
    assert_is_idle(engine)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_connection_that_one_rank_loses_is_lost_to_all(
    folder: Path, greedy: list[list[int]], rank: int
) -> None:
    """The other one's goes on until then: nothing of what has come of zeros is kept."""
    with (
        running_worker() as (worker, address),
        make_engine(folder / "llama", folder / "secret", str(address), ranks=2) as engine,
    ):
        answers = Answers(engine, prompts())
        answers.until(lambda: engine.stats().num_running_at[ONE] > 1 and len(answers.tokens["0"]) > 5)
        worker._sessions[Rank(rank, 2)].end()
        answers.until(lambda: engine.live_view().workers[ONE].num_losses > 0)
        elsewhere = "another part of the model has lost its connection"
        assert (elsewhere in str(engine.live_view().workers[ONE].lost)) == (rank == 1)
        assert answers.end() == greedy
        again = Answers(engine, prompts())
        again.until_back(ONE)
        assert again.end() == greedy
        assert_is_idle(engine)


@pytest.mark.parametrize("partition", ["requests", "heads"])
def test_a_killed_worker_loses_nothing_and_another_takes_its_place(
    folder: Path, greedy: list[list[int]], partition: str
) -> None:
    batch, secret = prompts(), folder / "secret"
    with WorkerProcess(secret) as first, WorkerProcess(secret) as second:
        workers = f"{first.address},{second.address}"
        with make_engine(folder / "llama", secret, workers, partition=partition, ranks=2) as engine:
            answers = Answers(engine, batch)
            answers.until(lambda: engine.stats().num_running_at[ONE] > 1 and len(answers.tokens["0"]) > 5)
            first.kill()
            answers.until(lambda: engine.stats().pools[ONE].num_blocks == 0)
            with WorkerProcess(secret, first.address.port):
                assert answers.end() == greedy
                assert set(answers.reasons.values()) == {FinishReason.LENGTH}
                again = Answers(engine, batch)
                again.until_back(ONE)
                assert again.end() == greedy
                assert_is_idle(engine)


def test_a_stopped_worker_is_lost_after_a_while_and_comes_back(folder: Path, greedy: list[list[int]]) -> None:
    batch, secret = prompts(), folder / "secret"
    with (
        WorkerProcess(secret) as worker,
        make_engine(folder / "llama", secret, str(worker.address), timeout_s=1.0, ranks=2) as engine,
    ):
        answers = Answers(engine, batch)
        answers.until(lambda: engine.stats().num_running_at[ONE] > 1 and len(answers.tokens["0"]) > 5)
        worker.pause()
        answers.until(lambda: engine.stats().pools[ONE].num_blocks == 0)
        worker.go_on()
        assert answers.end() == greedy
        again = Answers(engine, batch)
        again.until_back(ONE)
        assert again.end() == greedy
        assert_is_idle(engine)
