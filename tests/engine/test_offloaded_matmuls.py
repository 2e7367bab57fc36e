"""A model with matrices on the device and in host memory gives the tokens of the unsplit model."""

import random
import threading
import time
from pathlib import Path

import pytest
from checkpoints import VOCAB_SIZE, save_checkpoint, transformers_greedy
from executors import Hook, HookedLanes, thread_executor
from expert_models import expert_model, experts_config
from pipeline_case import (
    BLOCK_SIZE,
    RandomIterations,
    check_random_plans,
    check_result,
    make_storage,
    tiny_model,
)
from seeds import seeds
from split_models import host_model, split_model
from torch_layer import TorchLayer

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.batch import IterationPlan
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.models import expert_pieces
from neo_desktop.models.decoder import Decoder

NUM_BLOCKS = 24
EXPERT_BYTES = 3 * 64 * experts_config().hidden_size * 4  # one expert of `expert_model` in float32
TIMEOUT_S = 60.0  # for prompt events; only a defect waits this long


@pytest.fixture(scope="module")
def whole() -> Decoder:
    """Return the reference model."""
    return tiny_model()


def make_executor(model: Decoder, hook: Hook | None = None, timeline: Timeline | None = None) -> ModelRunner:
    storage = make_storage(
        model, dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS), BLOCK_SIZE, device_kind=TorchLayer
    )
    lanes = None if hook is None else HookedLanes(hook, timeline)
    return thread_executor(model, storage, lanes=lanes, timeline=timeline)


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", seeds(2, 16))
def test_random_plans_give_the_unsplit_models_tokens(whole: Decoder, seed: int) -> None:
    """Plans mix prompts, decodes of both tiers, moves and one or two sub-batches; matrices split anywhere."""
    rng = random.Random(seed)
    slow = rng.choice((None, *Lane))

    def hesitate(lane: str, stage: Stage) -> None:
        if lane == slow:
            time.sleep(0.001)

    model = split_model(seed)
    iterations, executor = RandomIterations(seed, NUM_BLOCKS), make_executor(model, hesitate)
    check_random_plans(executor.execute, whole, iterations, 8)
    executor.close()


def prompts(seed: int = 3) -> tuple[IterationPlan, dict[str, list[int]]]:
    return next(plan for plan in RandomIterations(seed, NUM_BLOCKS).plans(3) if plan[0].sequences)


def test_pieces_come_while_the_cpu_multiplies(whole: Decoder) -> None:
    """The bus copies the next layer's weights while the CPU still multiplies its part."""
    coming, was_ahead = threading.Event(), []

    def hook(lane: str, stage: Stage) -> None:
        if lane == Lane.WEIGHTS and stage.layer >= 2:
            coming.set()
        if lane == Lane.CPU and stage.layer == 1 and stage.name.startswith("down"):
            was_ahead.append(coming.wait(TIMEOUT_S))

    model = host_model(0.5)
    executor = make_executor(model, hook)
    plan, contexts = prompts()
    check_result(whole, plan, contexts, executor.execute(plan))
    executor.close()
    assert was_ahead == [True] * len(plan.sub_batches)


@pytest.mark.parametrize("lane", [Lane.WEIGHTS, Lane.CPU, Lane.TO_HOST, Lane.TO_DEVICE])
def test_an_iteration_that_fails_in_a_product_can_be_done_again(whole: Decoder, lane: Lane) -> None:
    model, fails = host_model(0.5), True

    def hook(where: str, stage: Stage) -> None:
        if fails and where == lane and stage.layer == 2:
            raise OSError("no more")

    executor = make_executor(model, hook)
    plan, contexts = prompts()
    with pytest.raises(OSError, match="no more"):
        executor.execute(plan)
    fails = False
    check_result(whole, plan, contexts, executor.execute(plan))
    executor.close()


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", ["gpu-only", "neo", "auto", "apex"])
def test_greedy_tokens_are_those_of_transformers(checkpoint: Path, policy: str) -> None:
    """A fixed budget of weights is resident; measured rates divide the others."""
    prompts = [[(7 * i + 3 * length) % VOCAB_SIZE for i in range(length)] for length in (3, 40, 17, 90)]
    caches = {"gpu_cache_tokens": 320, "cpu_cache_tokens": 0 if policy == "gpu-only" else 1000}
    with Engine.from_pretrained(
        checkpoint,
        device="cpu",
        policy=policy,
        gpu_weights_gib=0.0004,
        max_batch_tokens=32,
        max_batch_requests=8,
        **caches,
    ) as engine:
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params)
    expected = [transformers_greedy(checkpoint, prompt, 24) for prompt in prompts]
    assert [list(output.token_ids) for output in outputs] == expected


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", seeds(2, 12))
def test_experts_in_host_memory_give_the_tokens_of_those_on_the_device(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of experts is resident, in any layer, beside offloaded matrices.

    Any share of the others is streamed, in pieces of one expert, several experts or all experts.
    """
    monkeypatch.setattr(expert_pieces, "PIECE_BYTES", (1, 2 * EXPERT_BYTES, 2**20)[seed % 3])
    model, reference = expert_model(seed), expert_model()
    iterations, executor = RandomIterations(seed, NUM_BLOCKS), make_executor(model)
    check_random_plans(executor.execute, reference, iterations, 8)
    executor.close()


@pytest.mark.parametrize("lane", [Lane.WEIGHTS, Lane.CPU, Lane.TO_HOST, Lane.TO_DEVICE])
def test_an_iteration_that_fails_in_experts_can_be_done_again(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_pieces, "PIECE_BYTES", 1)
    model, reference, fails, num_failed = expert_model(3, share=0.5), expert_model(), True, 0

    def hook(where: str, stage: Stage) -> None:
        nonlocal num_failed
        if fails and where == lane and stage.name in ("experts", "experts on the CPU", "weights"):
            num_failed += 1
            raise OSError("no more")

    executor = make_executor(model, hook)
    plan, contexts = prompts()
    with pytest.raises(OSError, match="no more"):
        executor.execute(plan)
    assert num_failed
    fails = False
    check_result(reference, plan, contexts, executor.execute(plan))
    executor.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_experts_of_checkpoints_give_transformers_tokens(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, family)
    prompts = [[(7 * i + 3 * length) % VOCAB_SIZE for i in range(length)] for length in (3, 40, 17)]
    expected = [transformers_greedy(folder, prompt, 16) for prompt in prompts]
    for gib in (0.0005, 0.0008):
        with Engine.from_pretrained(folder, device="cpu", gpu_weights_gib=gib) as engine:
            params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
            outputs = engine.generate(prompts, params)
        assert [list(output.token_ids) for output in outputs] == expected
