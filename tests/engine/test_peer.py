"""KV in a second GPU's memory: the tokens of a plain computation, on lanes of any speed and in any order."""

import random
import time

import pytest
import torch
from executors import HookedLanes, carry_out_copies, thread_executor
from imitated_streams import ImitatedBackend
from kv_pools import spoiled
from ladder_rungs import Rungs
from pipeline_case import (
    BLOCK_SIZE,
    RandomIterations,
    check_result,
    make_storage,
    sampling_input,
    tiny_model,
)
from torch_layer import TorchLayer

from neo_desktop.engine.batch import BlockCopy, IterationPlan, ScheduledSequence, SubBatch
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.plan_executor import PlanExecutor
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.kv.peer import PeerPool
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.placement import Place
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.stages import Stages

NUM_BLOCKS = 24
LANES = (Lane.DEVICE, Lane.PEER, Lane.CPU, Lane.TO_DEVICE, Lane.STORE, Lane.SWAP)
ALL = (Place.DEVICE, Place.PEER, Place.HOST)
CPU = torch.device("cpu")


def storage_of(
    model: Decoder, places: tuple[Place, ...], device_kind: type[KVLayer] = TorchLayer
) -> KVStorage:
    of_others = {place: NUM_BLOCKS for place in places if not place.is_peer}
    others = make_storage(model, of_others, device_kind=device_kind)
    pools: dict[Place, KVPool] = {}
    for place in places:
        if place.is_peer:
            pool = PeerPool(
                model.config, NUM_BLOCKS, BLOCK_SIZE, model.dtype, CPU, CPU, TorchLayer, model.sinks
            )
            pools[place] = spoiled(pool)
        else:
            pools[place] = others[place]
    return KVStorage(pools)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


@pytest.fixture(scope="module")
def model_with_sinks() -> Decoder:
    """And with a cap of scores."""
    return tiny_model(attention_sinks=True, softcap=0.5)


def run_random(model: Decoder, executor: PlanExecutor, seed: int, places: tuple[Place, ...], n: int) -> None:
    iterations = RandomIterations(seed, NUM_BLOCKS, places)
    for plan, contexts in iterations.plans(n):
        result = executor.execute(plan)
        check_result(model, plan, contexts, result)
        iterations.take_in(result)
    executor.close()


@pytest.mark.parametrize("places", [(Place.PEER,), (Place.DEVICE, Place.PEER), ALL], ids=len)
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_give_the_tokens_of_a_plain_computation(
    model: Decoder, model_with_sinks: Decoder, seed: int, places: tuple[Place, ...]
) -> None:
    """Prompts in chunks, decodes, moves there and back, in one or two sub-batches."""
    model = model_with_sinks if seed % 3 == 0 else model
    run_random(model, thread_executor(model, storage_of(model, places)), seed, places, 12)


@pytest.mark.parametrize("lane", LANES)
def test_lanes_of_any_speed_change_no_token(model: Decoder, lane: Lane) -> None:
    rng = random.Random(lane)

    def hesitate(at: str, stage: Stage) -> None:
        if at == lane:
            time.sleep(0.003)
        elif rng.random() < 0.3:
            time.sleep(rng.random() * 0.002)

    executor = thread_executor(model, storage_of(model, ALL), lanes=HookedLanes(hesitate))
    run_random(model, executor, LANES.index(lane), ALL, 5)


@pytest.mark.parametrize(
    ("places", "seed"),
    [((Place.PEER,), 0), ((Place.PEER,), 1), ((Place.DEVICE, Place.PEER), 2), (ALL, 3)],
)
def test_streams_in_any_order_that_their_events_allow_change_no_token(
    model: Decoder, places: tuple[Place, ...], seed: int
) -> None:
    executor, _ = imitated_executor(model, places, seed, num_queues=(None, 1, 2, 3)[seed])
    run_random(model, executor, seed, places, 5)


@pytest.mark.parametrize("seed", range(2))
def test_through_host_memory_rows_are_the_same(model: Decoder, rungs: Rungs, seed: int) -> None:
    rungs(peer_copies="through-host")
    run_random(model, thread_executor(model, storage_of(model, ALL)), seed, ALL, 6)


