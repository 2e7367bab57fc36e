"""Experts that move between host memory and the device, on threads: the tokens stay the same."""

import random
import time

import pytest
from executors import Hook, HookedLanes, thread_executor
from expert_churn import NO_LIMIT, churning
from expert_models import expert_model
from pipeline_case import BLOCK_SIZE, RandomIterations, check_result, make_storage
from seeds import seeds
from torch_layer import TorchLayer

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
    for plan, contexts in iterations.plans(10):
        result = executor.execute(plan)
        check_result(whole, plan, contexts, result)
        iterations.take_in(result)
    executor.close()
    if share == 0.0:
        assert moved
