"""Hybrids of attention and recurrent layers in GGUF files: metadata → config.json, and the order of rows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from neo_desktop.models.experts_config import MAX_EXPERTS
from neo_desktop.models.gguf.family import Described, Family, Orders
from neo_desktop.models.json_file import JsonFile, ModelError, UnsupportedModelError
from neo_desktop.models.limits import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_INTERMEDIATE_SIZE,
    MAX_LAYERS,
)

_LINEAR, _FULL = "linear_attention", "full_attention"
SIGMOID = 2  # llama.cpp's number of a router's function
_STATES = frozenset(
    f"ssm.{key}" for key in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
)
EXPERTS = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length"))
ROUTED = EXPERTS | {
    *("leading_dense_block_count", "nextn_predict_layers", "expert_shared_count", "expert_gating_func"),
    *("expert_weights_scale", "expert_weights_norm", "expert_group_count", "expert_group_used_count"),
}
_SHARED = EXPERTS | {"expert_shared_feed_forward_length"}
_SCALES = frozenset(("attention.scale", "embedding_scale", "residual_scale", "logit_scale"))
_LAYERS = frozenset(("full_attention_interval", "attention.recurrent_layers", "nextn_predict_layers"))
_DELTA_KEYS = _STATES | _LAYERS | {"rope.dimension_sections"}
_DELTA_MOE_KEYS = _DELTA_KEYS | _SHARED
_LFM2_KEYS = frozenset(("shortconv.l_cache",))
_LFM2_MOE_KEYS = _LFM2_KEYS | EXPERTS | {"leading_dense_block_count", "expert_gating_func"}
_MAMBA_KEYS = _STATES
# Converters write one of two epsilons, or both.
_NEMOTRON_KEYS = _STATES | {
    "attention.layer_norm_rms_epsilon",
    "rope.scaling.finetuned",
    "expert_group_count",
    "expert_group_used_count",
}
_NEMOTRON_MOE_KEYS = _NEMOTRON_KEYS | ROUTED | {"expert_shared_feed_forward_length", "moe_latent_size"}
_GRANITE_KEYS = _STATES | _SHARED | _SCALES | {"rope.scaling.finetuned"}

PREDICTS_MORE = "nextn_predict_layers"


def _delta(described: Described) -> dict[str, Any]:
    """Return the values of Qwen3.5 and Qwen3-Next; layers are recurrent if the file says so, or all but the
    last in a period.
    """
    own, layers = described.own, described.values["num_hidden_layers"]
    if "attention.recurrent_layers" in own:
        is_recurrent = described.per_layer("attention.recurrent_layers")
    else:
        period = own.integer("full_attention_interval", 4, maximum=MAX_LAYERS)
        is_recurrent = [(layer + 1) % period for layer in range(layers)]
    heads, head_dim = _heads(own)
    return {
        "layer_types": [_LINEAR if recurrent else _FULL for recurrent in is_recurrent[:layers]],
        "linear_conv_kernel_dim": own.integer("ssm.conv_kernel", maximum=MAX_HEAD_DIM),
        "linear_key_head_dim": own.integer("ssm.state_size", maximum=MAX_HEAD_DIM),
        "linear_num_key_heads": own.integer("ssm.group_count", maximum=MAX_HEADS),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": head_dim,
    }


def _delta_moe(described: Described) -> dict[str, Any]:
    own = described.own
    return _delta(described) | {
        **experts(own, "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "shared_expert_intermediate_size": own.integer(
            "expert_shared_feed_forward_length", maximum=MAX_INTERMEDIATE_SIZE
        ),
    }


def _lfm2(described: Described) -> dict[str, Any]:
    """Layers without KV heads are short convolutions."""
    return {
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted size
        "conv_L_cache": described.own.integer("shortconv.l_cache", maximum=MAX_HEAD_DIM),
        "conv_bias": described.has(".shortconv.conv.bias"),
        "layer_types": [
            _FULL if heads else "conv" for heads in described.per_layer("attention.head_count_kv")
        ],
    }


def _lfm2_moe(described: Described) -> dict[str, Any]:
    own = described.own
    if own.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise UnsupportedModelError(f"{own.path} sets expert_gating_func to a value that is not supported.")
    return _lfm2(described) | {
        **experts(own, "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "num_dense_layers": own.integer("leading_dense_block_count", 0, minimum=0, maximum=MAX_LAYERS),
        "use_expert_bias": described.has(".exp_probs_b.bias"),
    }


def _nemotron_h(described: Described) -> dict[str, Any]:
    """A layer is attention, an MLP or Mamba-2: the first has KV heads, the second a width."""
    own = described.own
    layers = zip(
        described.per_layer("attention.head_count_kv"),
        described.per_layer("feed_forward_length"),
        strict=True,
    )
    heads, head_dim = _heads(own)
    return {
        "layers_block_type": [_FULL if kv else "mlp" if width else _LINEAR for kv, width in layers],
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": own.integer("ssm.state_size", maximum=MAX_HEAD_DIM),
        "n_groups": own.integer("ssm.group_count", maximum=MAX_HEADS),
        "conv_kernel": own.integer("ssm.conv_kernel", maximum=MAX_HEAD_DIM),
        "use_conv_bias": described.has(".ssm_conv1d.bias"),
        "mamba_proj_bias": described.has(".ssm_in.bias"),
        "attention_bias": described.has(".attn_q.bias"),
        "mlp_bias": described.has(".ffn_up.bias"),
    }


def _nemotron_h_moe(described: Described) -> dict[str, Any]:
    """A layer with a width, but no KV heads, is a mixture of experts, which may read a narrower state."""
    own = described.own
    values = _nemotron_h(described)
    kinds = ["moe" if kind == "mlp" else kind for kind in values["layers_block_type"]]
    latent = own.integer("moe_latent_size", 0, minimum=0, maximum=MAX_HIDDEN_SIZE)
    return values | {
        **routed(described),
        "layers_block_type": kinds,
        "moe_shared_expert_intermediate_size": own.integer(
            "expert_shared_feed_forward_length", maximum=MAX_INTERMEDIATE_SIZE
        ),
        "moe_latent_size": latent or None,
    }


def _granite_hybrid(described: Described) -> dict[str, Any]:
    """Layers without KV heads are Mamba-2; `rope.scaling.finetuned` says that RoPE is used."""
    own = described.own
    kv_heads = described.per_layer("attention.head_count_kv")
    experts = own.integer("expert_count", 0, minimum=0, maximum=MAX_EXPERTS)
    width = "expert_shared_feed_forward_length"
    return {
        **_mamba(described),
        "mamba_expand": own.integer("ssm.inner_size") // described.values["hidden_size"],
        "layer_types": [_FULL if heads else _LINEAR for heads in kv_heads],
        "position_embedding_type": "rope" if own.boolean("rope.scaling.finetuned", True) else None,
        "num_local_experts": experts,
        "num_experts_per_tok": own.integer("expert_used_count", 0, minimum=0, maximum=MAX_EXPERTS),
        "shared_intermediate_size": own.integer(
            width if width in own else "feed_forward_length", maximum=MAX_INTERMEDIATE_SIZE
        ),
        "attention_multiplier": own.number("attention.scale", described.head_dim**-0.5),
        "embedding_multiplier": own.number("embedding_scale", 1.0),
        "residual_multiplier": own.number("residual_scale", 1.0),
        "logits_scaling": own.number("logit_scale", 1.0),
    }


def _falcon_h1(described: Described) -> dict[str, Any]:
    """The converter multiplies weights by Falcon's factors, so all of them are one."""
    return {
        **_mamba(described),
        "mamba_d_ssm": described.own.integer("ssm.inner_size"),
        "mamba_rms_norm": described.has(".ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _mamba(described: Described) -> dict[str, Any]:
    own = described.own
    heads, head_dim = _heads(own)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": own.integer("ssm.state_size", maximum=MAX_HEAD_DIM),
        "mamba_n_groups": own.integer("ssm.group_count", maximum=MAX_HEADS),
        "mamba_d_conv": own.integer("ssm.conv_kernel", maximum=MAX_HEAD_DIM),
        "mamba_conv_bias": described.has(".ssm_conv1d.bias"),
    }


def _heads(own: JsonFile) -> tuple[int, int]:
    """Return number and size of recurrent heads. Raise ModelError if they do not divide the layer's width."""
    heads = own.integer("ssm.time_step_rank", maximum=MAX_HEADS)
    width = own.integer("ssm.inner_size", maximum=MAX_HEADS * MAX_HEAD_DIM)
    if width % heads or width // heads > MAX_HEAD_DIM:
        raise ModelError(f"{own.path} has an ssm.inner_size of {width} for {heads} heads: download it again.")
    return heads, width // heads


def routed(described: Described) -> dict[str, Any]:
    """Return the values of routers that choose among groups of experts, and of experts for all tokens."""
    own = described.own

    def count(key: str, default: int) -> int:
        return own.integer(key, default, minimum=0, maximum=MAX_EXPERTS) or default

    return {
        **experts(own, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "n_shared_experts": own.integer("expert_shared_count", maximum=MAX_EXPERTS),
        "first_k_dense_replace": own.integer("leading_dense_block_count", 0, minimum=0, maximum=MAX_LAYERS),
        "routed_scaling_factor": own.number("expert_weights_scale", 1.0, allow_zero=True) or 1.0,
        "norm_topk_prob": own.boolean("expert_weights_norm", False),
        "n_group": count("expert_group_count", 1),
        "topk_group": count("expert_group_used_count", 1),
    }


def experts(own: JsonFile, count: str, per_token: str, width: str) -> dict[str, int]:
    """Return the numbers of experts and their width, under three keys of config.json."""
    return {
        count: own.integer("expert_count", maximum=MAX_EXPERTS),
        per_token: own.integer("expert_used_count", maximum=MAX_EXPERTS),
        width: own.integer("expert_feed_forward_length", maximum=MAX_INTERMEDIATE_SIZE),
    }


def decay_logarithm(stored: Tensor) -> Tensor:
    """Return A_log of the stored -exp(A_log)."""
    return torch.log(-stored)


def _tiled_orders(values: Mapping[str, Any]) -> Orders:
    """Return the rows of Qwen3.5's value heads; the converter sorts them by their number within a key head.

    The columns of `out_proj` stay in the file's order, see `_transposed_inputs`.
    """
    key_heads, per_key, head_dim, keys = _delta_sizes(values)
    heads = torch.arange(key_heads * per_key).view(per_key, key_heads).t().flatten()
    rows = (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()
    mixed = torch.cat((torch.arange(keys), keys + rows))
    of_layer = {
        "attn_qkv": ("in_proj_qkv.weight", mixed),
        "attn_gate": ("in_proj_z.weight", rows),
        "ssm_alpha": ("in_proj_a.weight", heads),
        "ssm_beta": ("in_proj_b.weight", heads),
        "ssm_conv1d": ("conv1d.weight", mixed),
        "ssm_a": ("A_log", heads),
        "ssm_dt": ("dt_bias", heads),
    }
    is_sorted = per_key == 1
    return {
        kind: {f"linear_attn.{end}": None if is_sorted else order} for kind, (end, order) in of_layer.items()
    }


def _split_orders(values: Mapping[str, Any]) -> Orders:
    """Return the rows of Qwen3-Next's matrices, which transformers has in the form of Qwen3.5.

    The converter splits one matrix; older files have the whole matrix, as `ssm_in`. Its rows are grouped by
    key heads.
    """
    key_heads, per_key, head_dim, keys = _delta_sizes(values)

    def in_groups(*widths: int) -> list[Tensor]:
        rows = torch.arange(key_heads * sum(widths)).view(key_heads, sum(widths))
        return [part.flatten() for part in torch.split(rows, list(widths), dim=1)]

    b, a = in_groups(per_key, per_key)
    key_dim = keys // key_heads // 2
    q, k, v, z = in_groups(key_dim, key_dim, per_key * head_dim, per_key * head_dim)
    qkv, gate = "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"
    return {
        "attn_qkv": {qkv: None},
        "attn_gate": {gate: None},
        "ssm_in": {qkv: torch.cat((q, k, v)), gate: z},
        "ssm_ba": {"linear_attn.in_proj_b.weight": b, "linear_attn.in_proj_a.weight": a},
    }


def _delta_sizes(values: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return key heads, value heads per key head, a value head's size, and rows of queries and keys."""
    key_heads = values["linear_num_key_heads"]
    per_key = values["linear_num_value_heads"] // key_heads
    keys = 2 * key_heads * values["linear_key_head_dim"]
    return key_heads, per_key, values["linear_value_head_dim"], keys


def _transposed_inputs(values: Mapping[str, Any]) -> tuple[tuple[str, int, int], ...]:
    """Return Qwen3.5's matrices whose columns are sorted like the rows of `_tiled_orders`; see `Source`."""
    key_heads, per_key, _, _ = _delta_sizes(values)
    return () if per_key == 1 else ((".linear_attn.out_proj", key_heads, per_key),)


def _granite_orders(_: Mapping[str, Any]) -> Orders:
    """Return the dense network's matrices: experts that all tokens use, if there are others."""
    gate, up, down = (
        f"shared_mlp.{end}"
        for end in ("input_linear.weight[0]", "input_linear.weight[1]", "output_linear.weight")
    )
    of_kind = {"ffn_gate": gate, "ffn_up": up, "ffn_down": down}
    return {kind + end: {name: None} for kind, name in of_kind.items() for end in ("", "_shexp")}


ROUTER_BIAS = {".e_score_correction_bias": ".e_score_correction.bias"}
_BIAS = {".dt_bias": ".dt_proj.bias"}
_RMS, _EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_DELTA = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    (_RMS, "rms_norm_eps"),
    _delta,
    _DELTA_KEYS,
    has_head_dim=True,
    is_partly_rotated=True,
    shifts_norms=True,
    is_hybrid=True,
    renamed=_BIAS,
    orders=_tiled_orders,
    transposed=_transposed_inputs,
)
_DELTA_MOE = replace(
    _DELTA,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    others=_delta_moe,
    keys=_DELTA_MOE_KEYS,
)
_NEMOTRON = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    (_EPS, "layer_norm_epsilon"),
    _nemotron_h,
    _NEMOTRON_KEYS,
    has_head_dim=True,
    is_partly_rotated=True,  # no layer rotates, and the entry is hidden size / heads
    rotates_neighbours=True,
    renamed={"model.layers.": "backbone.layers."} | _BIAS,
    is_hybrid=True,
)
HYBRIDS = {
    "qwen35": _DELTA,
    "qwen35moe": _DELTA_MOE,
    # Its layers are Qwen3.5's, after the converter has cut their matrices.
    "qwen3next": replace(
        _DELTA_MOE, architecture="Qwen3NextForCausalLM", orders=_split_orders, transposed=lambda _: ()
    ),
    "lfm2": Family("lfm2", "Lfm2ForCausalLM", (_RMS, "norm_eps"), _lfm2, _LFM2_KEYS, is_hybrid=True),
    "lfm2moe": Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        (_RMS, "norm_eps"),
        _lfm2_moe,
        _LFM2_MOE_KEYS,
        renamed={".expert_bias": ".expert_bias.bias"},
        is_hybrid=True,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(
        _NEMOTRON,
        others=_nemotron_h_moe,
        keys=_NEMOTRON_MOE_KEYS,
        renamed={**_NEMOTRON.renamed, **ROUTER_BIAS},
    ),
    "granitehybrid": Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        (_RMS, "rms_norm_eps"),
        _granite_hybrid,
        _GRANITE_KEYS,
        rotates_neighbours=True,
        renamed=_BIAS | {"router.weight": "router.layer.weight"},
        orders=_granite_orders,
        is_hybrid=True,
    ),
    "falcon-h1": Family(
        "falcon_h1",
        "FalconH1ForCausalLM",
        (_RMS, "rms_norm_eps"),
        _falcon_h1,
        _MAMBA_KEYS,
        has_head_dim=True,
        renamed=_BIAS,
        is_hybrid=True,
    ),
}
"""Keys are llama.cpp's names of architectures."""
