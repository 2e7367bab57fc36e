"""The architectures of GGUF files: metadata → the values of a config.json, by the rules of llama.cpp.

Missing entries take the defaults of its converter; an unknown entry is an error that names it.
"""

from typing import Any

from neo_desktop.models.gguf.entries import NORM_EPS, PREDICTING_LAYERS, Entries
from neo_desktop.models.gguf.family import (
    FULL,
    ROUTER_BIAS,
    SIGMOID,
    SLIDING,
    SOFTMAX,
    Family,
    Values,
    experts,
    routed,
    scales,
    unknown_router,
    yarn,
)
from neo_desktop.models.gguf.tensors import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from neo_desktop.models.json_file import ModelError, UnsupportedModelError
from neo_desktop.models.matrices import OF_HEADS
from neo_desktop.models.rope import yarn_temperature


def _written(own: Entries) -> Values:
    """Return the values of architectures that the project's own decoder computes."""
    if own.integer(PREDICTING_LAYERS, 0, minimum=0):
        raise own.unsupported("layers that predict more than one token")
    rope = own.rope("linear", "yarn")
    factor = own.number("rope.scaling.attn_factor", 1.0)
    if rope["rope_type"] == "yarn":
        rope["attention_factor"] = factor * yarn_temperature(rope["factor"])
    elif factor != 1:
        raise UnsupportedModelError(f"{own.path} scales RoPE in two ways, which is not supported.")
    return {"rope_parameters": rope}


def _llama(own: Entries) -> Values:
    """Mistral's, Mixtral's and SmolLM's models are also "llama"."""
    if not own.integer("expert_count", 0, minimum=0):
        return _written(own)
    return _written(own) | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": None,
        **experts(own, "num_local_experts", width="intermediate_size"),
    }


def _mistral3(own: Entries) -> Values:
    """Ministral 3 and Devstral 2 lower scores of distant positions; others of this name are like Llama."""
    beta = own.number("attention.temperature_scale", 0.0, allow_zero=True)
    if not beta:
        return _written(own)
    rope = own.rope("yarn")
    if rope["rope_type"] != "yarn":
        raise own.unsupported("attention.temperature_scale without rope.scaling")
    shared = own.number("rope.scaling.yarn_log_multiplier", 0.0, allow_zero=True)
    return {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": rope | {"mscale": 1.0, "mscale_all_dim": shared, "llama_4_scaling_beta": beta},
    }


def _qwen3_moe(own: Entries) -> Values:
    dense = [layer for layer in range(own.num_layers) if f"blk.{layer}.ffn_gate_inp.weight" not in own.shapes]
    return _written(own) | {
        "mlp_only_layers": dense if len(dense) < own.num_layers else [],
        "norm_topk_prob": True,
        **experts(own, "num_experts"),
    }


def _gpt_oss(own: Entries) -> Values:
    values = _written(own)
    return values | {
        "rope_parameters": {**values["rope_parameters"], "truncate": False},
        "sliding_window": own.integer("attention.sliding_window", 0, minimum=0) or None,
        **experts(own, "num_local_experts", width="intermediate_size"),
    }


def _gemma2(own: Entries) -> Values:
    return {
        "query_pre_attn_scalar": _scale(own, 46),
        "attn_logit_softcapping": own.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": own.number("final_logit_softcapping", 30.0),
        "sliding_window": own.integer("attention.sliding_window", 4096),
        "layer_types": own.layer_types(2),
    }


def _scale(own: Entries, layers_of_the_largest: int) -> int:
    """Return d where attention scores are divided by √d: head_dim, except in Gemma's largest model."""
    return own.hidden_size // own.heads if own.num_layers == layers_of_the_largest else own.head_dim


def _gemma3(own: Entries) -> Values:
    """Layers with a window have their own RoPE base; position scaling applies to the other layers only."""
    window = own.integer("attention.sliding_window", 0, minimum=0)
    return {
        "query_pre_attn_scalar": _scale(own, 62),
        "final_logit_softcapping": own.number("final_logit_softcapping", 0.0, allow_zero=True) or None,
        "sliding_window": window or None,
        "layer_types": own.layer_types(6) if window else [FULL] * own.num_layers,
        "rope_parameters": {FULL: own.rope("linear"), SLIDING: own.default_rope("rope.freq_base_swa")},
    }


