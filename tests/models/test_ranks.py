"""Tensor-parallel models: the ranks, each with its part, compute the whole model's results."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from dense_model import logits_of_all
from gguf_files import write_gguf
from thread_ranks import on_ranks
from traced_models import FAMILIES, save

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelError
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.ops import Reduce
from neo_desktop.models.rank import Rank
from neo_desktop.models.ranks import config_of_rank, form_of_rank, weights_of_rank
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.shapes import shape
from neo_desktop.models.stored_form import stored_form

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 320, (24,), generator=torch.Generator().manual_seed(1))
DIVISIBLE = {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 16}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 250},  # parts of different sizes
    "llama3-tied": {},
    "mistral-window": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"intermediate_size": 256},
    "qwen3-moe": {"moe_intermediate_size": 256, "intermediate_size": 256},
    "gpt-oss": {"intermediate_size": 320},  # one part is larger
}


def logits(path: Path, rank: Rank, reduce: Reduce | None, *, keep: bool = False) -> torch.Tensor:
    """Return logits of a rank's part of a checkpoint; only rank 0's are meaningful."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    form: WeightFormat = DENSE
    if keep:
        part = weights_of_rank(check_model(checkpoint, config), config, rank)
        form = stored_form(part, config_of_rank(config, rank))
    model = load_model(checkpoint, config, dtype=torch.float32, device=CPU, form=form, rank=rank)
    return logits_of_all(model, TOKENS, reduce)


def check_ranks(path: Path, count: int, *, keep: bool = False, tolerance: float = 1e-5) -> None:
    with torch.inference_mode():
        whole = logits(path, Rank(), None, keep=keep)
    first, *_ = on_ranks(count, lambda rank, reduce: logits(path, rank, reduce, keep=keep))
    assert (first - whole).abs().max() <= tolerance * whole.abs().max()


@pytest.mark.sample(8)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", SIZES)
def test_ranks_compute_what_the_whole_model_does(family: str, count: int, tmp_path: Path) -> None:
    """Biases, sinks, tied heads and experts are neither added twice nor left out."""
    path = save_checkpoint(tmp_path, family, **DIVISIBLE | SIZES[family])
    check_ranks(path, count)


def test_models_by_the_code_of_transformers_are_refused(tmp_path: Path) -> None:
    config = open_checkpoint(save(tmp_path, *FAMILIES["phi3"])).config()
    with pytest.raises(ModelError, match="leave --tensor-parallel out"):
        config_of_rank(config, Rank(0, 2))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_ranks_may_have_the_same_key_value_heads(kv_heads: int, tmp_path: Path) -> None:
    """The model has fewer KV heads than ranks."""
    path = save_checkpoint(tmp_path, "qwen3", **DIVISIBLE | {"num_key_value_heads": kv_heads})
    config = open_checkpoint(path).config()
    assert {config_of_rank(config, Rank(number, 4)).num_kv_heads for number in range(4)} == {1}
    check_ranks(path, 4)


@pytest.mark.parametrize("type_name", ["F16", "Q4_0", "Q8_0"])
def test_files_of_llama_cpp_are_divided_by_blocks(
    type_name: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 320}
    _, model = make_checkpoint(**sizes)
    path = write_gguf(tmp_path / "model.gguf", model, type_name=type_name)
    checkpoint = open_checkpoint(path)
    config, weights = checkpoint.config(), check_model(checkpoint, checkpoint.config())
    for rank in (Rank(0, 2), Rank(1, 2)):
        part = config_of_rank(config, rank)
        of_part = stored_form(weights_of_rank(weights, config, rank), part)
        reckoned = form_of_rank(stored_form(weights, config), config, rank)  # without reading tensors
        assert part.weight_bytes(torch.float32, reckoned) == part.weight_bytes(torch.float32, of_part)
    # 8-bit matmuls round inputs by blocks of 32, equally in a part and in the whole.
    check_ranks(path, 2, keep=True, tolerance=1e-5 if type_name == "F16" else 1e-2)


def test_each_rank_holds_its_part_alone(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, "llama", **DIVISIBLE)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    parts = [config_of_rank(config, Rank(number, 4)) for number in range(4)]
    for number, part in enumerate(parts):
        rank = Rank(number, 4)
        model = load_model(checkpoint, config, dtype=torch.float32, device=CPU, rank=rank)
        assert model.nbytes == part.weight_bytes(torch.float32)
        assert part.weight_bytes(torch.float32, form_of_rank(DENSE, config, rank)) == model.nbytes
        assert part.kv_bytes_per_token(torch.float32) * 4 == config.kv_bytes_per_token(torch.float32)
    embedding = config.vocab_size * config.hidden_size
    matrices = sum(m.num_weights for _, m in config.each_matrix()) - embedding  # all but the head
    of_parts = [sum(m.num_weights for _, m in part.each_matrix()) for part in parts]
    assert of_parts == [embedding + matrices // 4] + [matrices // 4] * 3


@pytest.mark.parametrize(
    ("name", "count", "parts"),
    [
        ("llama-3.1-8b", 2, [7168, 7168]),
        ("llama-2-7b", 2, [5376, 5632]),  # 43 blocks of 256
        ("llama-2-13b", 4, [3456] * 4),
        ("gpt-oss-20b", 2, [1408, 1472]),  # per expert, in tiles of 64
        ("qwen3-235b-a22b", 4, [384] * 4),
    ],
)
def test_inner_numbers_are_divided_in_whole_blocks(name: str, count: int, parts: list[int]) -> None:
    configs = [config_of_rank(shape(name), Rank(number, count)) for number in range(count)]
    found = [
        config.intermediate_size if config.experts is None else config.experts.intermediate_size
        for config in configs
    ]
    assert found == parts


def test_models_that_cannot_be_divided_are_refused_by_name(make_checkpoint: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="9 heads cannot be divided among 2 processes"):
        config_of_rank(shape("smollm2-135m"), Rank(0, 2))
    with pytest.raises(ModelError, match="8 key-value heads cannot be divided among 5"):
        config_of_rank(replace(shape("llama-3.1-8b"), num_heads=40), Rank(0, 5))
    _, model = make_checkpoint(hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=320)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", model, type_name="Q8_0"))
    config = checkpoint.config()
    with pytest.raises(ModelError, match=r"blocks of 32 numbers .* from 48 to 96, would cut"):
        weights_of_rank(check_model(checkpoint, config), config, Rank(1, 2))
