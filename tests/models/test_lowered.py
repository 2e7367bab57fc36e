"""Traced stages as row programs: the families that have them, and agreement with the code's results."""

from pathlib import Path

import pytest
import torch
from recurrent_models import RECURRENT
from torch import Tensor
from traced_models import FAMILIES, save

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.recurrent import RecurrentBatch
from neo_desktop.models.registry import load_model
from neo_desktop.models.state import Scratch, State
from neo_desktop.models.traced import routing
from neo_desktop.models.traced import stages as traced_stages
from neo_desktop.models.traced.config import read_traced
from neo_desktop.models.traced.places import NotRowsError, Value, grouped, moves_of, of_row, row_dim
from neo_desktop.models.traced.stages import TracedStages
from neo_desktop.native import Columns

CPU = torch.device("cpu")
WHOLLY = (
    "opt", "gemma2", "gemma3", "gemma4", "phi3", "olmo2", "granite", "stablelm", "stablelm-parallel",
    "gpt-neox", "starcoder2", "falcon", "falcon-grouped",
    "qwen3.5", "olmo-hybrid", "lfm2", "nemotron-h", "granite-4-h", "falcon-h1",
    "qwen3.5-moe", "lfm2-moe", "nemotron-h-moe", "gemma4-moe", "granite-moe", "qwen2-moe", "olmoe",
    "glm4", "glm4-moe", "glm4-moe-lite", "deepseek-v2", "deepseek-v3",
)  # fmt: skip
CHOSEN_BY_TORCH = ("deepseek-v2", "deepseek-v3", "glm4-moe")  # within groups of experts
OF_CODE = "apertus", "cohere2", "latent experts"  # their layers have operations without a step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lowered")


LATENT = RECURRENT["nemotron-h-moe"][0], RECURRENT["nemotron-h-moe"][1] | {"moe_latent_size": 128}


def stages_of(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> TracedStages:
    path = folder / family
    if not path.exists():
        save(path, *(FAMILIES | RECURRENT | {"latent experts": LATENT}).get(family, (family, {})))
    return TracedStages(load_model(open_checkpoint(path), read_traced(path), dtype=dtype, device=CPU))


def results(stages: TracedStages, rows: int) -> list[Tensor]:
    """Return the results of an iteration's stages; the attention output is random."""
    config, dtype = stages.config, stages.decoder.dtype
    state = State.empty(config, rows, dtype, CPU, Scratch.empty(config, rows, dtype, CPU))
    ids = torch.arange(rows) % config.vocab_size
    found = []
    state.residual.zero_()  # parts may stay unused
    stages.embed(ids, ids % 200, state)
    generator = torch.Generator().manual_seed(0)
    for layer in range(config.num_layers + 1):
        state.attention.copy_(torch.randn(state.attention.shape, generator=generator))
        is_last = layer == config.num_layers
        stages.advance(layer, state)
        found += [state.x.clone()] if is_last else [state.residual.clone(), state.qkv.clone()]
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("family", [*WHOLLY, "llama", "qwen3"])
def test_programs_compute_what_the_code_does(
    folder: Path, family: str, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test one row, several chunks of a matmul, and more rows than one pass computes.

    Experts are chosen natively, so stages fail that use torch.
    """
    if dtype is torch.float32 and family not in CHOSEN_BY_TORCH:
        monkeypatch.delattr(routing, "_computed")
    stages = stages_of(folder, family, dtype)
    assert sorted(stages._rows) == list(range(len(stages._pieces)))
    by_program = {rows: results(stages, rows) for rows in (1, 33, 1100)}
    stages._rows.clear()
    for rows, found in by_program.items():
        for ours, theirs in zip(found, results(stages, rows), strict=True):
            off = torch.linalg.vector_norm(ours.double() - theirs.double())
            assert off <= bound * torch.linalg.vector_norm(theirs.double())


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", OF_CODE)
def test_what_is_no_step_is_computed_by_the_code(
    folder: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    stages = stages_of(folder, family)
    assert len(stages._rows) < len(stages._pieces)
    assert "slower" not in caplog.text  # fused operators stay
    assert all(each.isfinite().all() for each in results(stages, 3))


@pytest.mark.sample(0)
def test_a_program_that_computes_something_else_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = results(stages_of(folder, "llama"), 4)
    right = traced_stages.lowered

    class Wrong:
        def __init__(self, *given: object) -> None:
            self._program = right(*given)

        def run(self, state: State, batch: RecurrentBatch | None) -> None:
            self._program.run(state, batch)
            state.qkv.zero_()

    monkeypatch.setattr(traced_stages, "lowered", Wrong)
    found = results(stages_of(folder, "llama"), 4)
    assert "slower" in caplog.text
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_addresses_follow_views_and_slices() -> None:
    """Parts of a matmul's heads are concatenated in reverse order."""
    qkv = Value.new(3, (1, 48), 1, torch.float32)
    heads = qkv.at.narrow(-1, 0, 32).reshape(1, 5, 2, 16).transpose(1, 2)
    assert row_dim(heads) == 2
    columns = grouped(of_row(heads[..., 4:12]), 8)
    assert columns == (3, 4, 16)
    turned = torch.cat((heads[..., 8:], heads[..., :8]), dim=-1)
    buffer = torch.arange(32)
    moved = torch.full((32,), -1)
    for move in moves_of(of_row(turned), Columns(5)):
        (source,), into = move.sources, move.into
        assert (source.buffer, into.buffer) == (3, 5)
        for group in range(move.groups):
            at = source.first + group * source.stride
            moved[into.first + group * into.stride :][: move.length] = buffer[at : at + move.length]
    expected = buffer.view(2, 16)
    assert moved.tolist() == torch.cat((expected[:, 8:], expected[:, :8]), 1).flatten().tolist()


def test_rows_that_meet_are_refused() -> None:
    x = Value.new(0, (4,), 0, torch.float32)
    with pytest.raises(NotRowsError):
        of_row(x.at.flip(0))
    with pytest.raises(NotRowsError):
        row_dim(x.at.reshape(-1))
