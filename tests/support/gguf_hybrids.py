"""GGUF files of hybrids and mixtures of experts, in the format of llama.cpp's converter."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import gguf_mixtures
import torch
from gguf_files import STORED, add, add_tensor, vocabulary
from gguf_hybrid_tensors import changed, cut, factor_of
from torch import Tensor
from traced_models import save
from transformers import AutoModelForCausalLM

Changes = dict[str, Any]
VOCAB_SIZE = 320
_SOME = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_CONV = ["conv", "full_attention", "conv", "conv"]
_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": _SOME,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,  # llama.cpp supports no other size than the keys'
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": _CONV,
    "conv_L_cache": 3,
    "rope_parameters": {"rope_theta": 1e4},
}
_GRANITE = _MAMBA | {
    "num_hidden_layers": 4,
    "layer_types": _SOME,
    "mamba_expand": 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 96,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
_FALCON = _MAMBA | {"mamba_d_ssm": 128, "head_dim": 16, "mamba_norm_before_gate": False}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"],
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "chunk_size": 16,
}
_NEMOTRON_MOE = _NEMOTRON | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96,
}
WRITTEN: dict[str, tuple[str, str, Changes]] = {
    # name -> architecture, model type of transformers, settings
    "qwen3.5": ("qwen35", "qwen3_5_text", _DELTA),
    "qwen3.5 heads": (
        "qwen35",
        "qwen3_5_text",
        _DELTA | {"linear_num_key_heads": 4, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "qwen3.5 moe": ("qwen35moe", "qwen3_5_moe_text", _DELTA | _SHARED | {"linear_num_value_heads": 6}),
    "qwen3-next": ("qwen3next", "qwen3_next", _DELTA | _SHARED),
    "lfm2": ("lfm2", "lfm2", _LFM2 | {"block_auto_adjust_ff_dim": False}),
    "lfm2 moe": ("lfm2moe", "lfm2_moe", _LFM2 | _EXPERTS | {"num_dense_layers": 1}),
    "nemotron-h": ("nemotron_h", "nemotron_h", _NEMOTRON),
    "nemotron-h moe": (
        "nemotron_h_moe",
        "nemotron_h",
        _NEMOTRON_MOE | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
    ),
    "nemotron-h moe latent": ("nemotron_h_moe", "nemotron_h", _NEMOTRON_MOE | {"moe_latent_size": 64}),
    "granite-h": ("granitehybrid", "granitemoehybrid", _GRANITE),
    "granite-h moe": (
        "granitehybrid",
        "granitemoehybrid",
        _GRANITE
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "position_embedding_type": "rope",
        },
    ),
    "falcon-h1": ("falcon-h1", "falcon_h1", _FALCON),
    "falcon-h1 scaled": (
        "falcon-h1",
        "falcon_h1",
        _FALCON
        | {
            "mamba_rms_norm": True,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "mlp_multipliers": [0.8, 1.5],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.7,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 1.2],
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.6,
        },
    ),
}
WRITTEN |= gguf_mixtures.WRITTEN
_OF_ALL = ("hidden_size", "intermediate_size", "num_hidden_layers")
LARGE = {  # widths that are multiples of a K-quant's blocks
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_intermediate_size"), 256
    ),
    **dict.fromkeys(("linear_value_head_dim", "linear_key_head_dim"), 64),
    "shared_expert_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "moe_latent_size": 256,
    "linear_num_value_heads": 4,
    "mamba_d_head": 64,
    "mamba_head_dim": 64,
    "mamba_d_ssm": 512,
    "head_dim": 64,
    "q_lora_rank": 256,
} | gguf_mixtures.WIDE
_FLOATS = ("conv1d", "shortconv.conv.", "ffn_gate_inp", "ssm_norm", "ssm_a", "ssm_d")


def _entries(config: Any, architecture: str) -> Changes:
    """Return the converter's entries, without the prefix."""
    found: Changes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }
    rope = getattr(config, "rope_parameters", None)
    if rope is not None and "rope_theta" in rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and architecture != "granitehybrid":
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if architecture.startswith("nemotron_h"):
        found["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
    else:
        eps = config.norm_eps if architecture.startswith("lfm2") else config.rms_norm_eps
        found["attention.layer_norm_rms_epsilon"] = eps
    return found | _OWN[architecture](config)


def _delta(config: Any) -> Changes:
    partial = config.rope_parameters["partial_rotary_factor"]
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4,
        "rope.dimension_count": int(config.head_dim * partial),
    }


def _qwen35(config: Any) -> Changes:
    return _delta(config) | {"rope.dimension_sections": [11, 11, 10, 0]}


def _shared(config: Any) -> Changes:
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }


def _lfm2(config: Any) -> Changes:
    kv_heads = config.num_key_value_heads
    return {
        "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in config.layer_types],
        "vocab_size": config.vocab_size,
        "shortconv.l_cache": config.conv_L_cache,
    }


def _lfm2_moe(config: Any) -> Changes:
    return _lfm2(config) | {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
    }