@pytest.mark.parametrize("num_queues", [None, 1, 2, 8])
def test_between_the_second_gpus_attention_all_is_graphs(model: Decoder, num_queues: int | None) -> None:
    """Of each layer the linear stages are a graph, and what the others attend to is another."""
    executor, backend = imitated_executor(model, ALL, num_queues or 0, num_queues)
    plan, contexts = one_of_each_place(0, 9)
    check_result(model, plan, contexts, executor.execute(plan))
    for end in range(10, 14):
        plan, contexts = one_of_each_place(end - 1, end)
        check_result(model, plan, contexts, executor.execute(plan))
        backend.check_flags()
    assert backend.num_programs == 1
    assert backend.num_graphs_launched == 2 * model.config.num_layers + 1
    assert backend.num_launched == model.config.num_layers + 2  # its attention, inputs, sampling
    executor.close()


def imitated_executor(
    model: Decoder, places: tuple[Place, ...], seed: int, num_queues: int | None
) -> tuple[PlanExecutor, ImitatedBackend]:
    backend = ImitatedBackend(seed, num_queues=num_queues)
    executor = PlanExecutor(
        Stages(model, dispatch),
        storage_of(model, places, DeviceLayer),
        Capacity(tokens=256, decodes=8, blocks=64),
        backend,
        num_programs=8,
        uses_gpu=True,
    )
    return executor, backend


def one_of_each_place(start: int, end: int) -> tuple[IterationPlan, dict[str, list[int]]]:
    """A plan for some tokens of a request in each place, and all tokens up to them."""
    tokens = {name: [(7 * ord(name) + 3 * i) % 257 for i in range(20)] for name in "abc"}
    blocks = IntArray(range(-(-end // BLOCK_SIZE))).view()
    sequences = (
        ScheduledSequence(name, tuple(each[start:end]), start, place, blocks, sampling_input(end))
        for (name, each), place in zip(tokens.items(), ALL, strict=True)
    )
    return IterationPlan((SubBatch(tuple(sequences)),)), {name: each[:end] for name, each in tokens.items()}


def test_its_attention_is_done_by_a_lane_of_its_own_beside_the_devices(model: Decoder) -> None:
    timeline = Timeline()
    executor = thread_executor(model, storage_of(model, ALL), timeline=timeline)
    for start, end in ((0, 9), (9, 10)):
        plan, contexts = one_of_each_place(start, end)
        check_result(model, plan, contexts, executor.execute(plan))
    executor.close()
    attending = {s.lane for s in timeline.spans if "attention" in s.stage.name}
    assert attending == {"device", "cpu", "peer"}
    sent = [span.stage for span in timeline.spans if span.stage.name == "q, k, v"]
    assert {stage.tokens for stage in sent} == {1}  # the CPU's: the second GPU gets them straight


def test_moves_there_and_back_leave_rows_as_they_were(model: Decoder) -> None:
    storage = storage_of(model, (Place.DEVICE, Place.PEER))
    slots = torch.arange(3 * BLOCK_SIZE, 6 * BLOCK_SIZE)
    shape = (2, len(slots), *storage[Place.DEVICE].row_shape)
    rows = [torch.randn(shape) for _ in range(model.config.num_layers)]
    for layer, each in enumerate(rows):
        storage[Place.DEVICE].rows_at(slots).write(layer, each)

    there = [BlockCopy(Place.DEVICE, block, Place.PEER, 20 - block) for block in (3, 4, 5)]
    back = [BlockCopy(Place.PEER, 20 - block, Place.DEVICE, block + 6) for block in (3, 4, 5)]
    for copies in (there, back):
        carry_out_copies(model.config, model.dtype, storage, copies)
    for layer, each in enumerate(rows):
        found = torch.empty(shape)
        storage[Place.DEVICE].rows_at(slots + 6 * BLOCK_SIZE).read(layer, found)
        assert torch.equal(found, each)
