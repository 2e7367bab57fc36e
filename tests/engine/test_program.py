"""A program on threads gives the tokens of a plain computation, overlaps, and ends cleanly after failures."""

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mixed_plan import (
    LANES,
    NUM_BLOCKS,
    TOKENS,
    make_executor,
    mixed,
    prompts,
    run_and_check,
    sequence,
)
from pipeline_case import (
    BLOCK_SIZE,
    NUM_LAYERS,
    RandomIterations,
    check_random_plans,
    check_result,
    tiny_model,
)
from seeds import seeds
from torch_layer import TorchLayer

from neo_desktop.engine.batch import (
    BlockCopy,
    IterationPlan,
    SubBatch,
)
from neo_desktop.engine.execute.timeline import Stage, Timeline, overlap_ns
from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.models.decoder import Decoder

CPU = torch.device("cpu")
TIMEOUT_S = 60.0  # for prompt events; only a defect waits this long


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


@pytest.fixture(scope="module")
def model_with_sinks() -> Decoder:
    """Return a model with attention sinks and a softcap on scores."""
    return tiny_model(attention_sinks=True, softcap=0.5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("device_kind", [TorchLayer, None])  # a GPU's KV layout, and a CPU's
@pytest.mark.parametrize("block_size", [8, 16])  # K of host memory in rows, and in pairs
@pytest.mark.parametrize("seed", seeds(2, 12))
def test_random_plans_give_the_tokens_of_a_plain_computation(
    model: Decoder,
    model_with_sinks: Decoder,
    seed: int,
    block_size: int,
    device_kind: type[KVLayer] | None,
) -> None:
    """Plans mix chunked prompts, decodes and moves both ways, in one or two sub-batches."""
    if seed % 3 == 0:
        model = model_with_sinks
    iterations = RandomIterations(seed, NUM_BLOCKS * BLOCK_SIZE // block_size, block_size=block_size)
    executor = make_executor(model, block_size=block_size, device_kind=device_kind)
    for plan, contexts in iterations.plans(12):
        result = executor.execute(plan)
        check_result(model, plan, contexts, result)
        iterations.take_in(result)
        assert result.timing is not None
        has_cpu_decodes = any(s.tier == KVTier.HOST and s.is_decode for s in plan.sequences)
        assert (result.timing.host_attention_ms > 0) == has_cpu_decodes
        assert result.timing.host_attention_ms < result.timing.total_ms
    executor.close()


@pytest.mark.parametrize("seed", seeds(2, 10))
def test_lanes_of_any_speed_change_no_token(model: Decoder, seed: int) -> None:
    rng = random.Random(seed)
    slow = rng.choice(LANES)  # one lane far behind the others, plus random pauses everywhere

    def hesitate(lane: str, stage: Stage) -> None:
        if lane == slow:
            time.sleep(0.002)
        elif rng.random() < 0.3:
            time.sleep(rng.random() * 0.002)

    iterations, executor = RandomIterations(100 + seed, NUM_BLOCKS), make_executor(model, hesitate)
    check_random_plans(executor.execute, model, iterations, 6)
    executor.close()


@pytest.mark.parametrize("tier", MEASURED_TIERS, ids=str)
@pytest.mark.parametrize("num_sub_batches", [1, 2])
def test_the_same_tokens_wherever_all_live(model: Decoder, tier: KVTier, num_sub_batches: int) -> None:
    """`gpu-only` and `fastdecode`: prompts and decodes in either sub-batch, all KV in one tier."""
    executor = make_executor(model)
    tokens = {name: [(ord(name) * 11 + 5 * i) % 257 for i in range(12)] for name in "abcd"}
    for begin, end in ((0, 10), (10, 11), (11, 12)):
        all_of_them = [
            sequence(name, context[begin:end], begin, tier, 3 * index)
            for index, (name, context) in enumerate(tokens.items())
        ]
        parts = [tuple(all_of_them[i::num_sub_batches]) for i in range(num_sub_batches)]
        plan = IterationPlan(tuple(SubBatch(part) for part in parts))
        check_result(model, plan, {n: t[:end] for n, t in tokens.items()}, executor.execute(plan))
    executor.close()


@pytest.mark.parametrize("slow", LANES)
@pytest.mark.parametrize("target", MEASURED_TIERS, ids=str)
def test_requests_decode_in_the_iteration_that_moves_them(model: Decoder, target: KVTier, slow: str) -> None:
    """Only the copies' own signals make the attention wait for a slow swap lane."""
    (source,) = set(MEASURED_TIERS) - {target}
    names, is_slow = "abcd", False

    def hesitate(lane: str, stage: Stage) -> None:
        if is_slow and lane == slow:
            time.sleep(0.005)

    executor = make_executor(model, hesitate)
    before = [sequence(name, TOKENS[name][:20], 0, source, 3 * i) for i, name in enumerate(names)]
    executor.execute(IterationPlan((SubBatch(tuple(before)),)))
    is_slow = True
    after = [sequence(name, TOKENS[name][20:21], 20, target, 3 * i) for i, name in enumerate(names)]
    copies = tuple(BlockCopy(source, block, target, block) for block in range(12))
    run_and_check(
        model, executor, IterationPlan((SubBatch(tuple(after[:2])), SubBatch(tuple(after[2:]))), copies)
    )
    executor.close()


class Meeting:
    """Hook that makes named stages wait until others have begun; without overlap a wait times out."""

    def __init__(self, waits: Callable[[str, Stage], tuple[str, str, int, int] | None]) -> None:
        self._waits = waits
        self._begun: set[tuple[str, str, int, int]] = set()
        self._changed = threading.Condition()
        self.num_meetings = 0

    def __call__(self, lane: str, stage: Stage) -> None:
        with self._changed:
            self._begun.add((lane, stage.name, stage.layer, stage.sub_batch))
            self._changed.notify_all()
            awaited = self._waits(lane, stage)
            if awaited is not None:
                assert self._changed.wait_for(lambda: awaited in self._begun, TIMEOUT_S), (
                    f"{stage} on {lane} is over before {awaited} begins"
                )
                self.num_meetings += 1

    def forget(self) -> None:
        self._begun.clear()
        self.num_meetings = 0


def test_cpu_attention_of_one_sub_batch_runs_beside_the_device_work_of_the_other(model: Decoder) -> None:
    """In every layer, each stage waits until the other one has begun."""

    def waits(lane: str, stage: Stage) -> tuple[str, str, int, int] | None:
        if lane == "cpu" and stage.sub_batch == 0:
            return "device", "linear", stage.layer, 1
        if lane == "cpu" and stage.layer + 1 < NUM_LAYERS:
            return "device", "linear", stage.layer + 1, 0
        if (lane, stage.name, stage.sub_batch) == ("device", "linear", 1) and stage.layer < NUM_LAYERS:
            return "cpu", "CPU attention", stage.layer, 0
        return None

    meeting, timeline = Meeting(waits), Timeline()
    executor = make_executor(model, meeting, timeline)
    executor.execute(prompts())
    meeting.forget()
    run_and_check(model, executor, mixed())
    assert meeting.num_meetings == 3 * NUM_LAYERS - 1
    assert overlap_ns(timeline.spans, "cpu", "device") > 0
    executor.close()


def test_cpu_attention_runs_beside_the_device_attention_of_its_only_sub_batch(model: Decoder) -> None:
    def waits(lane: str, stage: Stage) -> tuple[str, str, int, int] | None:
        if lane == "cpu":
            return "device", "attention", stage.layer, 0
        if (lane, stage.name) == ("device", "attention"):
            return "cpu", "CPU attention", stage.layer, 0
        return None

    meeting = Meeting(waits)
    executor = make_executor(model, meeting)
    one = SubBatch((sequence("a", [1], 0, KVTier.DEVICE, 0), sequence("b", [2], 0, KVTier.HOST, 0)))
    executor.execute(IterationPlan((one,)))
    assert meeting.num_meetings == 2 * NUM_LAYERS
    executor.close()


def test_swapping_runs_beside_the_computation_of_other_layers(model: Decoder) -> None:
    """Prompts' KV leaves behind the next layer's computation; copies and earlier KV come one layer ahead."""

    def waits(lane: str, stage: Stage) -> tuple[str, str, int, int] | None:
        if lane == "swap" and stage.name in ("copy blocks", "fetch earlier KV") and stage.layer > 0:
            return "device", "linear", stage.layer - 1, 0
        if lane != "host-swap":
            return None
        if stage.name == "store prompts' KV" and stage.layer + 1 < NUM_LAYERS:
            return "device", "linear", stage.layer + 1, stage.sub_batch
        return None

    meeting = Meeting(waits)
    executor = make_executor(model, meeting)
    executor.execute(prompts())
    meeting.forget()
    run_and_check(model, executor, mixed())
    assert meeting.num_meetings == 5 * (NUM_LAYERS - 1)  # stores, fetches of two sub-batches, copies
    executor.close()


def test_without_kv_on_the_host_no_other_thread_is_used(model: Decoder) -> None:
    before = threading.active_count()
    timeline = Timeline()
    executor = make_executor(model, timeline=timeline)
    tokens = list(range(9))
    plan = IterationPlan((SubBatch((sequence("a", tokens, 0, KVTier.DEVICE, 0),)),))
    check_result(model, plan, {"a": tokens}, executor.execute(plan))
    assert threading.active_count() <= before
    assert {span.lane for span in timeline.spans} == {"device"}
    executor.close()


def test_the_trace_shows_all_lanes_of_all_iterations(model: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    executor = make_executor(model, timeline=Timeline(path))
    run_and_check(model, executor, prompts())
    run_and_check(model, executor, mixed())
    executor.close()
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == set(LANES)
    spans = [e for e in events if e["ph"] == "X"]
    assert {span["args"]["iteration"] for span in spans} == {0, 1}
    attention = [s["args"] for s in spans if s["cat"] == "cpu" and s["args"]["iteration"] == 1]
    assert sorted((a["layer"], a["sub_batch"], a["tokens"]) for a in attention) == [
        (layer, sub_batch, tokens) for layer in range(NUM_LAYERS) for sub_batch, tokens in ((0, 1), (1, 2))
    ]