def _gemma4(own: Entries) -> Values:
    """Layers without window have heads of another size, and may use keys as values.

    The last layers may read earlier layers' keys and values, and have a network of twice the width.
    """
    layer_types, widths = own.layer_types(6), own.per_layer("feed_forward_length")
    kv_heads = dict(zip(layer_types, own.per_layer("attention.head_count_kv"), strict=True))
    if FULL not in layer_types or len(kv_heads) != 2:
        raise own.unsupported("layers of one type")
    first_full = layer_types.index(FULL)
    wide, narrow = (_head_dim(own, end) for end in ("", "_swa"))
    for key, size in (("rope.dimension_count", wide), ("rope.dimension_count_swa", narrow)):
        if own.integer(key, size) != size:
            raise own.unsupported(f"{key} other than the size of a head")
    narrow_input = "embedding_length_per_layer_input"
    values = {
        "intermediate_size": widths[0],
        "use_double_wide_mlp": max(widths) > widths[0],
        "head_dim": narrow,
        "global_head_dim": wide,
        "num_key_value_heads": kv_heads[SLIDING],
        "num_global_key_value_heads": kv_heads[FULL],
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in own.shapes,
        "sliding_window": own.integer("attention.sliding_window"),
        "layer_types": layer_types,
        "final_logit_softcapping": own.number("final_logit_softcapping", 0.0, allow_zero=True) or None,
        "num_kv_shared_layers": own.integer("attention.shared_kv_layers", 0, minimum=0),
        "hidden_size_per_layer_input": own.integer(narrow_input, 0, minimum=0),
        "vocab_size_per_layer_input": own.shapes["token_embd.weight"][0],
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": own.number("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": _rotated_part(own),
            },
            SLIDING: own.default_rope("rope.freq_base_swa"),
        },
    }
    if own.integer("expert_count", 0, minimum=0):
        values |= {"enable_moe_block": True, **experts(own, "num_experts", "top_k_experts")}
    return values


def _head_dim(own: Entries, end: str) -> int:
    size = own.integer(f"attention.key_length{end}")
    if own.integer(f"attention.value_length{end}", size) != size:
        raise own.unsupported("values of another size than keys")
    return size


def _rotated_part(own: Entries) -> float:
    """Return the part of a head that RoPE rotates; other pairs' frequencies are divided by 1e30."""
    factors = own.floats(ROPE_FACTORS)
    if not factors:
        return 1.0
    rotated = sum(factor == 1 for factor in factors)
    if not all(factor == 1 for factor in factors[:rotated]) or min(factors[rotated:], default=1e30) < 1e20:
        raise own.unsupported(f"{ROPE_FACTORS} of another kind than Gemma 4's")
    return rotated / len(factors)


def _unused_by_gemma4(values: Values) -> frozenset[str]:
    """Return the factors, which are part of the configuration, and layers' unused keys and values."""
    layers = values["num_hidden_layers"]
    shared = range(layers - values["num_kv_shared_layers"], layers)
    kinds = ("attn_k", "attn_v", "attn_k_norm")
    return frozenset((ROPE_FACTORS, *(f"blk.{layer}.{kind}.weight" for layer in shared for kind in kinds)))


def _olmo(own: Entries) -> Values:
    """Only OLMo 3 has windows; YaRN scales its other layers' RoPE."""
    if "attention.sliding_window" not in own:
        return {}
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": own.integer("attention.sliding_window"),
        "layer_types": own.layer_types(4),
        "rope_parameters": {FULL: yarn(own), SLIDING: own.default_rope()},
    }


def _phi3(own: Entries) -> Values:
    """Files of models with LongRoPE have its factors for short and long prompts."""
    values: Values = {"sliding_window": own.integer("attention.sliding_window", 0, minimum=0) or None}
    if not {LONG_FACTORS, SHORT_FACTORS} & own.shapes.keys():
        return values
    rotated = own.integer("rope.dimension_count", own.head_dim)
    original = own.integer("rope.scaling.original_context_length")
    rope = {
        "rope_type": "longrope",
        "rope_theta": own.number("rope.freq_base", 10_000.0),
        "partial_rotary_factor": rotated / own.head_dim,
        "original_max_position_embeddings": original,
        "attention_factor": own.number("rope.scaling.attn_factor", 1.0),
        "short_factor": own.rope_factors(SHORT_FACTORS, rotated // 2),
        "long_factor": own.rope_factors(LONG_FACTORS, rotated // 2),
    }
    return values | {"original_max_position_embeddings": original, "rope_parameters": rope}


def _stablelm(own: Entries) -> Values:
    """The tensors decide, because older files lack the entries."""
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in own.shapes,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in own.shapes,
    }


def _glm4_moe(own: Entries) -> Values:
    if own.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise unknown_router(own)
    return routed(own) | {
        "use_qk_norm": own.has(".attn_q_norm.weight"),
        "attention_bias": own.has(".attn_q.bias"),
    }


def _deepseek2(own: Entries) -> Values:
    """The router decides between DeepSeek-V2 and V3; GLM-4.7-Flash computes as the latter.

    Keys and values of a head are matrices of their own, or the rows of one matrix in older files.
    """
    end = "_mla" if "attention.key_length_mla" in own else ""
    key = own.integer(f"attention.key_length{end}")
    rotated = own.integer("rope.dimension_count")
    if rotated >= key:
        raise ModelError(f"{own.path} rotates {rotated} of {key} numbers of a key: download it again.")
    q_rank = "attention.q_lora_rank"
    values = routed(own) | {
        "num_key_value_heads": own.heads,
        "q_lora_rank": own.integer(q_rank) if q_rank in own else None,
        "kv_lora_rank": own.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": own.integer(f"attention.value_length{end}"),
        "rope_parameters": yarn(own),
    }
    router = own.integer("expert_gating_func", 0, minimum=0) or SOFTMAX
    if router == SIGMOID:
        return values
    if router != SOFTMAX or values["norm_topk_prob"]:
        raise unknown_router(own)
    return values | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "greedy" if values["n_group"] == 1 else "group_limited_greedy",
    }


