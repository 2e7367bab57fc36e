"""Streamed KV gives the tokens of a plain computation, even after failures."""

import random
import threading
import time
from itertools import permutations

import pytest
import torch
from executors import Hook, HookedLanes, thread_executor
from pipeline_case import (
    BLOCK_SIZE,
    RandomIterations,
    check_random_plans,
    check_result,
    make_storage,
    sampling_input,
    tiny_model,
)
from seeds import seeds
from torch_layer import TorchLayer

from neo_desktop.engine.batch import BlockCopy, IterationPlan, IterationTiming, ScheduledSequence, SubBatch
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.kv.streamed import StreamedPool
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.decoder import Decoder

WINDOWS = (None, 11, None, 3, None, None)  # six layers, so the prefetch buffer's slots are reused
NUM_LAYERS = len(WINDOWS)
NUM_BLOCKS = 24
ALL = (KVTier.DEVICE, KVTier.STREAMED, KVTier.HOST)
LANES = tuple(lane for lane in Lane if lane not in (Lane.WEIGHTS, Lane.HOST_WEIGHTS, Lane.EXPERTS))
TIMEOUT_S = 60.0  # for prompt events; only a defect waits this long

# Per request: tier, blocks, number of tokens before the second iteration.
HOMES = {
    "a": (KVTier.STREAMED, (5, 0, 9), 20),
    "b": (KVTier.STREAMED, (1, 3), 9),
    "c": (KVTier.DEVICE, (0, 1, 2), 17),
    "d": (KVTier.HOST, (4, 7, 2), 20),
    "e": (KVTier.STREAMED, (7, 8, 2, 11), 12),
    "f": (KVTier.STREAMED, (10, 6, 4, 12), 0),
    "g": (KVTier.HOST, (15, 13, 14), 10),
}
TOKENS = {name: [(7 * ord(name) + 3 * i) % 257 for i in range(32)] for name in HOMES}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(WINDOWS)


