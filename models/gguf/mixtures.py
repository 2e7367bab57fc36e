"""Mixtures of experts in GGUF files, Gemma 4 and its dense models among them: metadata → config.json."""

from collections.abc import Mapping
from typing import Any

from neo_desktop.models.experts_config import MAX_EXPERTS
from neo_desktop.models.gguf.family import YARN, Described, Family, HeadPart, Orders
from neo_desktop.models.gguf.hybrids import EXPERTS, ROUTED, ROUTER_BIAS, SIGMOID, experts, routed
from neo_desktop.models.gguf.tensors import ROPE_FACTORS
from neo_desktop.models.json_file import JsonFile, ModelError, UnsupportedModelError
from neo_desktop.models.limits import MAX_HEAD_DIM, MAX_HIDDEN_SIZE, MAX_LAYERS

_RMS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
_SOFTMAX = 1
_GEMMA_4_KEYS = EXPERTS | {
    *("attention.shared_kv_layers", "attention.key_length_swa", "attention.value_length_swa"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "final_logit_softcapping"),
    *("embedding_length_per_layer_input", "rope.freq_base_swa", "rope.dimension_count_swa"),
}
_LATENT_KEYS = (
    ROUTED
    | YARN
    | {
        *("attention.q_lora_rank", "attention.kv_lora_rank"),
        *("attention.key_length_mla", "attention.value_length_mla"),
    }
)
_SHARED_LAYERS, _OF_KEYS = "num_kv_shared_layers", ("attn_k", "attn_v", "attn_k_norm")


def _gemma4(described: Described) -> dict[str, Any]:
    """Layers without window have heads of another size, and may use keys as values.

    The last layers may read earlier layers' keys and values, and have a network of twice the width.
    """
    own, layers = described.own, described.values["num_hidden_layers"]
    layer_types = described.layer_types(6)
    widths = described.per_layer("feed_forward_length")
    kv_heads = dict(zip(layer_types, described.per_layer("attention.head_count_kv"), strict=True))
    full = [layer for layer in range(layers) if layer_types[layer] == "full_attention"]
    if not full or len(kv_heads) != 2:
        raise UnsupportedModelError(f"{own.path} has layers of one type, which is not supported.")
    wide, narrow = (_head_dim(own, f"attention.{{}}_length{end}") for end in ("", "_swa"))
    for key, size in (("rope.dimension_count", wide), ("rope.dimension_count_swa", narrow)):
        if own.integer(key, size) != size:
            raise UnsupportedModelError(
                f"{own.path} has {key} other than the size of a head, which is not supported."
            )
    values = {
        "intermediate_size": widths[0],
        "use_double_wide_mlp": max(widths) > widths[0],
        "head_dim": narrow,
        "global_head_dim": wide,
        "num_key_value_heads": kv_heads["sliding_attention"],
        "num_global_key_value_heads": kv_heads["full_attention"],
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in described.tensors,
        "sliding_window": own.integer("attention.sliding_window"),
        "layer_types": layer_types,
        "final_logit_softcapping": own.number("final_logit_softcapping", 0.0, allow_zero=True) or None,
        _SHARED_LAYERS: own.integer("attention.shared_kv_layers", 0, minimum=0, maximum=MAX_LAYERS),
        "hidden_size_per_layer_input": own.integer(
            "embedding_length_per_layer_input", 0, minimum=0, maximum=MAX_HIDDEN_SIZE
        ),
        "vocab_size_per_layer_input": described.values["vocab_size"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": own.number("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": _rotated_part(described),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": own.number("rope.freq_base_swa", 10_000.0),
            },
        },
    }
    if own.integer("expert_count", 0, minimum=0, maximum=MAX_EXPERTS):
        sizes = experts(own, "num_experts", "top_k_experts", "moe_intermediate_size")
        values |= {"enable_moe_block": True, **sizes}
    return values


def _rotated_part(described: Described) -> float:
    """Return the part of a head that RoPE rotates; other pairs' frequencies are divided by 1e30."""
    factors = described.floats(ROPE_FACTORS)
    if not factors:
        return 1.0
    rotated = sum(factor == 1 for factor in factors)
    if not all(factor == 1 for factor in factors[:rotated]) or min(factors[rotated:], default=1e30) < 1e20:
        raise UnsupportedModelError(
            f"{described.own.path} has {ROPE_FACTORS} of another kind than Gemma 4's, which is not supported."
        )
    return rotated / len(factors)


