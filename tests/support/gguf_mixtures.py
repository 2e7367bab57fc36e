"""GGUF files of Gemma 4, GLM-4.5 and DeepSeek, in the format of llama.cpp's converter."""

from collections.abc import Callable
from typing import Any

import gguf
from torch import Tensor
from traced_models import FAMILIES, YARN

Changes = dict[str, Any]


def _family(name: str, **changes: Any) -> tuple[str, Changes]:
    model_type, settings = FAMILIES[name]
    return model_type, settings | changes


_EMBEDDINGS = {"vocab_size_per_layer_input": 320}
_ROTATED = {
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
_LONG = {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}
WRITTEN: dict[str, tuple[str, str, Changes]] = {
    # name -> architecture, model type of transformers, settings
    "gemma4": ("gemma4", *_family("gemma4", **_EMBEDDINGS, **_ROTATED)),
    "gemma4 moe": ("gemma4", *_family("gemma4-moe", **_EMBEDDINGS)),
    "gemma4 e": ("gemma4", *_family("gemma4-e", **_EMBEDDINGS, **_ROTATED)),
    "glm4 moe": ("glm4moe", *_family("glm4-moe")),
    "deepseek-v2": ("deepseek2", *_family("deepseek-v2")),
    "deepseek-v2 lite": (
        "deepseek2",
        *_family("deepseek-v2", q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1, **_LONG),
    ),
    "deepseek-v3": ("deepseek2", *_family("deepseek-v3", **_LONG)),
    "glm-4.7-flash": ("deepseek2", *_family("glm4-moe-lite")),
}
WIDE = {  # see `gguf_hybrids.LARGE`
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "hidden_size_per_layer_input"), 256),
    "v_head_dim": 64,
    "global_head_dim": 128,
}


def _gemma4(config: Any) -> Changes:
    is_full = [kind == "full_attention" for kind in config.layer_types]
    sizes = {flag: config.per_layer_config[index] for index, flag in enumerate(is_full)}
    own, shared = config.intermediate_size, config.num_kv_shared_layers
    first = config.num_hidden_layers - shared
    twice = config.use_double_wide_mlp
    return {
        "feed_forward_length": [
            own * (1 + (twice and layer >= first)) for layer in range(config.num_hidden_layers)
        ],
        "attention.head_count_kv": [sizes[flag].num_key_value_heads for flag in is_full],
        "attention.key_length": sizes[True].head_dim,
        "attention.value_length": sizes[True].head_dim,
        "attention.key_length_swa": sizes[False].head_dim,
        "attention.value_length_swa": sizes[False].head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [not flag for flag in is_full],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.dimension_count": sizes[True].head_dim,
        "rope.dimension_count_swa": sizes[False].head_dim,
    } | (_experts(config, config.num_experts, config.top_k_experts) if config.enable_moe_block else {})


def _experts(config: Any, count: int, per_token: int) -> Changes:
    return {
        "expert_count": count,
        "expert_used_count": per_token,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


def _routed(config: Any) -> Changes:
    is_sigmoid = config.model_type != "deepseek_v2"
    dense = getattr(config, "first_k_dense_replace", None)
    return _experts(config, config.n_routed_experts, config.num_experts_per_tok) | {
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.mlp_layer_types.count("dense") if dense is None else dense,
        "expert_gating_func": 2 if is_sigmoid else 1,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob and is_sigmoid),
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def _glm4(config: Any) -> Changes:
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    return _routed(config) | {"rope.dimension_count": rotated}


def _deepseek(config: Any) -> Changes:
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    found = _routed(config) | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": key,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    return found | yarn(config.rope_parameters)


def yarn(rope: Changes) -> Changes:
    """Return the entries of RoPE's scaling."""
    if rope["rope_type"] != "yarn":
        return {}
    found = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    if "attention_factor" in rope:
        found["rope.scaling.yarn_attn_factor"] = rope["attention_factor"]
    if "mscale_all_dim" in rope:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


ENTRIES: dict[str, Callable[[Any], Changes]] = {
    "gemma4": _gemma4,
    "glm4moe": _glm4,
    "deepseek2": _deepseek,
}
_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def factors(config: Any) -> list[float]:
    """Return the numbers by which the frequencies of Gemma 4's full attention are divided."""
    rope, pairs = (
        config.rope_parameters["full_attention"],
        config.per_layer_config["full_attention"].head_dim // 2,
    )
    rotated = int(pairs * rope.get("partial_rotary_factor", 1.0))
    return [1.0] * rotated + [1e30] * (pairs - rotated)


def cut(name: str, x: Tensor, config: Any, architecture: str, *, is_old: bool) -> dict[str, Tensor]:
    """Return the tensors of a parameter, by name.

    Args:
        is_old: one matrix for keys and values, as in DeepSeek's first files.
    """
    _, _, end = name.partition(".layers.")
    layer, _, own = end.partition(".")
    block = f"blk.{layer}."
    if own in _SCALES:
        return {block + _SCALES[own]: x}
    if own.endswith("mlp.experts.gate_up_proj"):
        gate, up = x.chunk(2, dim=1)
        return {f"{block}ffn_gate_exps.weight": gate, f"{block}ffn_up_exps.weight": up}
    if own.endswith("kv_b_proj.weight") and not is_old:
        key = config.qk_nope_head_dim
        of_heads = x.view(config.num_attention_heads, -1, x.shape[1])
        return {
            f"{block}attn_k_b.weight": of_heads[:, :key].transpose(1, 2),
            f"{block}attn_v_b.weight": of_heads[:, key:],
        }
    number = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    known = name.replace("e_score_correction_bias", "e_score_correction.bias")
    found = names.get_name(known, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    is_plain = not found.endswith((".weight", ".bias"))
    return {found + ".weight" if is_plain else found: x}
