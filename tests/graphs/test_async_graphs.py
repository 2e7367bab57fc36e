"""Async decodes on streams of any order, in graphs, and after failures."""

from collections.abc import Sequence

import pytest
import torch
from async_case import AsyncIterations, Conveyor
from fallback_levels import Levels
from graph_case import BLOCK_SIZE, GREEDY, NUM_BLOCKS, make_executor, prompts
from imitated_streams import ImitatedBackend, Operation, StallingBackend
from pipeline_case import check_random_plans, check_result, make_storage, tiny_model
from seeds import seeds

from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute import model_runner
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.lane import Lane, Step
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.watchdog import Timeout
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A model of three layers, one with a sliding window."""
    return tiny_model((None, 5, None), form=Dense(uses_tiles=False))


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_random_paces_on_streams_of_any_order(model: Decoder, seed: int) -> None:
    backend = ImitatedBackend(seed, num_queues=(None, 1, 2, 3)[seed % 4])
    executor, _ = make_executor(model, backend=backend)
    iterations = AsyncIterations(seed, NUM_BLOCKS, BLOCK_SIZE, model.config.num_layers)
    check_random_plans(executor.execute, model, iterations, 16, after=backend.check_flags)
    assert iterations.num_ended > 0
    executor.close()


@pytest.mark.sample(4)
@pytest.mark.parametrize("beside", [("ab",), ("",), ("ab", "g"), ("a", "b")])
@pytest.mark.parametrize("num_queues", [None, 1, 2, 8])
def test_turns_are_graphs(model: Decoder, num_queues: int | None, beside: tuple[str, ...]) -> None:
    """Each of the two alternating async steps is a graph, beside decodes of both tiers in any sub-batches."""
    backend = ImitatedBackend(num_queues or 0, num_queues=num_queues)
    executor, _ = make_executor(model, backend=backend)
    executor.execute(prompts("abcdeg"))
    for turn, (plan, context) in enumerate(Conveyor(model.config.num_layers, beside=beside).turns(12)):
        result = executor.execute(plan)
        check_result(model, plan, context, result)
        assert backend.num_graphs_launched == (turn > 1)
        backend.check_flags()
    assert backend.num_programs == 2
    executor.close()


def test_greedy_tokens_come_without_reading_logits(model: Decoder) -> None:
    executor, backend = make_executor(model)
    executor.execute(prompts("abcdeg"))
    for plan, context in Conveyor(model.config.num_layers, "cd", ("ab", "g"), GREEDY).turns(9):
        check_result(model, plan, context, executor.execute(plan))
    assert backend.was_graph
    executor.close()


def test_turns_that_are_too_large_take_memory_of_their_own(model: Decoder) -> None:
    """The state kept between async steps stays where it is."""
    capacities = Capacity(tokens=4, decodes=2, blocks=1), Capacity(tokens=256, decodes=1, blocks=64)
    for capacity in capacities:
        executor, backend = make_executor(model, capacity=capacity)
        executor.execute(prompts("abcdef"))
        for plan, context in Conveyor(model.config.num_layers, beside=("abf",)).turns(6):
            check_result(model, plan, context, executor.execute(plan))
        assert not backend.was_graph
        executor.close()


def test_no_memory_for_a_turns_graph_loses_nothing(model: Decoder) -> None:
    class Short(ImitatedBackend):
        num_captured = 0

        def _capture(self, steps: Sequence[Step]) -> list[Operation]:
            self.num_captured += 1
            if self.num_captured == 2:
                raise torch.OutOfMemoryError("no room")
            return super()._capture(steps)

    backend = Short()
    executor, _ = make_executor(model, backend=backend)
    executor.execute(prompts("abcde"))
    for plan, context in Conveyor(model.config.num_layers).turns(10):
        check_result(model, plan, context, executor.execute(plan))
    assert backend.num_captured == 2
    assert not backend.was_graph
    executor.close()


def failing_once(executor: ModelRunner, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    """Let this async step fail after its work is done."""
    wait, turns = executor._backend.wait, iter(range(100))

    def stalled() -> None:
        wait()
        if next(turns) == turn:
            raise model_runner.OffloadStalledError("the GPU was slow")

    monkeypatch.setattr(executor._backend, "wait", stalled)


@pytest.mark.parametrize("failing", range(3, 9))
def test_a_turn_that_is_done_again_finds_what_the_last_one_left(
    model: Decoder, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, _ = make_executor(model, failing)
    executor.execute(prompts("abcde"))
    failing_once(executor, monkeypatch, failing)
    for turn, (plan, context) in enumerate(Conveyor(model.config.num_layers).turns(12)):
        check_result(model, plan, context, executor.execute(plan))
        assert (executor._relays is None) == (turn >= failing)  # from then on, threads do the CPU's part
    executor.close()


def test_a_cohort_that_is_never_handed_over_is_told_and_done_again(
    model: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    backend = StallingBackend()
    executor, _ = make_executor(model, backend=backend, timeout=Timeout(1.0, 0.0))
    executor.execute(prompts("abcde"))
    for turn, (plan, context) in enumerate(Conveyor(model.config.num_layers).turns(10)):
        backend.is_stalling = turn == 5
        check_result(model, plan, context, executor.execute(plan))
    assert "the GPU did not hand over q, k and v for layer 1 of async decodes" in caplog.text
    executor.close()


@pytest.mark.parametrize("lane", [Lane.DEVICE, Lane.TO_HOST, Lane.TO_DEVICE])
def test_a_turn_that_fails_can_be_tried_again(model: Decoder, lane: Lane) -> None:
    """The scheduler may repeat the async step, provided that the KV is intact."""
    is_failing = False

    def hook(at: Lane, stage: Stage) -> None:
        if is_failing and at == lane and stage.layer == 2:
            raise ValueError("broken")

    executor, _ = make_executor(model, hook=hook)
    executor.execute(prompts("abcde"))
    for turn, (plan, context) in enumerate(Conveyor(model.config.num_layers).turns(9)):
        is_failing = turn in (4, 6)
        if is_failing:
            with pytest.raises(ValueError, match="broken"):
                executor.execute(plan)
        is_failing = False
        check_result(model, plan, context, executor.execute(plan))
    executor.close()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@pytest.mark.usefixtures("any_queues")
@needs_gpu
@pytest.mark.parametrize("beside", [("",), ("ac", "bg")])
def test_on_a_gpu_turns_give_the_tokens_of_a_plain_computation(beside: tuple[str, ...]) -> None:
    model = tiny_model((None, 5), device="cuda")
    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS), BLOCK_SIZE)
    executor = build_executor(model, storage, 256, 8, None, Streams(model.device))
    executor.execute(prompts("abcdeg"))
    for plan, context in Conveyor(2, "de", beside).turns(6):  # eager, captured, and replayed
        check_result(model, plan, context, executor.execute(plan), tolerance=2e-3)
    executor.close()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("level", ["host-flags", "device-only", "eager"])
def test_on_a_gpu_random_paces_give_the_tokens_of_a_plain_computation(
    levels: Levels, seed: int, level: str
) -> None:
    levels(graphs=level)
    model = tiny_model(device="cuda")
    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS), BLOCK_SIZE)
    executor = build_executor(model, storage, 256, 8, None, Streams(model.device))
    iterations = AsyncIterations(seed, NUM_BLOCKS, BLOCK_SIZE)
    check_random_plans(executor.execute, model, iterations, 12, tolerance=2e-3)
    executor.close()
