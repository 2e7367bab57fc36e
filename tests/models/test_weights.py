"""Loading weights: every layout of checkpoints, and clear refusals of incomplete ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelConfig, ModelError
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.registry import load_model
from neo_desktop.models.weights import named_weights

CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return load_model(
        open_checkpoint(path), ModelConfig.from_pretrained(path), dtype=dtype, device=CPU, **options
    )


def edit(path: Path, **changes: Tensor | None) -> None:
    """Replace tensors of a one-file checkpoint; None removes one. Double underscores stand for dots."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file)


def assert_same_weights(decoder: Decoder, reference: torch.nn.Module) -> None:
    expected = dict(reference.named_parameters())
    loaded = {weight.name: weight for weight in named_weights(decoder)}
    assert loaded.keys() == expected.keys()
    for name, weight in loaded.items():
        assert torch.equal(weight.dense(), expected[name]), name
        assert weight.shape == expected[name].shape


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_every_weight_arrives_at_its_place(architecture, max_shard_size, make_checkpoint):
    path, reference = make_checkpoint(architecture, max_shard_size=max_shard_size)
    assert (path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    assert_same_weights(load(path), reference)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, r"lacks the weights model\.norm\.weight"),
        ({"lm_head__weight": None}, r"lacks the weights lm_head\.weight"),
        (
            {"model__layers__9__mlp__up_proj__weight": torch.ones(2)},
            r"does not describe, model\.layers\.9\.mlp",
        ),
        ({"model__layers__0__self_attn__q_proj__bias": torch.ones(64)}, r"does not describe.*q_proj\.bias"),
        ({"model__norm__weight": torch.ones(63)}, r"model\.norm\.weight.*shape \[63\].*describes \[64\]"),
        ({"model__norm__weight": torch.ones(64, 1)}, r"shape \[64, 1\]"),
        ({"model__norm__weight": torch.ones(64, dtype=torch.int8)}, r"stored as I8.*not supported"),
        (
            {"model__norm__weight": torch.ones(64).to(torch.float8_e4m3fn)},
            r"stored as F8_E4M3.*not supported.*choose",
        ),
        ({"model__norm__weight": torch.full((64,), float("nan"))}, r"model\.norm\.weight.*not finite"),
        ({"model__norm__weight": torch.full((64,), -float("inf"))}, r"model\.norm\.weight.*not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(changes, message, make_checkpoint):
    path, _ = make_checkpoint()
    edit(path, **changes)
    with pytest.raises(ModelError, match=message):
        load(path)


def test_a_missing_layer_is_listed_in_short(make_checkpoint):
    path, _ = make_checkpoint()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(ModelError, match=r"model\.layers\.3\.input_layernorm\.weight.* and 13 more"):
        load(path)


def test_weights_too_large_for_the_chosen_type_are_refused(make_checkpoint):
    path, _ = make_checkpoint(dtype=torch.bfloat16)
    edit(path, model__norm__weight=torch.full((64,), 1e6, dtype=torch.bfloat16))
    load(path, torch.bfloat16)
    with pytest.raises(ModelError, match=r"not finite as torch\.float16 \(stored as BF16\)"):
        load(path, torch.float16)


def test_a_missing_shard_is_named(make_checkpoint):
    path, _ = make_checkpoint(max_shard_size="20KB")
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load(path)


def test_shards_without_their_index_are_refused(make_checkpoint):
    path, _ = make_checkpoint(max_shard_size="20KB")
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors\.index\.json"):
        load(path)


def test_a_weight_in_two_files_is_refused(make_checkpoint):
    path, _ = make_checkpoint(max_shard_size="20KB")
    first, second = sorted(path.glob("model-*.safetensors"))[:2]
    save_file(load_file(second) | {next(iter(load_file(first))): torch.ones(1)}, second)
    with pytest.raises(ModelError, match=rf"is in .*{first.name} and in .*{second.name}"):
        load(path)


def test_pickled_weights_are_refused_with_advice(make_checkpoint):
    path, _ = make_checkpoint()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle.*safetensors"):
        load(path)


def test_a_folder_without_weights_says_so(make_checkpoint):
    path, _ = make_checkpoint()
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights \(model\.safetensors\)"):
        load(path)
