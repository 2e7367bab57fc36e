"""A program that fails, hangs or is closed in the middle ends in words, without a thread left."""

import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from executors import HookedLanes, thread_executor
from mixed_plan import (
    LANES,
    NUM_BLOCKS,
    make_executor,
    mixed,
    prompts,
    run_and_check,
)
from pipeline_case import (
    make_storage,
    tiny_model,
)

from neo_desktop.engine.batch import (
    DeviceMemoryError,
)
from neo_desktop.engine.cuda.errors import StageStalledError
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.watchdog import Timeout
from neo_desktop.models.decoder import Decoder

CPU = torch.device("cpu")


TIMEOUT_S = 60.0  # for prompt events; only a defect waits this long


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


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
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("error_type", [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_whatever_fails_the_error_arrives_and_the_next_iteration_works(
    model: Decoder, error_type: type[BaseException], part: int
) -> None:
    """A sixth of the stages of all lanes, layers and sub-batches fails; no work is in flight afterwards."""
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
    for lane, stage in stages[part::6]:
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
    assert threading.active_count() <= before
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