@pytest.fixture(autouse=True)
def _nothing_is_bridged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise KV of this size would come in one piece."""
    monkeypatch.setattr(StreamedPool, "bridged_bytes", 0)


def make_executor(
    model: Decoder,
    tiers: tuple[KVTier, ...] = ALL,
    hook: Hook | None = None,
    device_kind: type[KVLayer] | None = TorchLayer,
    timeline: Timeline | None = None,
) -> ModelRunner:
    storage = make_storage(model, dict.fromkeys(tiers, NUM_BLOCKS), device_kind=device_kind)
    lanes = None if hook is None else HookedLanes(hook, timeline)
    return thread_executor(model, storage, lanes=lanes, timeline=timeline)


def sequence(name: str, start: int, end: int) -> ScheduledSequence:
    tier, blocks, _ = HOMES[name]
    tokens = tuple(TOKENS[name][start:end])
    return ScheduledSequence(name, tokens, start, tier, IntArray(blocks).view(), sampling_input(end))


def beginning() -> IterationPlan:
    """Compute the first tokens of every request except one, in its tier."""
    names = [name for tier in ALL for name in HOMES if HOMES[name][0] == tier and HOMES[name][2]]
    return IterationPlan((SubBatch(tuple(sequence(name, 0, HOMES[name][2]) for name in names)),))


def mixed(step: int = 0) -> IterationPlan:
    """Decode in all tiers; continue prompts, and start one prompt."""

    def decode(name: str) -> ScheduledSequence:
        start = HOMES[name][2] + step
        return sequence(name, start, start + 1)

    first = (decode("c"), decode("a"), sequence("d", 20, 23))
    second = (decode("b"), sequence("e", 12, 29), sequence("f", 0, 27), decode("g"))
    return IterationPlan((SubBatch(first), SubBatch(second)))


def run_and_check(model: Decoder, executor: ModelRunner, plan: IterationPlan) -> None:
    contexts = {s.request_id: TOKENS[s.request_id][: s.context_len] for s in plan.sequences}
    check_result(model, plan, contexts, executor.execute(plan))


@pytest.mark.sample(6)
@pytest.mark.parametrize("device_kind", [TorchLayer, None])  # a GPU's KV layout, and a CPU's
@pytest.mark.parametrize("tiers", [(KVTier.STREAMED,), (KVTier.DEVICE, KVTier.STREAMED), ALL], ids=len)
@pytest.mark.parametrize("seed", seeds(2, 5))
def test_random_plans_give_the_tokens_of_a_plain_computation(
    model: Decoder, seed: int, tiers: tuple[KVTier, ...], device_kind: type[KVLayer] | None
) -> None:
    """Plans mix chunked prompts, decodes and moves between all tiers, in one or two sub-batches."""
    executor = make_executor(model, tiers, device_kind=device_kind)
    iterations = RandomIterations(seed, NUM_BLOCKS, tiers)
    check_random_plans(executor.execute, model, iterations, 12)
    executor.close()


@pytest.mark.parametrize("lane", LANES)
def test_lanes_of_any_speed_change_no_token(model: Decoder, lane: Lane) -> None:
    """One lane is far behind the others, and all lanes pause at random."""
    rng = random.Random(lane)

    def hesitate(at: str, stage: Stage) -> None:
        if at == lane:
            time.sleep(0.003)
        elif rng.random() < 0.3:
            time.sleep(rng.random() * 0.002)

    executor = make_executor(model, hook=hesitate)
    iterations = RandomIterations(LANES.index(lane), NUM_BLOCKS, ALL)
    check_random_plans(executor.execute, model, iterations, 5)
    executor.close()


@pytest.mark.sample(6)
@pytest.mark.parametrize(("source", "target"), list(permutations(ALL, 2)), ids=str)
@pytest.mark.parametrize("slow", [Lane.DEVICE, Lane.SWAP, Lane.HOST_SWAP, Lane.SWAP_IN])
def test_requests_decode_in_the_iteration_that_moves_them(
    model: Decoder, source: KVTier, target: KVTier, slow: Lane
) -> None:
    is_slow = False

    def hesitate(lane: str, stage: Stage) -> None:
        if is_slow and lane == slow:
            time.sleep(0.003)

    executor = make_executor(model, hook=hesitate)
    order = random.Random(3).sample(range(NUM_BLOCKS), 12)
    blocks = {name: order[3 * number : 3 * number + 3] for number, name in enumerate("abcd")}

    def part(name: str, tier: KVTier, start: int, end: int) -> ScheduledSequence:
        tokens = tuple(TOKENS[name][start:end])
        table = IntArray(blocks[name]).view()
        return ScheduledSequence(name, tokens, start, tier, table, sampling_input(end))

    executor.execute(IterationPlan((SubBatch(tuple(part(name, source, 0, 20) for name in "abcd")),)))
    is_slow = True
    copies = tuple(BlockCopy(source, block, target, block) for name in "abcd" for block in blocks[name])
    parts = [SubBatch(tuple(part(name, target, 20, 21) for name in names)) for names in ("ab", "cd")]
    run_and_check(model, executor, IterationPlan(tuple(parts), copies))
    parts = [SubBatch(tuple(part(name, target, 21, 22) for name in names)) for names in ("abcd",)]
    run_and_check(model, executor, IterationPlan(tuple(parts)))
    executor.close()


def test_layers_come_and_new_rows_leave_beside_the_computation_of_others(model: Decoder) -> None:
    """Each stage waits until the other one has begun."""
    begun: set[tuple[str, str, int]] = set()
    changed = threading.Condition()
    num_meetings = 0

    def meet(lane: str, stage: Stage) -> None:
        nonlocal num_meetings
        with changed:
            begun.add((lane, stage.name, stage.layer))
            changed.notify_all()
            if lane == Lane.SWAP_IN:  # during the computation of the layer before
                awaited = "device", "linear", stage.layer - 1
            elif lane == Lane.SWAP_OUT and stage.layer + 1 < NUM_LAYERS:
                awaited = "device", "linear", stage.layer + 1
            else:
                return
            assert changed.wait_for(lambda: awaited in begun, TIMEOUT_S), f"{stage} waits for {awaited}"
            num_meetings += 1

    executor = make_executor(model, hook=meet)
    plan = IterationPlan((SubBatch((sequence("a", 0, 20),)),))
    begun |= {("device", "linear", layer) for layer in range(NUM_LAYERS)}
    executor.execute(plan)
    begun.clear()
    num_meetings = 0
    run_and_check(model, executor, IterationPlan((SubBatch((sequence("a", 20, 21),)),)))
    assert num_meetings == 2 * (NUM_LAYERS - 1) - 1
    executor.close()


def test_the_scheduler_is_told_what_copies_took_and_what_the_device_waited_for_them(model: Decoder) -> None:
    """Copies begin only after the device needs them; without streamed KV no copies are made."""
    is_needed = threading.Event()

    def hook(lane: str, stage: Stage) -> None:
        if lane == Lane.DEVICE and stage.name == "wait for a copy":
            is_needed.set()
        elif lane == Lane.SWAP_IN and stage.layer == 1:
            assert is_needed.wait(TIMEOUT_S)

    def timing(*parts: ScheduledSequence) -> IterationTiming:
        found = executor.execute(IterationPlan((SubBatch(parts),))).timing
        assert found is not None
        return found

    executor = make_executor(model, hook=hook)
    prompt = timing(sequence("c", 0, 17), sequence("a", 0, 20))
    assert (prompt.copies_ms, prompt.copy_wait_ms) == (0, 0)  # no KV precedes it
    is_needed.clear()
    streamed = timing(sequence("c", 17, 18), sequence("a", 20, 21))
    assert 0 < streamed.copies_ms < streamed.total_ms
    assert 0 < streamed.copy_wait_ms < streamed.total_ms
    resident = timing(sequence("c", 18, 19))
    assert (resident.copies_ms, resident.copy_wait_ms) == (0, 0)
    executor.close()


def test_blocks_that_requests_share_are_brought_once(model: Decoder) -> None:
    """Both tables hold a common prefix; in each layer, each distinct block is copied once."""
    timeline = Timeline()
    executor = make_executor(model, timeline=timeline)
    tokens = TOKENS["a"]
    tables = {"x": [0, 1, 2], "y": [0, 1, 3]}

    def decode(name: str) -> ScheduledSequence:
        table = IntArray(tables[name]).view()
        return ScheduledSequence(name, (tokens[18],), 18, KVTier.STREAMED, table, sampling_input(19))

    for name in tables:
        start = 0 if name == "x" else 16
        prompt = decode(name)._replace(token_ids=tuple(tokens[start:18]), start=start)
        executor.execute(IterationPlan((SubBatch((prompt,)),)))
    timeline.take()
    plan = IterationPlan((SubBatch((decode("x"),)), SubBatch((decode("y"),))))
    check_result(model, plan, dict.fromkeys("xy", tokens[:19]), executor.execute(plan))
    brought = [span.stage for span in timeline.take() if span.lane == Lane.SWAP_IN]
    assert [stage.layer for stage in brought] == list(range(1, NUM_LAYERS))
    assert {stage.tokens for stage in brought} == {4 * BLOCK_SIZE}
    executor.close()


@pytest.mark.parametrize("device_kind", [TorchLayer, None])
def test_only_what_is_used_is_brought(model: Decoder, device_kind: type[KVLayer] | None) -> None:
    """Other decodes join each iteration. Earlier contents of the prefetch buffer become NaN."""
    timeline = Timeline()
    storage = make_storage(model, dict.fromkeys(ALL, NUM_BLOCKS), device_kind=device_kind)
    executor = thread_executor(model, storage, timeline=timeline)
    run_and_check(model, executor, beginning())
    pool = storage[KVTier.STREAMED]
    assert isinstance(pool, StreamedPool)
    steps = dict.fromkeys(HOMES, 0)
    for names in ("a", "be", "e", "ab", "bea", "b", "eca"):
        for part in pool.parts:
            part[max(NUM_LAYERS - len(pool.streamed_layers), 1) :] = torch.nan  # the prefetch buffer
        timeline.take()
        decodes = []
        for name in names:
            start = HOMES[name][2] + steps[name]
            decodes.append(sequence(name, start, start + 1))
            steps[name] += 1
        run_and_check(model, executor, IterationPlan((SubBatch(tuple(decodes)),)))
        streamed = [each for each in decodes if each.tier.is_streamed]
        num_blocks = sum(-(-each.start // BLOCK_SIZE) for each in streamed)
        brought = [span.stage.tokens for span in timeline.take() if span.lane == Lane.SWAP_IN]
        assert brought == [num_blocks * BLOCK_SIZE] * (NUM_LAYERS - 1)
    executor.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(6))
def test_whatever_fails_the_iteration_can_be_done_again(model: Decoder, part: int) -> None:
    """A sixth of the stages of all lanes fails; then the same plan gives its tokens."""
    stages: list[tuple[str, Stage]] = []
    failing: list[tuple[str, Stage]] = []
    is_listening = False

    def hook(lane: str, stage: Stage) -> None:
        if is_listening:
            stages.append((lane, stage))
        if failing == [(lane, stage)]:
            raise ValueError(f"{stage.name} is broken")
        if failing and lane != "device":
            time.sleep(0.0005)  # likely to be at work when another lane fails

    executor = make_executor(model, hook=hook)
    executor.execute(beginning())
    is_listening = True
    run_and_check(model, executor, mixed())
    is_listening = False
    assert {lane for lane, _ in stages} == set(LANES)
    for lane, stage in list(dict.fromkeys(stages))[part::6]:
        failing[:] = [(lane, stage)]
        with pytest.raises(ValueError, match=f"{stage.name} is broken"):
            executor.execute(mixed())
        failing.clear()
        run_and_check(model, executor, mixed())
    executor.close()


def test_of_decodes_nothing_is_stored_before_the_iteration_has_ended_well(model: Decoder) -> None:
    failing = False

    def hook(lane: str, stage: Stage) -> None:
        if failing and lane == "device" and stage.name == "sample":
            raise ValueError("broken")

    storage = make_storage(model, {KVTier.STREAMED: NUM_BLOCKS})
    executor = thread_executor(model, storage, lanes=HookedLanes(hook))
    executor.execute(IterationPlan((SubBatch((sequence("a", 0, 20), sequence("b", 0, 9))),)))
    pool = storage[KVTier.STREAMED]
    assert isinstance(pool, StreamedPool)
    before = [home.clone() for home in pool.homes]
    plan = IterationPlan((SubBatch((sequence("a", 20, 21),)), SubBatch((sequence("b", 9, 10),))))
    failing = True
    with pytest.raises(ValueError, match="broken"):
        executor.execute(plan)
    failing = False
    for home, old in zip(pool.homes, before, strict=True):
        assert torch.equal(home.nan_to_num(1e9), old.nan_to_num(1e9))
    run_and_check(model, executor, plan)
    for home, old in zip(pool.homes, before, strict=True):
        changed = (home.nan_to_num(1e9) != old.nan_to_num(1e9)).flatten(2).any(-1)
        slots = [9 * BLOCK_SIZE + 20 % BLOCK_SIZE, 3 * BLOCK_SIZE + 9 % BLOCK_SIZE]
        assert [layer.nonzero().flatten().tolist() for layer in changed] == [sorted(slots)] * (NUM_LAYERS - 1)
    executor.close()
