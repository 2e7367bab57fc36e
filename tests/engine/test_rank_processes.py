"""A model divided among processes gives the tokens of one process; a lost rank ends requests clearly."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from checkpoints import save_checkpoint

from neo_desktop import Engine, SamplingParams, native
from neo_desktop.engine.batch import IterationPlan, IterationResult
from neo_desktop.engine.engine import Engine as OwnEngine
from neo_desktop.engine.errors import EngineError
from neo_desktop.engine.execute.executor import Wait
from neo_desktop.engine.execute.outputs import Outputs
from neo_desktop.engine.execute.ranks import driver
from neo_desktop.engine.execute.ranks.driver import DriverExecutor
from neo_desktop.engine.execute.ranks.process import RankLostError
from neo_desktop.engine.predict.cost_model import ZERO
from neo_desktop.models.json_file import ModelError

PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(size)] for i, size in enumerate((5, 60, 12, 33))]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, logprobs=2)
DIVISIBLE = {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 16}
MOE = DIVISIBLE | {"intermediate_size": 256}
POLICIES = ("auto", "neo", "apex", "pie", "fastdecode", "gpu-only")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    save_checkpoint(path / "llama", "llama", **DIVISIBLE)
    save_checkpoint(path / "mixtral", "mixtral", **MOE)
    save_checkpoint(path / "one kv head", "qwen3", **DIVISIBLE | {"num_key_value_heads": 1})
    return path


@contextmanager
def engine(model: Path, ranks: int, policy: str = "neo", tokens: int = 256) -> Iterator[Engine]:
    """Make an engine with two small caches, so requests live in both caches and move."""
    made = Engine.from_pretrained(
        model,
        device="cpu",
        policy=policy,
        tensor_parallel=ranks,
        gpu_cache_tokens=tokens // 2,
        cpu_cache_tokens=tokens,
        max_batch_tokens=32,
        max_batch_requests=8,
        cost_model=ZERO,
    )
    try:
        yield made
    finally:
        made.close()


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    params = [PARAMS, PARAMS, SAMPLED, PARAMS]
    return [completion.token_ids for completion in engine.generate(PROMPTS, params)]


def others_of(engine: Engine) -> list[psutil.Process]:
    executor = engine.executor
    assert isinstance(executor, DriverExecutor)
    return [psutil.Process(each.pid) for each in executor._leader.processes]


def go_on(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "ranks", "policy"),
    [
        *(("llama", 2, policy) for policy in POLICIES),
        ("llama", 4, "neo"),
        ("mixtral", 2, "neo"),
        ("mixtral", 4, "fastdecode"),
        ("one kv head", 2, "auto"),
    ],
)
def test_tokens_are_those_of_one_process(folder: Path, model: str, ranks: int, policy: str) -> None:
    """Greedy and sampled requests in all tiers give the same tokens, and pooled hidden states agree."""
    with engine(folder / model, 1, policy) as alone:
        expected, states = tokens_of(alone), alone.embed(PROMPTS)
    threads = torch.get_num_threads(), native.default_num_threads()
    with engine(folder / model, ranks, policy) as divided:
        assert tokens_of(divided) == expected
        for ours, theirs in zip(divided.embed(PROMPTS), states, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        others = others_of(divided)
        assert len(others) == ranks - 1
    assert psutil.wait_procs(others, timeout=30)[1] == []
    assert (torch.get_num_threads(), native.default_num_threads()) == threads


def test_a_rank_that_is_killed_ends_requests_with_a_sentence(folder: Path) -> None:
    with engine(folder / "llama", 2) as divided:
        divided.generate(PROMPTS[:1], PARAMS)
        (other,) = others_of(divided)
        divided.add("a", divided.prepare(PROMPTS[0], PARAMS))
        divided.step()
        other.send_signal(signal.SIGKILL)
        with pytest.raises(RankLostError, match="part 2 of the model, was ended by SIGKILL"):
            go_on(divided)
        with pytest.raises(RankLostError, match="SIGKILL"):  # a later step fails the same way
            divided.step()


def test_a_rank_that_hangs_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, timeout_s in (("TIMEOUT_S", 20.0), ("ANSWER_S", 1.0), ("EXIT_S", 1.0)):
        monkeypatch.setattr(driver, name, timeout_s)
    with engine(folder / "llama", 2) as divided:
        (other,) = others_of(divided)
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(RankLostError, match="do not answer"):
            divided.generate(PROMPTS, PARAMS)
        assert not other.is_running()


PROGRAM = """
import sys, time
from neo_desktop import Engine
from neo_desktop.engine.predict.cost_model import ZERO

engine = Engine.from_pretrained(
    sys.argv[1],
    device="cpu",
    tensor_parallel=2,
    gpu_cache_tokens=64,
    cpu_cache_tokens=64,
    cost_model=ZERO,
)
print("ready", flush=True)
time.sleep(600)
"""


def test_ranks_end_with_rank_0(folder: Path) -> None:
    """Their pipes close, in whichever way rank 0 ends."""
    command = [sys.executable, "-P", "-c", PROGRAM, str(folder / "llama")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        others = psutil.Process(process.pid).children()
        process.kill()
    assert len(others) == 1
    assert psutil.wait_procs(others, timeout=30)[1] == []


def test_an_error_after_the_layers_ends_its_requests_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks have computed the same, so they remain in step."""
    with engine(folder / "llama", 2) as divided:
        expected = tokens_of(divided)

        def fail(self: Outputs, timing: object) -> IterationResult:
            raise RuntimeError("a defect of rank 0")

        with monkeypatch.context() as patch:
            patch.setattr(Outputs, "result", fail)
            with pytest.raises(EngineError, match="a defect of rank 0"):
                divided.generate(PROMPTS, PARAMS)
        assert tokens_of(divided) == expected


def test_an_error_between_layers_is_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for sums that never arrive."""
    monkeypatch.setattr(driver, "ANSWER_S", 1.0)
    with engine(folder / "llama", 2) as divided:

        def fail(plan: IterationPlan) -> Wait:
            raise RuntimeError("a defect of rank 0")

        monkeypatch.setattr(divided.executor._own, "start", fail)  # type: ignore[attr-defined]
        with pytest.raises(RankLostError, match="do not answer"):
            divided.generate(PROMPTS, PARAMS)


def test_what_cannot_be_is_told_before_anything_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "RankProcess", lambda *_: pytest.fail("a process started"))
    with pytest.raises(ModelError, match="8 heads cannot be divided among 3 processes"):
        OwnEngine.from_pretrained(folder / "llama", device="cpu", tensor_parallel=3)
    with pytest.raises(ValueError, match="workers do not go with tensor_parallel"):
        OwnEngine.from_pretrained(folder / "llama", tensor_parallel=2, workers="192.168.1.20")
    with pytest.raises(ValueError, match="gpu_weights_gib does not go with tensor_parallel"):
        OwnEngine.from_pretrained(folder / "llama", tensor_parallel=2, gpu_weights_gib=1.0)
