"""Streamed KV in graphs: layers that arrive and rows that leave, on streams of any order."""

from functools import partial

import graph_case
import pytest
import torch
from fallback_levels import Levels
from graph_case import BLOCK_SIZE, NUM_BLOCKS, Requests, contexts
from imitated_streams import ImitatedBackend
from pipeline_case import (
    RandomIterations,
    check_random_plans,
    check_result,
    make_storage,
    tiny_model,
)
from seeds import seeds
from tiny_engine import engine, tokens_of

from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.schedule.policies import POLICIES, Policy
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense

pytestmark = pytest.mark.usefixtures("kernels")

WINDOWS = (None, 5, None, None)  # one layer is resident, and one slot of the prefetch buffer is used twice
ALL = (KVTier.DEVICE, KVTier.STREAMED, KVTier.HOST)
HOMES = {
    "a": (KVTier.STREAMED, (0, 5), 20),
    "b": (KVTier.STREAMED, (2,), 3),
    "c": (KVTier.DEVICE, (8, 1), 16),
    "d": (KVTier.HOST, (0, 7), 25),
    "e": (KVTier.HOST, (3,), 1),
    "f": (KVTier.STREAMED, (9, 11), 17),
    "g": (KVTier.DEVICE, (4, 6), 9),
}
REQUESTS = Requests(HOMES, ALL)
prompts, decodes = REQUESTS.prompts, REQUESTS.decodes
make_executor = partial(graph_case.make_executor, tiers=ALL)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(WINDOWS, form=Dense(uses_tiles=False))


@pytest.mark.sample(4)
@pytest.mark.parametrize("num_queues", [None, 1, 2, 8])
@pytest.mark.parametrize("parts", [("abf",), ("ac", "bf"), ("acd", "bfe")], ids=str)
def test_decodes_are_one_graph(model: Decoder, num_queues: int | None, parts: tuple[str, ...]) -> None:
    """Decodes are all streamed, mixed with resident ones, or in two sub-batches with CPU attention."""
    names = "".join(parts)
    tiers = tuple(tier for tier in ALL if any(HOMES[name][0] == tier for name in names))
    backend = ImitatedBackend(num_queues or 0, num_queues=num_queues)
    executor, _ = make_executor(model, tiers=tiers, backend=backend)
    executor.execute(prompts(names))
    for step in range(3):
        plan = decodes(*parts, step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
        backend.check_flags()
        assert backend.num_graphs_launched == (step > 0)
    assert backend.num_programs == 1
    executor.close()


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_random_plans_on_streams_of_any_order(model: Decoder, seed: int) -> None:
    """Plans have prompts, moves between all tiers, and decodes in one or two sub-batches."""
    backend = ImitatedBackend(seed, num_queues=(None, 1, 3, 8)[seed])
    executor, _ = make_executor(model, backend=backend)
    iterations = RandomIterations(seed, NUM_BLOCKS, ALL, BLOCK_SIZE)
    check_random_plans(executor.execute, model, iterations, 6, after=backend.check_flags)
    executor.close()


def test_a_graph_serves_smaller_iterations_and_other_blocks(model: Decoder) -> None:
    executor, backend = make_executor(model)
    executor.execute(prompts("abfc"))
    for step, names in ((0, "abfc"), (1, "abfc"), (0, "bfac"), (2, "afbc")):
        plan = decodes(names, step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
    assert backend.num_programs == 1
    assert backend.was_graph
    for step, names in ((3, "afc"), (0, "bfc")):  # two streamed decodes: another graph, the same memory
        for _ in range(2):
            plan = decodes(names, step=step)
            check_result(model, plan, contexts(plan), executor.execute(plan))
    assert backend.num_programs == 2
    executor.close()


def test_iterations_that_are_too_large_take_memory_of_their_own(model: Decoder) -> None:
    executor, backend = make_executor(model, capacity=Capacity(tokens=16, decodes=1, blocks=1))
    executor.execute(prompts("abf"))
    for step in range(3):
        plan = decodes("abf", step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
    assert not backend.was_graph
    executor.close()


@pytest.mark.parametrize("lane", [Lane.DEVICE, Lane.SWAP_IN, Lane.SWAP_OUT, Lane.TO_HOST, Lane.TO_DEVICE])
def test_an_iteration_that_fails_can_be_done_again(model: Decoder, lane: Lane) -> None:
    fails, failing_layer = False, 1

    def hook(where: Lane, stage: Stage) -> None:
        if fails and where is lane and stage.layer == failing_layer:
            raise OSError("no more")

    executor, backend = make_executor(model, hook=hook)
    executor.execute(prompts("abfcd"))
    for step in range(3):
        plan = decodes("abc", "fd", step=step)
        fails, failing_layer = True, 1 + step
        with pytest.raises(OSError, match="no more"):
            executor.execute(plan)
        fails = False
        check_result(model, plan, contexts(plan), executor.execute(plan))
    assert backend.was_graph
    executor.close()


@pytest.mark.gpu
@pytest.mark.usefixtures("any_queues")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_graphs_give_the_tokens_of_a_plain_computation() -> None:
    model = tiny_model(WINDOWS, device="cuda")
    storage = make_storage(model, dict.fromkeys(ALL, NUM_BLOCKS), BLOCK_SIZE)
    timeline = Timeline()
    executor = build_executor(model, storage, 256, 8, timeline, Streams(model.device))
    assert executor.fits_graphs
    executor.execute(prompts("abcdefg"))
    for step in range(4):  # eager, captured, and replayed
        plan = decodes("acd", "bfe", step=step)
        timeline.take()
        check_result(model, plan, contexts(plan), executor.execute(plan), tolerance=2e-3)
        lanes = {"device", "cpu", "to-host", "to-device", "swap-in", "swap-out"}
        assert {span.lane for span in timeline.take()} == lanes
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", seeds(2, 3))
@pytest.mark.parametrize("level", ["host-flags", "device-only", "eager"])
def test_on_a_gpu_random_plans_give_the_tokens_of_a_plain_computation(
    levels: Levels, seed: int, level: str
) -> None:
    levels(graphs=level)
    model = tiny_model(WINDOWS, device="cuda")
    storage = make_storage(model, dict.fromkeys(ALL, NUM_BLOCKS), BLOCK_SIZE)
    executor = build_executor(model, storage, 256, 8, None, Streams(model.device))
    iterations = RandomIterations(seed, NUM_BLOCKS, ALL, BLOCK_SIZE)
    check_random_plans(executor.execute, model, iterations, 10, tolerance=2e-3)
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_pageable_memory_is_a_rung_below(levels: Levels) -> None:
    levels(host_memory="pageable")
    model = tiny_model(WINDOWS, device="cuda")
    storage = make_storage(model, dict.fromkeys(ALL, NUM_BLOCKS), BLOCK_SIZE)
    executor = build_executor(model, storage, 256, 8, None, Streams(model.device))
    assert not executor.fits_graphs
    assert fallbacks.level("graphs") == "eager"
    executor.execute(prompts("abcdefg"))
    for step in range(3):
        plan = decodes("acd", "bfe", step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan), tolerance=2e-3)
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_an_engine_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "with swapped KV", Policy("with swapped KV", (KVTier.STREAMED,)))
    with engine("gpu-only", "cpu") as made:
        expected = tokens_of(made)
    with engine("with swapped KV", "cuda", (KVTier.STREAMED,)) as made:
        assert tokens_of(made) == expected
