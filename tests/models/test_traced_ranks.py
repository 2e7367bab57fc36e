"""Models by the code of transformers, divided among ranks: together they compute what the whole one does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_traced import write_traced
from traced_models import FAMILIES, save
from traced_ranks import check_ranks, part_of

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.rank import Rank
from neo_desktop.models.ranks import config_of_rank, form_of_rank, weights_of_rank
from neo_desktop.models.registry import check_model
from neo_desktop.models.stored_form import stored_form
from neo_desktop.models.traced import patterns

# So that experts can be divided.
BIGGER = {"moe_intermediate_size": 128, "intermediate_size": 256, "shared_expert_intermediate_size": 128}
# Each is divided otherwise than those before it.
DIVIDED = (
    "gemma2", "phi3", "olmo2", "stablelm-parallel", "gpt-neox", "falcon", "falcon-grouped", "cohere2",
    "apertus", "olmoe", "qwen2-moe", "deepseek-v3", "granite-swa", "flint",
)  # fmt: skip
FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}


@pytest.mark.parametrize("family", DIVIDED)
def test_ranks_compute_what_the_whole_model_does(family: str, tmp_path: Path) -> None:
    """Of fused matrices, biases, norms of heads, experts and values narrower than keys, too.

    Falcon has one key-value head.
    """
    model_type, changes = FAMILIES[family]
    larger = {name: size for name, size in BIGGER.items() if name in changes}
    check_ranks(save(tmp_path, model_type, changes | larger), 2)


@pytest.mark.parametrize("family", ["gemma3", "phi3", "stablelm-parallel"])
def test_four_ranks_have_parts_of_another_size_each(family: str, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[family]
    parts = check_ranks(save(tmp_path, model_type, changes | FOUR | {"intermediate_size": 90}), 4)
    assert len({part.nbytes for part in parts[1:]}) > 1
    assert {part.config.num_kv_heads for part in parts} == {1}


@pytest.mark.parametrize("family", ["gemma2", "granite", "phi3"])
def test_quantised_files_are_divided_by_blocks(family: str, tmp_path: Path) -> None:
    """Inputs are rounded to 8 bits, as they are in the whole model: another sum may be rounded otherwise."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    path, _ = write_traced(tmp_path, family, "Q8_0", sizes=sizes)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    weights = check_model(checkpoint, config)
    form = stored_form(weights, config)
    for rank in (Rank(0, 2), Rank(1, 2)):
        part = config_of_rank(config, rank)
        of_part = stored_form(weights_of_rank(check_model(checkpoint, config), config, rank), part)
        reckoned = form_of_rank(form, config, rank)  # without looking at tensors
        assert part.weight_bytes(torch.float32, reckoned) == part.weight_bytes(torch.float32, of_part)
    check_ranks(path, 2)
    parts = check_ranks(path, 2, form, tolerance=0.1)
    assert all(part.nbytes < config.weight_bytes(torch.float32, form) for part in parts)


def test_each_rank_holds_its_part_alone(tmp_path: Path) -> None:
    config = open_checkpoint(save(tmp_path, *FAMILIES["phi3"])).config()
    matrices = sum(matrix.weights for name, matrix in config.each_matrix() if name != "head")
    for rank in (Rank(0, 2), Rank(1, 2)):
        model, _ = part_of(tmp_path, rank)
        part = config_of_rank(config, rank)
        assert model.nbytes == part.weight_bytes(torch.float32)
        assert 2 * sum(each.weights for name, each in part.each_matrix() if name != "head") == matrices
        assert ("head" in part.matrices) == (rank.number == 0)
        assert part.kv_bytes_per_token(torch.float32) * 2 == config.kv_bytes_per_token(torch.float32)


def test_norms_gates_and_rotations_are_found_in_parts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where gates and ups are one matrix in the checkpoint, of which a rank has two pieces."""
    path = save(tmp_path, *FAMILIES["phi3"])
    found: list[list[str]] = []
    find = patterns.find_patterns

    def recorded(*given: Any) -> list[patterns.Pattern]:
        each = find(*given)
        found.append(sorted(type(pattern).__name__ for pattern in each))
        return each

    monkeypatch.setattr("neo_desktop.models.traced.builder.find_patterns", recorded)
    part_of(path, Rank())
    whole = found.copy()
    found.clear()
    part_of(path, Rank(1, 2), lambda part: part)
    assert found == whole
    assert found[2] == ["Gate", "Norm", "Norm", "Rope", "Rope"]


def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    mixture = open_checkpoint(save(tmp_path / "mixture", *FAMILIES["qwen2-moe"])).config()
    with pytest.raises(ModelError, match="cannot be divided among 2 processes: its experts are too small"):
        config_of_rank(mixture, Rank(0, 2))
