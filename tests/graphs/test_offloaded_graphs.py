"""Offloaded matmuls on streams of any order, in graphs, and after failures."""

from collections.abc import Sequence

import pytest
from async_case import AsyncIterations, Conveyor
from expert_models import expert_model
from fallback_levels import Levels
from graph_case import BLOCK_SIZE, GREEDY, contexts, decodes, make_executor, prompts
from imitated_streams import ImitatedBackend, Operation
from pipeline_case import RandomIterations, check_random_plans, check_result, tiny_model
from seeds import seeds
from split_models import host_model, split_model

from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.watchdog import Timeout
from neo_desktop.models import expert_pieces
from neo_desktop.models.decoder import Decoder

pytestmark = pytest.mark.usefixtures("kernels")

WINDOWS = (None, 5, None)


@pytest.fixture(scope="module")
def whole() -> Decoder:
    """The reference model, without offloaded weights."""
    return tiny_model(WINDOWS)


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_random_plans_on_streams_of_any_order(whole: Decoder, seed: int) -> None:
    backend = ImitatedBackend(seed, num_queues=(None, 1, 2, 3)[seed % 4])
    executor, _ = make_executor(split_model(seed, WINDOWS), backend=backend)
    iterations = RandomIterations(seed, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, whole, iterations, 8, after=backend.check_flags)
    executor.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_queues", [None, 1, 2, 8])
def test_decodes_are_one_graph(whole: Decoder, num_queues: int | None, share: float) -> None:
    """The graph includes the CPU's matmuls and attention, and the weight pieces that stream meanwhile."""
    backend = ImitatedBackend(num_queues or 0, num_queues=num_queues)
    executor, _ = make_executor(host_model(share, WINDOWS), backend=backend)
    executor.execute(prompts("abcdef"))
    for step in range(3):
        plan = decodes("abcd", "fe", step=step)
        result = executor.execute(plan)
        check_result(whole, plan, contexts(plan), result)
        assert backend.num_graphs_launched == (step > 0)
        assert result.timing is not None
        assert result.timing.is_first == (step < 2)
        # Flags per layer: the attention of both sub-batches, and four matmuls per sub-batch.
        num_layers = len(WINDOWS)
        assert backend.check_flags() == (2 if share == 1.0 else 10) * num_layers
    executor.close()


def test_greedy_tokens_come_without_reading_logits(whole: Decoder) -> None:
    executor, backend = make_executor(split_model(5, WINDOWS))
    executor.execute(prompts("abcdef"))
    for step in range(3):
        plan = decodes("abc", "fe", step=step, sampling=GREEDY)
        check_result(whole, plan, contexts(plan), executor.execute(plan))
    assert backend.was_graph
    executor.close()


@pytest.mark.parametrize("tiers", [(KVTier.DEVICE,), (KVTier.HOST,)])
def test_with_kv_in_one_place(whole: Decoder, tiers: tuple[KVTier, ...]) -> None:
    """`gpu-only` has a relay for matmuls alone."""
    names = "abf" if tiers == (KVTier.DEVICE,) else "cdeg"
    executor, backend = make_executor(split_model(3, WINDOWS), tiers=tiers)
    executor.execute(prompts(names))
    for step in range(3):
        plan = decodes(names, step=step)
        check_result(whole, plan, contexts(plan), executor.execute(plan))
    assert backend.was_graph
    executor.close()


def test_iterations_that_are_too_large_take_memory_of_their_own(whole: Decoder) -> None:
    executor, backend = make_executor(
        split_model(2, WINDOWS), capacity=Capacity(tokens=16, decodes=1, blocks=1)
    )
    executor.execute(prompts("abcdef"))
    for step in range(3):
        plan = decodes("abfcde", step=step)
        check_result(whole, plan, contexts(plan), executor.execute(plan))
    assert not backend.was_graph
    executor.close()


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_beside_decodes_at_their_own_pace(whole: Decoder, seed: int) -> None:
    backend = ImitatedBackend(seed, num_queues=(None, 1, 2, 3)[seed])
    executor, _ = make_executor(split_model(seed, WINDOWS), backend=backend)
    iterations = AsyncIterations(seed, block_size=BLOCK_SIZE, num_layers=len(WINDOWS))
    check_random_plans(executor.execute, whole, iterations, 12, after=backend.check_flags)
    executor.close()


def test_turns_of_decodes_at_their_own_pace_are_graphs(whole: Decoder) -> None:
    executor, backend = make_executor(split_model(7, WINDOWS))
    executor.execute(prompts("abcdeg"))
    for plan, context in Conveyor(len(WINDOWS), beside=("ab", "g")).turns(8):
        check_result(whole, plan, context, executor.execute(plan))
    assert backend.was_graph
    executor.close()


@pytest.mark.parametrize("lane", [Lane.WEIGHTS, Lane.DEVICE, Lane.TO_HOST, Lane.TO_DEVICE])
def test_an_iteration_that_fails_can_be_done_again(whole: Decoder, lane: Lane) -> None:
    fails = False

    def hook(where: Lane, stage: Stage) -> None:
        if fails and where is lane and stage.layer == 2:
            raise OSError("no more")

    executor, _ = make_executor(host_model(0.5, WINDOWS), hook=hook)
    executor.execute(prompts("abcdef"))
    for step in range(3):
        plan = decodes("abcd", "fe", step=step)
        fails = True
        with pytest.raises(OSError, match="no more"):
            executor.execute(plan)
        fails = False
        check_result(whole, plan, contexts(plan), executor.execute(plan))
    executor.close()


def test_a_gpu_that_does_not_hand_over_is_not_waited_for(
    whole: Decoder, levels: Levels, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay gives up, and the iteration runs again with threads for the CPU's part."""
    levels()

    class Stalling(ImitatedBackend):
        is_stalling = False

        def enqueue(self, operations: Sequence[Operation]) -> None:
            raised = [o for o in operations if o.flag is not None and not o.is_wait]
            for lost in raised[5:6] if self.is_stalling else ():
                lost.work = lambda: None
            super().enqueue(operations)

    backend = Stalling()
    executor, _ = make_executor(host_model(0.0, WINDOWS), backend=backend, timeout=Timeout(1.0, 0.0))
    executor.execute(prompts("abcdef"))
    for step in range(3):
        backend.is_stalling = step == 1
        plan = decodes("ab", step=step)
        check_result(whole, plan, contexts(plan), executor.execute(plan))
    assert "the GPU did not hand over the inputs of output of layer 1" in caplog.text
    assert not backend.was_graph
    executor.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", seeds(2, 4))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, None])
def test_experts_in_host_memory(seed: int, share: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relays compute them, on streams of any order; the decode graph streams other experts meanwhile."""
    monkeypatch.setattr(expert_pieces, "PIECE_BYTES", (1, 2**17)[seed % 2])
    backend = ImitatedBackend(seed, num_queues=(None, 1, 2, 8)[seed])
    reference = expert_model(windows=WINDOWS)
    executor, _ = make_executor(expert_model(seed, WINDOWS, share=share), backend=backend)
    executor.execute(prompts("abcdef"))
    for step in range(3):
        plan = decodes("abcd", "fe", step=step)
        check_result(reference, plan, contexts(plan), executor.execute(plan))
        assert backend.num_graphs_launched == (step > 0)
        backend.check_flags()
    iterations = RandomIterations(seed, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, reference, iterations, 5)
    executor.close()
