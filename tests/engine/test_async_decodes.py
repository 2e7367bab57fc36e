"""Async decodes give the tokens of a plain computation."""

import random
import threading
import time
from dataclasses import replace

import pytest
from async_case import AsyncIterations, Conveyor
from executors import Hook, HookedLanes, thread_executor
from graph_case import prompts
from pipeline_case import BLOCK_SIZE, NUM_LAYERS, check_random_plans, check_result, make_storage, tiny_model
from seeds import seeds
from torch_layer import TorchLayer

from neo_desktop.engine.batch import MAX_ASYNC_DECODES
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.models.decoder import Decoder

TIMEOUT_S = 60.0  # for prompt events; only a defect waits this long
NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(attention_sinks=True, softcap=0.5)


def make_executor(
    model: Decoder, block_size: int = BLOCK_SIZE, device_kind: type[KVLayer] | None = TorchLayer
) -> ModelRunner:
    storage = make_storage(
        model, dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS), block_size, device_kind=device_kind
    )
    return thread_executor(model, storage)


@pytest.mark.sample(4)
@pytest.mark.parametrize("device_kind", [TorchLayer, None])  # a GPU's KV layout, and a CPU's
@pytest.mark.parametrize("block_size", [8, 16])  # K of host memory in rows, and in pairs
@pytest.mark.parametrize("seed", seeds(2, 8))
def test_random_paces_change_no_token(
    model: Decoder, seed: int, block_size: int, device_kind: type[KVLayer] | None
) -> None:
    """Iterations of any kind run between async steps; slots vary, and some decodes restart."""
    iterations = AsyncIterations(seed, NUM_BLOCKS, block_size)
    executor = make_executor(model, block_size, device_kind)
    for plan, contexts in iterations.plans(30):
        result = executor.execute(plan)
        check_result(model, plan, contexts, result)
        iterations.take_in(result)
        assert result.timing is not None
        if any(sequence is not None for group in plan.async_decodes[:-1] for sequence in group):
            assert result.timing.host_attention_ms > 0
    assert iterations.num_ended > 0
    executor.close()


def hooked_executor(model: Decoder, hook: Hook) -> ModelRunner:
    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS), 16)
    return thread_executor(model, storage, lanes=HookedLanes(hook))


def test_attention_may_take_as_long_as_the_turn(model: Decoder) -> None:
    """The device passes all layers before the first group's attention, or any later one, has ended."""
    has_passed, num_waited = threading.Event(), 0

    def hook(lane: str, stage: Stage) -> None:
        nonlocal num_waited
        if lane == Lane.DEVICE and stage.name == "linear" and stage.layer == NUM_LAYERS:
            has_passed.set()
        if lane == Lane.CPU:
            assert has_passed.wait(TIMEOUT_S)
            num_waited += 1

    executor = hooked_executor(model, hook)
    executor.execute(prompts("acd"))
    for plan, contexts in Conveyor(NUM_LAYERS, "cd", ("a",)).turns(8):
        has_passed.clear()
        check_result(model, plan, contexts, executor.execute(plan))
    assert num_waited == 8 * NUM_LAYERS
    executor.close()


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_lanes_of_any_speed_change_no_token(model: Decoder, seed: int) -> None:
    rng = random.Random(seed)
    slow = rng.choice(tuple(Lane))

    def hesitate(lane: str, stage: Stage) -> None:
        if lane == slow or rng.random() < 0.1:
            time.sleep(0.001)

    iterations, executor = AsyncIterations(100 + seed, NUM_BLOCKS, 16), hooked_executor(model, hesitate)
    check_random_plans(executor.execute, model, iterations, 16)
    assert iterations.num_ended > 0
    executor.close()


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_a_turn_that_fails_anywhere_can_be_tried_again(model: Decoder, seed: int) -> None:
    rng = random.Random(seed)
    stages: list[tuple[str, str, int, int]] = []  # lane, name, layer, sub-batch
    failing: list[tuple[str, str, int, int]] = []

    def hook(lane: str, stage: Stage) -> None:
        stages.append((lane, *stage[:3]))
        if failing == [(lane, *stage[:3])]:
            raise ValueError(f"{stage.name} is broken")

    executor = hooked_executor(model, hook)
    executor.execute(prompts("abcdeg"))
    for turn, (plan, contexts) in enumerate(Conveyor(NUM_LAYERS, beside=("ab", "g")).turns(10)):
        if turn and rng.random() < 0.7:
            async_slice = [each for each in stages if each[1].startswith("async ")]
            failing[:] = [rng.choice(rng.choice((stages, async_slice)))]
            with pytest.raises(ValueError, match=f"{failing[0][1]} is broken"):
                executor.execute(plan)
            failing.clear()
        stages.clear()
        check_result(model, plan, contexts, executor.execute(plan))
    executor.close()


def test_what_is_no_turn_is_refused(model: Decoder) -> None:
    executor = make_executor(model, 16)
    executor.execute(prompts("abcde"))
    (plan, _), *_ = Conveyor(NUM_LAYERS).turns(1)
    (decode, *_), *others = plan.async_decodes
    assert decode is not None
    device = decode._replace(tier=KVTier.DEVICE)
    chunk = decode._replace(token_ids=(1, 2))
    too_many = ((decode, *(None,) * MAX_ASYNC_DECODES),) * (NUM_LAYERS + 1)
    for async_groups, reason in (
        (((decode,),) * NUM_LAYERS, "4 stages in 1 slots; expected 5 stages"),
        (too_many, "17 slots; expected 5 stages and at most 16 slots"),
        (((device,),) * (NUM_LAYERS + 1), "c is in the async decodes, but is no decode with attention"),
        (((chunk,),) * (NUM_LAYERS + 1), "c is in the async decodes, but is no decode with attention"),
    ):
        with pytest.raises(ValueError, match=reason):
            executor.execute(replace(plan, async_decodes=async_groups))
    with pytest.raises(ValueError, match="the same number of slots"):
        replace(plan, async_decodes=((decode,), *others))
    executor.close()
