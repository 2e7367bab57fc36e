"""Traced models with weights and experts in host memory, in graphs on streams; experts may move."""

import random
from pathlib import Path

import pytest
import torch
from expert_churn import NO_LIMIT, churning
from graph_case import BLOCK_SIZE, make_executor
from imitated_streams import ImitatedBackend
from offloaded_case import random_split
from pipeline_case import FewPrompts, check_result
from recurrent_models import RECURRENT
from split_models import divided
from traced_models import FAMILIES, save

from neo_desktop.engine.execute import expert_moves
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import MoveBudget, OffloadedFormat
from neo_desktop.models.linear.shares import StreamedShares
from neo_desktop.models.registry import load_model, stages_of
from neo_desktop.models.traced.config import read_traced

pytestmark = pytest.mark.usefixtures("kernels")

KNOWN = FAMILIES | RECURRENT
PLAIN = Dense(uses_tiles=False)


def loaded(folder: Path, form: OffloadedFormat | Dense) -> Decoder:
    of = {"dtype": torch.float32, "device": torch.device("cpu"), "form": form}
    return load_model(open_checkpoint(folder), read_traced(folder), **of)


def with_experts_apart(folder: Path, seed: int, share: float, moves: MoveBudget | None) -> Decoder:
    """Return a model with any number of experts per layer and any other rows on the device."""
    config, rng = read_traced(folder), random.Random(seed)
    assert config.experts is not None
    counts = {str(layer): rng.choice((1, 4) if moves else (0, 1, 4)) for layer in config.experts.layers}
    resident = dict(random_split(config, seed, device_form=PLAIN, host_form=DENSE).resident_rows)
    resident |= {
        name: counts[name.partition(".")[0]] * matrix.rows // matrix.experts
        for name, matrix in config.each_matrix()
        if matrix.experts
    }
    model = divided(loaded(folder, OffloadedFormat(PLAIN, DENSE, resident, moves=moves)), seed, None)
    model.streamed_experts = StreamedShares((1,), (share,))
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("family", ["qwen3.5-moe", "gemma4-moe"])
def test_graphs_give_the_tokens_of_the_whole_model(
    family: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts move where none are streamed."""
    places, moved = churning(1)
    monkeypatch.setattr(expert_moves, "ExpertPlaces", places)
    folder, moves = save(tmp_path, *KNOWN[family]), None if share else NO_LIMIT
    whole = loaded(folder, PLAIN)
    stages_of(whole, None)  # uses torch's operators
    backend = ImitatedBackend(1, num_queues=2)
    model = with_experts_apart(folder, 1, share, moves)
    executor, _ = make_executor(model, backend=backend, moves_experts=moves is not None)
    iterations, graphs = FewPrompts(1, block_size=BLOCK_SIZE), 0
    for plan, context in iterations.plans(14):
        result = executor.execute(plan)
        check_result(whole, plan, context, result)
        backend.check_flags()
        graphs += backend.was_graph
        iterations.take_in(result)
    assert graphs
    assert bool(moved) == (moves is not None)
    executor.close()