def _nemotron(config: Any) -> Changes:
    kinds, kv_heads = config.layers_block_type, config.num_key_value_heads
    return {
        "context_length": 2**20,
        "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [config.intermediate_size * (kind == "mlp") for kind in kinds],
        "vocab_size": config.vocab_size,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
    }


def _nemotron_moe(config: Any) -> Changes:
    width = [config.moe_intermediate_size * (kind == "moe") for kind in config.layers_block_type]
    latent = {} if config.moe_latent_size is None else {"moe_latent_size": config.moe_latent_size}
    return (
        _nemotron(config)
        | latent
        | {
            "feed_forward_length": width,
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
    )


def _mamba(config: Any) -> Changes:
    return {
        "vocab_size": config.vocab_size,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
    }


def _granite(config: Any) -> Changes:
    kv_heads, has_rope = config.num_key_value_heads, config.position_embedding_type == "rope"
    found = {
        "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in config.layer_types],
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": has_rope,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }
    return _mamba(config) | found | ({} if has_rope else {"context_length": 2**20})


_OWN: dict[str, Callable[[Any], Changes]] = {
    "qwen35": _qwen35,
    "qwen35moe": lambda config: _qwen35(config) | _shared(config),
    "qwen3next": lambda config: _delta(config) | _shared(config),
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron_moe,
    "granitehybrid": _granite,
    "falcon-h1": _mamba,
} | gguf_mixtures.ENTRIES


def write_hybrid(
    folder: Path,
    family: str,
    type_name: str = "F32",
    *,
    type_names: dict[str, str] | None = None,
    sizes: Changes | None = None,
    metadata: Changes | None = None,
    tensors: dict[str, Tensor] | None = None,
    is_old: bool = False,
) -> tuple[Path, Any]:
    """Write a random model as a folder and as a GGUF file in it; return the file and the model.

    Args:
        type_name: type of matrices; the model gets the dequantised values.
        type_names: types of matrices by a part of their names; others have `type_name`.
        sizes: changed sizes in config.json; the family uses its own ones.
        metadata: changed entries, without the prefix; None removes an entry.
        tensors: additional tensors.
        is_old: Qwen3-Next's joined matrix, or DeepSeek's of keys and values, stays whole, as in the first
            files.
    """
    architecture, model_type, settings = WRITTEN[family]
    own = {key: value for key, value in (sizes or {}).items() if key in settings or key in _OF_ALL}
    save(folder, model_type, settings | {"vocab_size": VOCAB_SIZE} | own)
    make: Any = AutoModelForCausalLM
    model = make.from_pretrained(folder, dtype=torch.float32).eval()
    path = folder / "model.gguf"
    write_parameters(
        path,
        architecture,
        model.config,
        model.state_dict(),
        vocabulary(VOCAB_SIZE),
        type_name,
        type_names=type_names,
        metadata=metadata,
        tensors=tensors,
        is_old=is_old,
    )
    model.save_pretrained(folder)
    return path, model


def write_parameters(
    path: Path,
    architecture: str,
    text: Any,
    parameters: Mapping[str, Tensor],
    tokens: Changes,
    type_name: str = "F32",
    *,
    type_names: dict[str, str] | None = None,
    metadata: Changes | None = None,
    tensors: dict[str, Tensor] | None = None,
    is_old: bool = False,
) -> None:
    """Write the parameters of a model's text; see `write_hybrid`.

    Args:
        text: configuration.
        tokens: entries of the vocabulary.
    """
    config = deepcopy(text)
    config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(None, architecture)
    entries = _entries(config, architecture) | (metadata or {})
    for key, value in ({f"{architecture}.{key}": value for key, value in entries.items()} | tokens).items():
        if value is not None:
            add(writer, key, value)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, parameter in parameters.items():
        if name in tied:
            continue
        places = torch.arange(parameter.numel()).view(parameter.shape)
        cuts = gguf_mixtures.cut if architecture in gguf_mixtures.ENTRIES else cut
        for stored, indices in cuts(name, places, config, architecture, is_old=is_old).items():
            is_matrix = indices.ndim > 1 and not any(part in stored for part in _FLOATS)
            kind = next((kind for part, kind in (type_names or {}).items() if part in stored), type_name)
            numbers = parameter.detach().flatten()[indices]
            factor = factor_of(name, config, indices // parameter[0].numel())
            numbers = changed(stored, numbers * factor, architecture)
            add_tensor(writer, stored, numbers, kind if is_matrix else "F32")
            if is_matrix and kind != "F32":
                raw = torch.from_numpy(writer.tensors[-1][stored].tensor).view(torch.uint8)
                back = STORED[kind].dequantised(raw.reshape(-1, raw.shape[-1])).view(indices.shape)
                parameter.view(-1)[indices] = back / factor
    more = dict(tensors or {})
    if architecture == "gemma4":
        more["rope_freqs.weight"] = torch.tensor(gguf_mixtures.factors(config))
    for name, value in more.items():
        add_tensor(writer, name, value, "F32")
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
