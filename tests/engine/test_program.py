"""A program on threads gives the tokens of a plain computation, overlaps, and ends cleanly after failures."""

import gc
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from executors import Hook, HookedLanes, thread_executor
from pipeline_case import (
    BLOCK_SIZE,
    NUM_LAYERS,
    RandomIterations,
    check_result,
    make_storage,
    sampling_input,
    tiny_model,
)
from torch_layer import TorchLayer

from neo_desktop.engine.batch import (
    BlockCopy,
    DeviceMemoryError,
    IterationPlan,
    ScheduledSequence,
    SubBatch,
)
from neo_desktop.engine.cuda.errors import StageStalledError
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.timeline import Stage, Timeline, overlap_ns
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.watchdog import Timeout
from neo_desktop.models.decoder import Decoder

CPU = torch.device("cpu")
TIMEOUT_S = 20.0  # for prompt events; only a defect waits this long
NUM_BLOCKS = 24
# All lanes except the ones for weights in host memory and streamed KV.
_OTHERS = (Lane.WEIGHTS, Lane.HOST_WEIGHTS, Lane.SWAP_IN, Lane.SWAP_OUT)
LANES = tuple(lane for lane in Lane if lane not in _OTHERS)


def make_executor(
    model: Decoder,
    hook: Hook | None = None,
    timeline: Timeline | None = None,
    block_size: int = BLOCK_SIZE,
    device_kind: type[KVLayer] | None = TorchLayer,
) -> ModelRunner:
    num_blocks = dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS)
    storage = make_storage(model, num_blocks, block_size, device_kind=device_kind)
    lanes = None if hook is None else HookedLanes(hook, timeline)
    return thread_executor(model, storage, lanes=lanes, timeline=timeline)


