"""Decodes that go through the layers at their own pace give the tokens of a plain computation."""

import pytest
from executors import thread_executor
from pipeline_case import BLOCK_SIZE, check_result, make_storage, tiny_model
from staggered_case import StaggeredIterations
from torch_layer import TorchLayer

from neo_desktop.engine.execute.plan_executor import PlanExecutor
from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.placement import PLACES
from neo_desktop.models.decoder import Decoder

NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


def make_executor(
    model: Decoder, block_size: int = BLOCK_SIZE, device_kind: type[KVLayer] | None = TorchLayer
) -> PlanExecutor:
    storage = make_storage(model, dict.fromkeys(PLACES, NUM_BLOCKS), block_size, device_kind=device_kind)
    return thread_executor(model, storage)


@pytest.mark.parametrize("device_kind", [TorchLayer, None])  # as with a GPU, and as without one
@pytest.mark.parametrize("block_size", [8, 16])  # K of host memory in rows, and in pairs
@pytest.mark.parametrize("seed", range(8))
def test_random_paces_change_no_token(
    model: Decoder, seed: int, block_size: int, device_kind: type[KVLayer] | None
) -> None:
    """Between turns comes anything, slots vary, some decodes give up and begin again."""
    iterations = StaggeredIterations(seed, NUM_BLOCKS, block_size)
    executor = make_executor(model, block_size, device_kind)
    for plan, contexts in iterations.plans(30):
        result = executor.execute(plan)
        check_result(model, plan, contexts, result)
        iterations.take_in(result)
        assert result.timing is not None
        if any(sequence is not None for cohort in plan.staggered[:-1] for sequence in cohort):
            assert result.timing.host_attention_ms > 0
    assert iterations.num_ended > 0
    executor.close()
