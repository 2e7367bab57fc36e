"""GGUF files of every supported architecture give transformers' results with the same weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from dense_model import logits_of_all
from gguf_files import TYPES, dequantised, joined, write_gguf

from neo_desktop import Engine
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.gguf.types import TYPES as STORED_TYPES
from neo_desktop.models.json_file import ModelError, UnsupportedModelError
from neo_desktop.models.registry import load_model

CPU = torch.device("cpu")
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "llama-tied": ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-3": ("llama", "LlamaForCausalLM", {"rope_parameters": LLAMA_3}),
    "mistral": ("llama", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {"rope_theta": 1e6}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
SCALED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "yarn": (
        "qwen2",
        "Qwen2ForCausalLM",
        {"rope_parameters": YARN},
        {"type": "yarn", "factor": 4.0, "original_context_length": 16},
    ),
    "linear": ("llama", "LlamaForCausalLM", {"rope_parameters": LINEAR}, {"type": "linear", "factor": 4.0}),
}


def logits(path: Path, token_ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    return logits_of_all(load_model(checkpoint, checkpoint.config(), dtype=dtype, device=CPU), token_ids)


def extras(model: Any) -> dict[str, torch.Tensor]:
    """Return the converter's tensor for Llama 3's scaling: a factor per frequency."""
    rope = model.config.rope_parameters
    if rope["rope_type"] != "llama3":
        return {}
    dim = model.config.head_dim
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
    return {"rope_freqs.weight": plain / model.model.rotary_emb.inv_freq}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_with_transformers(variant: str, make_checkpoint: Any, tmp_path: Path) -> None:
    architecture, model_class, settings = VARIANTS[variant]
    _, model = make_checkpoint(model_class, **SIZES | settings)
    path = write_gguf(tmp_path / "model.gguf", model, architecture=architecture, tensors=extras(model))
    token_ids = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(token_ids[None]).logits[0]
    assert expected.std() > 0.3
    torch.testing.assert_close(logits(path, token_ids), expected, rtol=0, atol=1e-4)
    config = open_checkpoint(path).config()
    assert config.num_parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("variant", SCALED)
def test_scaled_rotations_agree_with_transformers(variant: str, make_checkpoint: Any, tmp_path: Path) -> None:
    architecture, model_class, settings, entries = SCALED[variant]
    _, model = make_checkpoint(model_class, **SIZES | settings)
    metadata = {f"{architecture}.rope.scaling.{key}": value for key, value in entries.items()}
    path = write_gguf(tmp_path / "model.gguf", model, architecture=architecture, metadata=metadata)
    token_ids = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(token_ids[None]).logits[0]
    torch.testing.assert_close(logits(path, token_ids), expected, rtol=0, atol=1e-4)


def config_with(model: Any, folder: Path, **entries: Any) -> ModelConfig:
    named = {f"llama.{key.replace('__', '.')}": value for key, value in entries.items()}
    return open_checkpoint(write_gguf(folder / "model.gguf", model, metadata=named)).config()


def test_numbers_of_each_layer_count_where_they_are_the_same(make_checkpoint: Any, tmp_path: Path) -> None:
    _, model = make_checkpoint(**SIZES)
    plain, layers = config_with(model, tmp_path), model.config.num_hidden_layers
    same = {"attention__head_count": 4, "attention__head_count_kv": 2, "feed_forward_length": 96}
    for key, value in same.items():
        assert config_with(model, tmp_path, **{key: [value] * layers}) == plain
        with pytest.raises(UnsupportedModelError, match=r"layers with different.*llamacpp"):
            config_with(model, tmp_path, **{key: [value] * (layers - 1) + [1]})
        with pytest.raises(ModelError, match=f"numbers of .* for {layers} layers"):
            config_with(model, tmp_path, **{key: [value] * (layers + 1)})


@pytest.mark.parametrize(
    "entries",
    [
        *({key: 0.5} for key in ("logit_scale", "residual_scale", "attention__scale", "something_new")),
        *({key: 2} for key in ("expert_group_count", "nextn_predict_layers", "rope__dimension_sections")),
        {"rope__scaling__attn_factor": 1.5},
        {"rope__scaling__yarn_ext_factor": 0.5},
        {"rope__scaling__type": "longrope"},
        {"attention__causal": False},
        {"attention__key_length": 20, "attention__value_length": 20, "rope__dimension_count": 20},
    ],
)
def test_entries_that_change_the_numbers_are_left_to_llama_cpp(
    entries: dict[str, Any], make_checkpoint: Any, tmp_path: Path
) -> None:
    _, model = make_checkpoint(**SIZES)
    with pytest.raises(UnsupportedModelError):
        config_with(model, tmp_path, **entries)


@pytest.mark.parametrize("type_name", TYPES)
def test_quantised_weights_are_those_of_the_reference(
    type_name: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    _, model = make_checkpoint(**SIZES)
    path = write_gguf(tmp_path / "model.gguf", model, type_name=type_name)
    tensors = open_checkpoint(path).weights().tensors
    parameters = dict(model.named_parameters())
    assert tensors.keys() == parameters.keys()
    for name, stored in tensors.items():
        weight = parameters[name].detach()
        expected = dequantised(weight, type_name) if weight.ndim == 2 else weight
        assert torch.equal(joined(stored.pieces()), expected), name
    assert open_checkpoint(path).weights().is_quantised == ("Q" in type_name)


@pytest.mark.parametrize("number", STORED_TYPES)
def test_every_type_is_read_as_the_format_defines_it(number: int) -> None:
    kind, stored = gguf.GGMLQuantizationType(number), STORED_TYPES[number]
    assert kind.name == stored.name
    assert gguf.GGML_QUANT_SIZES[kind] == (stored.elements, stored.nbytes)
    shape = (8, 1024 // stored.elements * stored.nbytes)
    raw = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    with np.errstate(all="ignore"):  # arbitrary bits as floats, including infinities and NaN
        expected = torch.from_numpy(gguf.quants.dequantize(raw.copy(), kind))
    found = stored.dequantised(torch.from_numpy(raw))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_large_matrices_come_in_pieces(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = make_checkpoint(**SIZES | {"attention_bias": True})
    path = write_gguf(tmp_path / "model.gguf", model, type_name="Q8_0")
    token_ids = torch.arange(30)
    whole = logits(path, token_ids)
    monkeypatch.setattr("neo_desktop.models.gguf.tensors.PIECE_ELEMENTS", 100)
    pieces = list(open_checkpoint(path).weights().tensors["model.layers.0.self_attn.q_proj.weight"].pieces())
    assert [row for row, _ in pieces] == list(range(64))
    monkeypatch.setattr("neo_desktop.models.gguf.tensors.STORED_PIECE_ELEMENTS", 100)
    blocks = open_checkpoint(path).weights().tensors["model.layers.0.self_attn.q_proj.weight"].blocks
    assert blocks is not None
    assert [row for row, _ in blocks.pieces(8)] == list(range(0, 64, 8))
    assert torch.equal(logits(path, token_ids), whole)


def test_parts_of_a_split_model_are_one(make_checkpoint: Any, tmp_path: Path) -> None:
    _, model = make_checkpoint(**SIZES)
    whole = write_gguf(tmp_path / "whole.gguf", model)
    folder = tmp_path / "parts"
    folder.mkdir()
    reader, names = gguf.GGUFReader(whole), ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(None, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    kind = field.types[0]
                    sub_type = field.types[1] if len(field.types) > 1 else None
                    writer.add_key_value(key, field.contents(), kind, sub_type)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file(folder / name)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    token_ids = torch.arange(30)
    for path in (folder, folder / names[0], folder / names[1]):
        assert torch.equal(logits(path, token_ids), logits(whole, token_ids))
        assert open_checkpoint(path).name == "a"
    (folder / names[1]).unlink()
    with pytest.raises(ModelError, match=r"has no a-00002-of-00002\.gguf: complete the download"):
        logits(folder, token_ids)


def test_a_folder_with_several_files_asks_which_is_meant(make_checkpoint: Any, tmp_path: Path) -> None:
    _, model = make_checkpoint(**SIZES)
    folder = tmp_path / "folder"
    folder.mkdir()
    first = write_gguf(folder / "a.gguf", model)
    assert open_checkpoint(folder).name == "a"
    (folder / "b.gguf").write_bytes(first.read_bytes())
    with pytest.raises(
        ModelError, match=r"has 2 models: name the file that is meant, such as a\.gguf, b\.gguf"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "mpt"},
            r"'mpt', which is not supported: choose one of llama, qwen2.*neo-desktop\[llamacpp\]'",
        ),
        ({"general.type": "mmproj"}, "is not a model, but 'mmproj' for one"),
        ({"llama.expert_count": 8}, "expert_used_count"),
        ({"llama.logit_scale": 0.5}, "sets logit_scale"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count other than the size of a head"),
        ({"llama.rope.scaling.type": "longrope"}, "rope type 'longrope'"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, r"'kimi-k2', which is not supported: default, gpt-2"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer of the kind 'bert'"),
        ({"llama.block_count": 2}, "holds weights that metadata does not describe"),
        ({"llama.block_count": 4}, "lacks the weights"),
        ({"llama.block_count": None}, "lacks 'block_count'"),
        ({"llama.feed_forward_length": 128}, "has the shape"),
        ({"llama.attention.head_count": 3}, "cannot share"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    changes: dict[str, Any], message: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    _, model = make_checkpoint(**SIZES)
    path = write_gguf(tmp_path / "model.gguf", model, metadata=changes)
    with pytest.raises(ModelError, match=message):
        Engine.from_pretrained(path, device="cpu")