def sequence(
    name: str, tokens: Sequence[int], start: int, tier: KVTier, first_block: int
) -> ScheduledSequence:
    num_blocks = -(-(start + len(tokens)) // BLOCK_SIZE)
    blocks = IntArray(range(first_block, first_block + num_blocks)).view()
    return ScheduledSequence(name, tuple(tokens), start, tier, blocks, sampling_input(start + len(tokens)))


# Two iterations: the second uses every lane in every layer, for both sub-batches.
TOKENS = {name: [(7 * ord(name) + 3 * i) % 257 for i in range(30)] for name in "abcdef"}
HOMES = {
    "a": (KVTier.DEVICE, 0),
    "b": (KVTier.HOST, 0),
    "c": (KVTier.HOST, 4),
    "d": (KVTier.HOST, 8),
    "e": (KVTier.HOST, 12),
}


def prompts() -> IterationPlan:
    """Compute the first tokens of the named requests in their tiers."""
    return IterationPlan(
        (SubBatch(tuple(sequence(name, TOKENS[name][:20], 0, *home) for name, home in HOMES.items())),)
    )


def mixed() -> IterationPlan:
    """Decode some, prefill others further, move `a` to the host, give its blocks to a new prompt."""
    parts = (
        (
            sequence("f", TOKENS["f"][:9], 0, KVTier.DEVICE, 0),
            sequence("b", TOKENS["b"][20:30], 20, *HOMES["b"]),
            sequence("c", TOKENS["c"][20:21], 20, *HOMES["c"]),
        ),
        (
            sequence("d", TOKENS["d"][20:25], 20, *HOMES["d"]),
            sequence("e", TOKENS["e"][20:21], 20, *HOMES["e"]),
            sequence("a", TOKENS["a"][20:21], 20, KVTier.HOST, 20),
        ),
    )
    copies = tuple(BlockCopy(KVTier.DEVICE, block, KVTier.HOST, 20 + block) for block in range(3))
    return IterationPlan(tuple(SubBatch(part) for part in parts), copies)


def run_and_check(model: Decoder, executor: ModelRunner, plan: IterationPlan) -> None:
    contexts = {s.request_id: TOKENS[s.request_id][: s.context_len] for s in plan.sequences}
    check_result(model, plan, contexts, executor.execute(plan))


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


@pytest.fixture(scope="module")
def model_with_sinks() -> Decoder:
    """Return a model with attention sinks and a softcap on scores."""
    return tiny_model(attention_sinks=True, softcap=0.5)


@pytest.mark.sample(16)
@pytest.mark.parametrize("device_kind", [TorchLayer, None])  # a GPU's KV layout, and a CPU's
@pytest.mark.parametrize("block_size", [8, 16])  # K of host memory in rows, and in pairs
@pytest.mark.parametrize("seed", range(12))
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


@pytest.mark.parametrize("seed", range(10))
def test_lanes_of_any_speed_change_no_token(model: Decoder, seed: int) -> None:
    rng = random.Random(seed)
    slow = rng.choice(LANES)  # one lane far behind the others, plus random pauses everywhere

    def hesitate(lane: str, stage: Stage) -> None:
        if lane == slow:
            time.sleep(0.002)
        elif rng.random() < 0.3:
            time.sleep(rng.random() * 0.002)

    iterations, executor = RandomIterations(100 + seed, NUM_BLOCKS), make_executor(model, hesitate)
    for plan, contexts in iterations.plans(6):
        result = executor.execute(plan)
        check_result(model, plan, contexts, result)
        iterations.take_in(result)
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
    assert threading.active_count() == before
    assert {span.lane for span in timeline.spans} == {"device"}
    executor.close()


def stages_of_the_mixed_iteration(model: Decoder) -> list[tuple[str, Stage]]:
    stages: list[tuple[str, Stage]] = []
    executor = make_executor(model, lambda lane, stage: stages.append((lane, stage)))
    executor.execute(prompts())
    stages.clear()
    executor.execute(mixed())
    executor.close()
    return stages


@pytest.fixture
def brief_collections() -> Iterator[None]:
    """Keep collections short: each lack of memory causes one, which would scan all imported modules."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.sample(1)
@pytest.mark.usefixtures("brief_collections")
@pytest.mark.parametrize("error_type", [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_whatever_fails_the_error_arrives_and_the_next_iteration_works(
    model: Decoder, error_type: type[BaseException]
) -> None:
    """Every stage of every lane, layer and sub-batch fails once; no work is in flight afterwards."""
    stages = stages_of_the_mixed_iteration(model)
    assert {lane for lane, _ in stages} == set(LANES)
    if error_type is KeyboardInterrupt:  # raised in the main thread only
        stages = [(lane, stage) for lane, stage in stages if lane == "device"]
    failing: list[tuple[str, Stage]] = []

    def hook(lane: str, stage: Stage) -> None:
        if failing == [(lane, stage)]:
            raise error_type(f"{stage.name} is broken")
        if failing and lane != "device":
            time.sleep(0.001)  # likely to be at work when another lane fails

    lanes = HookedLanes(hook)
    executor = thread_executor(
        model, make_storage(model, dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS)), lanes=lanes
    )
    expected = DeviceMemoryError if error_type is torch.OutOfMemoryError else error_type
    for lane, stage in stages:
        executor.execute(prompts())
        failing[:] = [(lane, stage)]
        with pytest.raises(expected, match=f"{stage.name} is broken"):
            executor.execute(mixed())
        assert lanes.num_active == 0
        failing.clear()
        run_and_check(model, executor, prompts())
        run_and_check(model, executor, mixed())
    executor.close()


@pytest.mark.parametrize("lane", LANES)
def test_closing_in_the_middle_of_an_iteration_ends_it_and_all_threads(model: Decoder, lane: str) -> None:
    before = threading.active_count()
    reached, gate = threading.Event(), threading.Event()

    def hook(at: str, stage: Stage) -> None:
        if at == lane and stage.layer == 1:
            reached.set()
            assert gate.wait(TIMEOUT_S)

    executor = make_executor(model, hook)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            executor.execute(prompts())
            executor.execute(mixed())
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert reached.wait(TIMEOUT_S)
    threading.Timer(0.05, gate.set).start()
    executor.close()
    thread.join(TIMEOUT_S)
    assert [str(error) for error in raised] == ["the executor was closed in the middle of an iteration"]
    deadline = time.monotonic() + TIMEOUT_S
    while threading.active_count() > before and time.monotonic() < deadline:  # the timer's own thread
        time.sleep(0.001)
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="is closed"):
        executor.execute(prompts())
    executor.close()  # a second close does nothing


@pytest.mark.parametrize("lane", LANES[1:])
def test_a_thread_that_hangs_ends_the_iteration_in_words_and_loses_the_executor(
    model: Decoder, lane: str
) -> None:
    gate = threading.Event()
    stuck: list[Stage] = []

    def hook(at: str, stage: Stage) -> None:
        if at == lane and stage.layer == 1 and not gate.is_set():
            stuck.append(stage)
            gate.wait()

    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS))
    timeout = Timeout(least_s=0.5, factor=0.0)
    executor = thread_executor(model, storage, lanes=HookedLanes(hook), timeout=timeout)

    def run() -> None:
        for plan in (prompts(), mixed()):
            executor.execute(plan)

    with pytest.raises(StageStalledError) as caught:
        run()
    assert f"the CPU did not end {stuck[0].words} (thread '{lane}') within 0.5 s" in str(caught.value)
    with pytest.raises(StageStalledError):  # at once, with the same error
        executor.execute(prompts())
    executor.close()
    gate.set()


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
