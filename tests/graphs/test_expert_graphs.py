"""Experts that move between host memory and the device, beside graphs and on streams of any order."""

import pytest
import torch
from expert_churn import NO_LIMIT, churning
from expert_models import expert_model
from graph_case import BLOCK_SIZE, HOMES, contexts, decodes, make_executor, prompts, sequence
from imitated_streams import ImitatedBackend
from pipeline_case import RandomIterations, check_random_plans, check_result
from seeds import seeds

from neo_desktop.engine.batch import IterationPlan, SubBatch
from neo_desktop.engine.execute import expert_moves
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.predict.expert_places import Move
from neo_desktop.models import expert_pieces
from neo_desktop.models.decoder import Decoder, Experts
from neo_desktop.models.linear.dense import Plain
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.linear.shares import StreamedShares

pytestmark = pytest.mark.usefixtures("kernels")

WINDOWS = (None, 5, None)
COUNT = 6  # experts


@pytest.fixture(scope="module")
def whole() -> Decoder:
    """The reference model, without offloading."""
    return expert_model(windows=WINDOWS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", seeds(2, 8))
def test_one_graph_finds_experts_wherever_they_are(
    whole: Decoder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies run at any time of an iteration; the graph is captured once."""
    places, moved = churning(seed)
    monkeypatch.setattr(expert_moves, "ExpertPlaces", places)
    late = Lane.EXPERTS if seed % 2 == 0 else None
    backend = ImitatedBackend(seed, num_queues=(None, 1, None, 8)[seed % 4], late=late)
    model = expert_model(seed, WINDOWS, share=0.0, moves=NO_LIMIT)
    executor, _ = make_executor(model, backend=backend, moves_experts=True)
    executor.execute(prompts("abcdef"))
    for step in range(6):
        num_moved, plan = len(moved), decodes("abcd", "fe", step=step)
        check_result(whole, plan, contexts(plan), executor.execute(plan))
        backend.check_flags()
        assert backend.num_graphs_launched == (step > 0)
        assert len(moved) > num_moved
    assert backend.num_programs == 1
    iterations = RandomIterations(seed, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, whole, iterations, 5)
    executor.close()


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_graphs_that_stream_experts_are_captured_again_after_moves(
    whole: Decoder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows let experts move; more rows stream half of the experts in host memory."""
    places, moved = churning(seed)
    monkeypatch.setattr(expert_moves, "ExpertPlaces", places)
    monkeypatch.setattr(expert_pieces, "PIECE_BYTES", (1, 2**17)[seed % 2])
    backend = ImitatedBackend(seed)
    model = expert_model(seed, WINDOWS, moves=NO_LIMIT)
    model.streamed_experts = StreamedShares((2, 3), (0.0, 0.5))
    executor, _ = make_executor(model, backend=backend, moves_experts=True)
    executor.execute(prompts("abcdef"))
    ends = {name: HOMES[name][2] for name in "abfe"}
    for names, launched in (("af", 0), ("af", 1), ("abfe", 0), ("abfe", 1), ("af", 1), ("abfe", 0)):
        num_moved = len(moved)
        plan = IterationPlan((SubBatch(tuple(sequence(each, ends[each], ends[each] + 1) for each in names)),))
        check_result(whole, plan, contexts(plan), executor.execute(plan))
        assert backend.num_graphs_launched == launched
        assert (len(moved) > num_moved) == (names == "af")
        ends |= {name: ends[name] + 1 for name in names}
    executor.close()


def test_a_failed_copy_leaves_the_slot_unused(whole: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    places, moved = churning(5)
    monkeypatch.setattr(expert_moves, "ExpertPlaces", places)
    monkeypatch.setattr(expert_moves, "REST", 0)
    fails, num_copies = False, 0

    def hook(lane: Lane, stage: Stage) -> None:
        nonlocal num_copies
        num_copies += lane is Lane.EXPERTS
        if fails and lane is Lane.EXPERTS and num_copies % 3 == 0:
            raise OSError("no more")

    model = expert_model(5, WINDOWS, share=0.0, moves=NO_LIMIT)
    executor, _ = make_executor(model, hook=hook, moves_experts=True)
    executor.execute(prompts("abcdef"))
    for step in range(5):
        plan, num_moved = decodes("abcd", "fe", step=step), len(moved)
        fails = True
        with pytest.raises(OSError, match="no more"):
            executor.execute(plan)
        _spoil(model, moved[num_moved:])
        fails = False
        check_result(whole, plan, contexts(plan), executor.execute(plan))
    executor.close()


def _spoil(model: Decoder, moves: list[Move]) -> None:
    """Fill the slots of failed moves with numbers that would show in every token."""
    assert moves
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]
    layers = [each for each in mixtures if isinstance(each.gate, OffloadedLinear)]
    for move in moves:
        for linear in (layers[move.layer].gate, layers[move.layer].up, layers[move.layer].down):
            assert isinstance(linear, OffloadedLinear)
            assert isinstance(linear.resident, Plain)
            rows = linear.rows // COUNT
            linear.resident.weight[move.slot * rows : (move.slot + 1) * rows].fill_(torch.inf)