def _unused_by_gemma4(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the factors, which are part of the configuration, and layers' unused keys and values."""
    layers = values["num_hidden_layers"]
    shared = range(layers - values[_SHARED_LAYERS], layers)
    return frozenset((ROPE_FACTORS, *(f"blk.{layer}.{kind}.weight" for layer in shared for kind in _OF_KEYS)))


def _glm4_moe(described: Described) -> dict[str, Any]:
    if described.own.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise _unknown_router(described.own)
    return routed(described) | {
        "use_qk_norm": described.has(".attn_q_norm.weight"),
        "attention_bias": described.has(".attn_q.bias"),
    }


def _deepseek2(described: Described) -> dict[str, Any]:
    """The router decides between DeepSeek-V2 and V3; GLM-4.7-Flash computes as the latter.

    Keys and values of a head are matrices of their own, or the rows of one matrix in older files.
    """
    own = described.own
    end = "_mla" if "attention.key_length_mla" in own else ""
    key = own.integer(f"attention.key_length{end}", maximum=MAX_HEAD_DIM)
    rotated = own.integer("rope.dimension_count", maximum=MAX_HEAD_DIM)
    if rotated >= key:
        raise ModelError(f"{own.path} rotates {rotated} of {key} numbers of a key: download it again.")
    q_rank, kv_rank = "attention.q_lora_rank", "attention.kv_lora_rank"
    values = routed(described) | {
        "num_key_value_heads": described.values["num_attention_heads"],
        "q_lora_rank": own.integer(q_rank, maximum=MAX_HIDDEN_SIZE) if q_rank in own else None,
        "kv_lora_rank": own.integer(kv_rank, maximum=MAX_HIDDEN_SIZE),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": own.integer(f"attention.value_length{end}", maximum=MAX_HEAD_DIM),
        "rope_parameters": described.yarn(),
    }
    router = own.integer("expert_gating_func", 0, minimum=0) or _SOFTMAX
    if router == SIGMOID:
        return values
    if router != _SOFTMAX or values["norm_topk_prob"]:
        raise _unknown_router(own)
    return values | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "greedy" if values["n_group"] == 1 else "group_limited_greedy",
    }


def _unknown_router(own: JsonFile) -> UnsupportedModelError:
    return UnsupportedModelError(f"{own.path} sets expert_gating_func to a value that is not supported.")


def _head_dim(own: JsonFile, pattern: str) -> int:
    size = own.integer(pattern.format("key"), maximum=MAX_HEAD_DIM)
    if own.integer(pattern.format("value"), size) != size:
        raise UnsupportedModelError(
            f"{own.path} has values of another size than keys, which is not supported."
        )
    return size


def _gemma4_orders(_: Mapping[str, Any]) -> Orders:
    of_kind = {"ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale"}
    return {kind: {name: None} for kind, name in of_kind.items()}


_KV = "self_attn.kv_b_proj.weight"
MIXTURES = {
    "gemma4": Family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        _RMS,
        _gemma4,
        _GEMMA_4_KEYS,
        varying=frozenset(("attention.head_count_kv", "feed_forward_length")),
        has_own_heads=True,
        orders=_gemma4_orders,
        unused=_unused_by_gemma4,
    ),
    "glm4moe": Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _RMS,
        _glm4_moe,
        ROUTED,
        has_head_dim=True,
        is_partly_rotated=True,
        renamed=ROUTER_BIAS,
    ),
    "deepseek2": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _RMS,
        _deepseek2,
        _LATENT_KEYS,
        has_own_heads=True,
        renamed=ROUTER_BIAS,
        orders=lambda _: {"attn_kv_b": {_KV: None}},
        by_head={"attn_k_b": HeadPart(_KV, 0, 2, is_transposed=True), "attn_v_b": HeadPart(_KV, 1, 2)},
    ),
}
"""Keys are llama.cpp's names of architectures."""
