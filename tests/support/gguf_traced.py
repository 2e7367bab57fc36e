"""GGUF files of models that have no decoder here, written as llama.cpp's converter writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf_files import STORED, add, add_tensor, vocabulary
from torch import Tensor
from traced_models import FAMILIES, save
from transformers import AutoModelForCausalLM

Changes = dict[str, Any]
VOCAB_SIZE = 320


def _sizes(config: Any) -> Changes:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }


def _gemma(config: Any) -> Changes:
    return {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
    }


def _gemma2(config: Any) -> Changes:
    return _gemma(config) | {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


WRITTEN: dict[str, tuple[str, Callable[[Any], Changes], Changes]] = {
    # of `traced_models.FAMILIES` -> architecture, its entries, and what a file can say at all
    "gemma2": ("gemma2", _gemma2, {"query_pre_attn_scalar": 32}),
}
_SHIFTED = ("gemma2",)


def write_traced(
    folder: Path,
    family: str,
    type_name: str = "F32",
    *,
    sizes: Changes | None = None,
    metadata: Changes | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> tuple[Path, Any]:
    """Write a random model as a folder, and as a file in it; return the file and the model.

    Args:
        type_name: of matrices; the model's are as they are stored.
        sizes: of config.json, that are others.
        metadata: changes of entries, under their full names; None removes one.
        tensors: more of them.
    """
    architecture, entries, settings = WRITTEN[family]
    model_type, own = FAMILIES[family]
    save(folder, model_type, own | {"vocab_size": VOCAB_SIZE} | settings | (sizes or {}))
    make: Any = AutoModelForCausalLM
    model = make.from_pretrained(folder, dtype=torch.float32).eval()
    config = model.config
    writer = gguf.GGUFWriter(None, architecture)
    found = {f"{architecture}.{key}": value for key, value in (_sizes(config) | entries(config)).items()}
    for key, value in (found | vocabulary(VOCAB_SIZE) | (metadata or {})).items():
        if value is not None:
            add(writer, key, value)
    arch = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, parameter in model.named_parameters():  # tied ones once
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        _write(writer, stored, parameter.detach(), type_name, architecture, config)
    for name, value in (tensors or {}).items():
        add_tensor(writer, name, value, "F32")
    path = folder / "model.gguf"
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.save_pretrained(folder)
    return path, model


def _write(writer: Any, name: str, value: Tensor, type_name: str, architecture: str, config: Any) -> None:
    """Add a tensor; the model's own takes the numbers that are stored."""
    if architecture in _SHIFTED and name.endswith("norm.weight"):
        add_tensor(writer, name, value + 1, "F32")
        return
    kind = type_name if value.ndim == 2 else "F32"
    add_tensor(writer, name, value, kind)
    if kind != "F32":
        raw = torch.from_numpy(writer.tensors[-1][name].tensor).view(torch.uint8)
        value.copy_(STORED[kind].dequantised(raw.flatten(1)).view(value.shape))