_KV = "self_attn.kv_b_proj.weight"
_OF_WRITTEN: dict[str, Any] = {
    "has_head_dim": True,
    # llama.cpp reads the window only for gpt-oss.
    "idle": frozenset(("attention.sliding_window",)),
    "unused": lambda _: frozenset((ROPE_FACTORS,)),
}
_OF_QWEN3_VL = _OF_WRITTEN | {"idle": _OF_WRITTEN["idle"] | {"rope.dimension_sections", "n_deepstack_layers"}}
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", _llama, rotates_neighbours=True, **_OF_WRITTEN),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _written, **_OF_WRITTEN),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _written, **_OF_WRITTEN),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, **_OF_WRITTEN),
    # Text alone rotates all parts of a head by the same position, as Qwen3 does.
    "qwen3vl": Family("qwen3", "Qwen3ForCausalLM", _written, **_OF_QWEN3_VL),
    "qwen3vlmoe": Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, **_OF_QWEN3_VL),
    "mistral3": Family("llama", "LlamaForCausalLM", _mistral3, rotates_neighbours=True, **_OF_WRITTEN),
    "gpt-oss": Family("gpt_oss", "GptOssForCausalLM", _gpt_oss, **_OF_WRITTEN),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", _gemma2, has_head_dim=True, shifts_norms=True),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", _gemma3, has_head_dim=True, shifts_norms=True),
    "gemma4": Family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        _gemma4,
        varying=frozenset(("attention.head_count_kv", "feed_forward_length")),
        has_own_heads=True,
        orders=lambda _: {
            "ffn_gate_inp.scale": {"router.scale": None},
            "ffn_down_exps.scale": {"router.per_expert_scale": None},
        },
        unused=_unused_by_gemma4,
    ),
    "granite": Family("granite", "GraniteForCausalLM", scales, rotates_neighbours=True),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", _olmo),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        _phi3,
        idle=frozenset(("rope.scaling.original_context_length",)),  # it matters only with factors
        is_partly_rotated=True,
        unused=lambda _: frozenset((LONG_FACTORS, SHORT_FACTORS)),
    ),
    "smollm3": Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        lambda _: {"no_rope_layer_interval": 4},  # fixed in llama.cpp
        rotates_neighbours=True,
    ),
    "stablelm": Family(
        "stablelm",
        "StableLmForCausalLM",
        _stablelm,
        eps="layer_norm_eps",
        eps_entry=NORM_EPS,
        is_partly_rotated=True,
    ),
    "starcoder2": Family("starcoder2", "Starcoder2ForCausalLM", eps="norm_epsilon", eps_entry=NORM_EPS),
    "glm4moe": Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _glm4_moe,
        has_head_dim=True,
        is_partly_rotated=True,
        renamed=ROUTER_BIAS,
    ),
    "deepseek2": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _deepseek2,
        idle=frozenset(("attention.key_length", "attention.value_length")),  # of latents
        has_own_heads=True,
        renamed=ROUTER_BIAS,
        orders=lambda _: {
            "attn_kv_b": {_KV: None},
            "attn_k_b": {f"{_KV}.{OF_HEADS[0]}": None},
            "attn_v_b": {f"{_KV}.{OF_HEADS[1]}": None},
        },
    ),
}
"""Keys are llama.cpp's names of architectures; those of `hybrids` follow."""
