"""GGUF files of models without a decoder here, in the format of llama.cpp's converter."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf_files import STORED, add, add_tensor, permuted, vocabulary
from gguf_mixtures import yarn
from torch import Tensor
from traced_models import FAMILIES, YARN, save
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


def _gemma3(config: Any) -> Changes:
    rope = config.rope_parameters["full_attention"]
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": rope.get("factor", 1.0)}
    base = {"rope.freq_base": rope["rope_theta"]}
    return _gemma(config) | base | (scaling if rope["rope_type"] == "linear" else {})


def _rms(config: Any) -> Changes:
    return {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }


def _olmo3(config: Any) -> Changes:
    return {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        **yarn(config.rope_parameters["full_attention"]),
    }


def _rotated(config: Any) -> int:
    head_dim = config.hidden_size // config.num_attention_heads
    return int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))


def _phi3(config: Any) -> Changes:
    factor = {"rope.scaling.attn_factor": config.rope_parameters.get("attention_factor")}
    return (
        _rms(config)
        | factor
        | {
            "rope.dimension_count": _rotated(config),
            "rope.scaling.original_context_length": config.original_max_position_embeddings,
            "attention.sliding_window": config.sliding_window or 0,
        }
    )


def _granite(config: Any) -> Changes:
    return _rms(config) | {
        "rope.dimension_count": _rotated(config),
        "vocab_size": config.vocab_size,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _stablelm(config: Any) -> Changes:
    return {
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "rope.dimension_count": _rotated(config),
        "use_parallel_residual": config.use_parallel_residual,
    }


def _starcoder2(config: Any) -> Changes:
    return {
        "attention.layer_norm_epsilon": config.norm_epsilon,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }


_SEVEN = {
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 32,
}
_LONG = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128,
    "attention_factor": 1.2,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_STRETCHED = {"full_attention": YARN | {"attention_factor": 1.2}, "sliding_attention": _PLAIN}
WRITTEN: dict[str, tuple[str, Callable[[Any], Changes], Changes]] = {
    # family in `traced_models.FAMILIES` -> architecture, metadata entries, changes of config.json
    "gemma2": ("gemma2", _gemma2, {"query_pre_attn_scalar": 32}),  # llama.cpp supports no other value
    "gemma3": ("gemma3", _gemma3, _SEVEN),
    "gemma3 long": ("gemma3", _gemma3, _SEVEN | {"rope_parameters": _LONG}),
    "granite": ("granite", _granite, {"embedding_multiplier": 3.0}),
    "granite tied": ("granite", _granite, {"tie_word_embeddings": True}),
    "olmo2": ("olmo2", _rms, {}),
    "olmo3": ("olmo2", _olmo3, {"rope_parameters": _STRETCHED}),
    "olmo3 plain": ("olmo2", _olmo3, {"rope_parameters": dict.fromkeys(_STRETCHED, _PLAIN)}),
    "phi3": ("phi3", _phi3, {}),
    "smollm3": (
        "smollm3",
        _rms,
        {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    ),  # the last layer has no rotation
    "phi3 partly rotated": (
        "phi3",
        _phi3,
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "phi3-window": ("phi3", _phi3, {}),
    "phi3 long": ("phi3", _phi3, {"original_max_position_embeddings": 128, "rope_parameters": _LONGROPE}),
    "stablelm": ("stablelm", _stablelm, {}),
    "stablelm biases": ("stablelm", _stablelm, {"use_qkv_bias": True, "use_parallel_residual": True}),
    "starcoder2": ("starcoder2", _starcoder2, {"tie_word_embeddings": False}),
}
_SHIFTED = ("gemma2", "gemma3")


def write_traced(
    folder: Path,
    family: str,
    type_name: str = "F32",
    *,
    sizes: Changes | None = None,
    metadata: Changes | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> tuple[Path, Any]:
    """Write a random model as a folder and as a GGUF file in it; return the file and the model.

    Args:
        type_name: type of matrices; the model gets the dequantised values.
        sizes: changed sizes in config.json.
        metadata: changed entries, by full name; None removes an entry.
        tensors: additional tensors.
    """
    architecture, _, settings = WRITTEN[family]
    model_type, own = FAMILIES[family.split(maxsplit=1)[0]]
    save(folder, model_type, own | {"vocab_size": VOCAB_SIZE} | settings | (sizes or {}))
    make: Any = AutoModelForCausalLM
    model = make.from_pretrained(folder, dtype=torch.float32).eval()
    path = folder / "model.gguf"
    write_text(
        path,
        architecture,
        model.config,
        dict(model.named_parameters()),  # tied parameters appear once
        entries_of(family, model.config) | vocabulary(VOCAB_SIZE) | (metadata or {}),
        type_name,
        tensors,
    )
    model.save_pretrained(folder)
    return path, model


def entries_of(family: str, config: Any) -> Changes:
    """Return the converter's entries of the architecture, by full name."""
    architecture, entries, _ = WRITTEN[family]
    return {f"{architecture}.{key}": value for key, value in (_sizes(config) | entries(config)).items()}


def write_text(
    path: Path,
    architecture: str,
    config: Any,
    parameters: Mapping[str, Tensor],
    entries: Changes,
    type_name: str = "F32",
    tensors: dict[str, Tensor] | None = None,
) -> None:
    """Write the parameters of a model's text; see `write_traced`.

    Args:
        entries: by full name; None leaves an entry out.
    """
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in entries.items():
        if value is not None:
            add(writer, key, value)
    arch = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, parameter in parameters.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        _write(writer, stored, parameter.detach(), type_name, architecture, config)
    rope = getattr(config, "rope_parameters", None) or {}
    factors = {f"rope_factors_{kind}.weight": rope.get(f"{kind}_factor") for kind in ("short", "long")}
    more = {name: torch.tensor(each) for name, each in factors.items() if each is not None}
    for name, value in (more | (tensors or {})).items():
        add_tensor(writer, name, value, "F32")
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write(writer: Any, name: str, value: Tensor, type_name: str, architecture: str, config: Any) -> None:
    """Add a tensor, and copy its dequantised values into the model."""
    if architecture in _SHIFTED and name.endswith("norm.weight"):
        add_tensor(writer, name, value + 1, "F32")
        return
    kind = type_name if value.ndim == 2 else "F32"
    is_permuted = architecture in ("granite", "smollm3") and name.split(".")[-2] in ("attn_q", "attn_k")
    half = config.hidden_size // config.num_attention_heads // 2
    add_tensor(writer, name, permuted(value, 2 * half) if is_permuted else value, kind)
    if kind != "F32":
        raw = torch.from_numpy(writer.tensors[-1][name].tensor).view(torch.uint8)
        numbers = STORED[kind].dequantised(raw.flatten(1)).view(value.shape)
        if is_permuted:
            numbers = numbers.view(-1, half, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
        value.copy_(numbers)
