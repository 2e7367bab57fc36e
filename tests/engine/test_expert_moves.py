"""Experts that move between host memory and the device, on threads: the tokens stay the same."""

import random
import time
from pathlib import Path

import pytest
from checkpoints import save_checkpoint, transformers_greedy
from executors import Hook, HookedLanes, thread_executor
from expert_churn import NO_LIMIT, churning
from expert_models import expert_model
from pipeline_case import BLOCK_SIZE, RandomIterations, check_random_plans, make_storage
from seeds import seeds
from torch_layer import TorchLayer

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.execute import expert_moves
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.models.decoder import Decoder

NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def whole() -> Decoder:
    """Return the reference model, without offloading."""
    return expert_model()


def make_executor(model: Decoder, hook: Hook) -> ModelRunner:
    storage = make_storage(
        model, dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS), BLOCK_SIZE, device_kind=TorchLayer
    )
    return thread_executor(model, storage, lanes=HookedLanes(hook), moves_experts=True)


@pytest.mark.sample(4)
@pytest.mark.parametrize("share", [0.0, None])
@pytest.mark.parametrize("seed", seeds(2, 12))
def test_tokens_are_those_of_the_whole_model(
    whole: Decoder, seed: int, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts move beside every iteration that streams none; a slow lane lets copies run on."""
    places, moved = churning(seed)
    monkeypatch.setattr(expert_moves, "ExpertPlaces", places)
    slow = random.Random(seed).choice((None, Lane.EXPERTS, Lane.DEVICE))

    def hesitate(lane: str, stage: Stage) -> None:
        if lane == slow:
            time.sleep(0.001)

    model = expert_model(seed, share=share, moves=NO_LIMIT)
    iterations, executor = RandomIterations(seed, NUM_BLOCKS), make_executor(model, hesitate)
    check_random_plans(executor.execute, whole, iterations, 10)
    executor.close()
    if share == 0.0:
        assert moved


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe"])
def test_checkpoints_give_transformers_tokens(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This computer's rates decide if experts move here; the test above has them move on any computer."""
    places, _ = churning(1)
    monkeypatch.setattr(expert_moves, "ExpertPlaces", places)
    folder = save_checkpoint(tmp_path, family)
    prompts = [[7 * i % 250 for i in range(length)] for length in (3, 40)]
    with Engine.from_pretrained(folder, device="cpu", gpu_weights_gib=0.0008) as engine:
        params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params)
    assert [list(each.token_ids) for each in outputs] == [
        transformers_greedy(folder, prompt, 16) for prompt in prompts
    ]
