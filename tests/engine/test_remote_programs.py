"""KV in workers' memory: the tokens of a plain computation, separate lanes, clean ends."""

from contextlib import ExitStack

import pytest
import torch
from async_case import AsyncIterations
from executors import thread_executor
from pipeline_case import (
    BLOCK_SIZE,
    RandomIterations,
    check_random_plans,
    check_result,
    make_storage,
    sampling_input,
    tiny_config,
    tiny_model,
)
from seeds import seeds
from workers import running_worker, with_workers

from neo_desktop.engine.batch import IterationPlan, ScheduledSequence, SubBatch
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.remote.link import WorkerLostError
from neo_desktop.engine.remote.worker import AttentionWorker
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.registry import random_model

NUM_BLOCKS = 24
ONE, TWO = KVTier.worker(1), KVTier.worker(2)


class Case:
    """A storage with workers, closed at the end of the test."""

    def __init__(self, stack: ExitStack, model: Decoder, local: tuple[KVTier, ...], num_workers: int) -> None:
        self.workers: list[AttentionWorker] = []
        addresses = []
        for _ in range(num_workers):
            worker, address = stack.enter_context(running_worker())
            self.workers.append(worker)
            addresses.append(address)
        pools = make_storage(model, dict.fromkeys(local, NUM_BLOCKS))
        here = {tier: pools[tier] for tier in pools.tiers}
        self.storage = KVStorage(with_workers(model, here, addresses, NUM_BLOCKS, BLOCK_SIZE))
        self.timeline = Timeline()
        self.executor: ModelRunner = thread_executor(model, self.storage, timeline=self.timeline)
        stack.callback(self.executor.close)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


@pytest.fixture(scope="module")
def model_with_sinks() -> Decoder:
    """Return a model with attention sinks and a softcap on scores."""
    return tiny_model(attention_sinks=True, softcap=0.5)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("local", "num_workers"),
    [((KVTier.DEVICE,), 1), ((), 2), (MEASURED_TIERS, 2)],
    ids=["one", "only", "all"],
)
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_random_plans_give_the_tokens_of_a_plain_computation(
    stack: ExitStack,
    model: Decoder,
    model_with_sinks: Decoder,
    seed: int,
    local: tuple[KVTier, ...],
    num_workers: int,
) -> None:
    """Plans mix chunked prompts, decodes, and moves to workers and back, in one or two sub-batches."""
    model = model_with_sinks if seed % 3 == 0 else model
    case = Case(stack, model, local, num_workers)
    iterations = RandomIterations(seed, NUM_BLOCKS, tiers=case.storage.tiers)
    check_random_plans(case.executor.execute, model, iterations, 12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("local", [(KVTier.DEVICE,), MEASURED_TIERS], ids=["workers", "and the CPU"])
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_decodes_of_workers_at_their_own_pace_give_the_tokens_of_a_plain_computation(
    stack: ExitStack, model: Decoder, model_with_sinks: Decoder, seed: int, local: tuple[KVTier, ...]
) -> None:
    """Async decodes of several tiers share steps, beside ordinary decodes of the same workers."""
    model = model_with_sinks if seed % 3 == 0 else model
    case = Case(stack, model, local, 2)
    tiers = case.storage.tiers
    iterations = AsyncIterations(seed, NUM_BLOCKS, BLOCK_SIZE, model.config.num_layers, tiers=tiers)
    where = set()
    for plan, contexts in iterations.plans(24):
        result = case.executor.execute(plan)
        check_result(model, plan, contexts, result)
        iterations.take_in(result)
        where |= {sequence.tier for sequence in plan.async_sequences}
    assert iterations.num_ended > 0
    assert where >= {ONE, TWO}


def sequence(name: str, tier: KVTier, tokens: list[int], start: int) -> ScheduledSequence:
    blocks = IntArray(range(-(-(start + len(tokens)) // BLOCK_SIZE))).view()
    return ScheduledSequence(name, tuple(tokens), start, tier, blocks, sampling_input(start + len(tokens)))


def plan_of(homes: dict[str, KVTier], start: int, end: int) -> IterationPlan:
    sequences = (sequence(name, home, tokens_of(name)[start:end], start) for name, home in homes.items())
    return IterationPlan((SubBatch(tuple(sequences)),))


def tokens_of(name: str) -> list[int]:
    return [(7 * ord(name) + 3 * i) % 257 for i in range(20)]


def test_each_worker_has_lanes_of_its_own_beside_the_cpu(stack: ExitStack, model: Decoder) -> None:
    case = Case(stack, model, (KVTier.HOST,), 2)
    homes = {"a": KVTier.HOST, "b": ONE, "c": TWO}
    for begin, end in ((0, 9), (9, 10)):
        plan = plan_of(homes, begin, end)
        check_result(
            model, plan, {name: tokens_of(name)[:end] for name in homes}, case.executor.execute(plan)
        )
    attending = {s.lane for s in case.timeline.spans if "attention" in s.stage.name} - {"device"}
    storing = {s.lane for s in case.timeline.spans if s.stage.name == "store prompts' KV"} - {"store"}
    assert attending == {"cpu", "worker-1", "worker-2"}
    assert storing == {"host-swap", "worker-1 rows", "worker-2 rows"}


def test_a_worker_that_ends_fails_the_iteration_by_name_and_the_others_go_on(
    stack: ExitStack, model: Decoder
) -> None:
    case = Case(stack, model, (KVTier.DEVICE,), 2)
    homes = {"a": KVTier.DEVICE, "b": ONE, "c": TWO}
    case.executor.execute(plan_of(homes, 0, 9))
    case.workers[0].close()
    with pytest.raises(WorkerLostError, match="worker-1 is lost") as caught:
        case.executor.execute(plan_of(homes, 9, 10))
    assert caught.value.worker == "worker-1"
    del homes["b"]
    plan = plan_of(homes, 9, 10)
    check_result(model, plan, {name: tokens_of(name)[:10] for name in homes}, case.executor.execute(plan))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits_come_back_as_they_were_stored(stack: ExitStack, dtype: torch.dtype) -> None:
    model = random_model(tiny_config(), dtype=dtype, device=torch.device("cpu"))
    case = Case(stack, model, (), 1)
    layer = case.storage[ONE].layer(2)
    rows = torch.randn(2, 40, model.config.num_kv_heads, model.config.head_dim, dtype=model.dtype)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:40]
    layer.write(rows[0], rows[1], slots)
    found = torch.empty_like(rows)
    layer.read(slots, found)
    assert torch.equal(found, rows)
