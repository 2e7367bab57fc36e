"""Hybrids of attention and recurrent layers in GGUF files: metadata → config.json, and the order of rows."""

from dataclasses import replace

import torch
from torch import Tensor

from neo_desktop.models import limits
from neo_desktop.models.gguf.entries import NORM_EPS, Entries
from neo_desktop.models.gguf.family import (
    FULL,
    ROUTER_BIAS,
    SIGMOID,
    Family,
    Orders,
    Values,
    experts,
    routed,
    scales,
    unknown_router,
)
from neo_desktop.models.json_file import ModelError

_LINEAR = "linear_attention"
_SHARED_WIDTH = "expert_shared_feed_forward_length"


def _delta(own: Entries) -> Values:
    """Layers of Qwen3.5 and Qwen3-Next are recurrent by the file, or else all but the last in a period."""
    if "attention.recurrent_layers" in own:
        is_recurrent = own.per_layer("attention.recurrent_layers")
    else:
        period = own.integer("full_attention_interval", 4)
        is_recurrent = [(layer + 1) % period for layer in range(own.num_layers)]
    heads, head_dim = _heads(own)
    return {
        "layer_types": [_LINEAR if recurrent else FULL for recurrent in is_recurrent],
        "linear_conv_kernel_dim": own.integer("ssm.conv_kernel"),
        "linear_key_head_dim": own.integer("ssm.state_size"),
        "linear_num_key_heads": own.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": head_dim,
    }


def _delta_moe(own: Entries) -> Values:
    return {
        **_delta(own),
        **experts(own, "num_experts"),
        "shared_expert_intermediate_size": own.integer(_SHARED_WIDTH),
    }


def _lfm2(own: Entries) -> Values:
    """Layers without KV heads are short convolutions."""
    return {
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted size
        "conv_L_cache": own.integer("shortconv.l_cache"),
        "conv_bias": own.has(".shortconv.conv.bias"),
        "layer_types": [FULL if heads else "conv" for heads in own.per_layer("attention.head_count_kv")],
    }


def _lfm2_moe(own: Entries) -> Values:
    if own.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise unknown_router(own)
    return {
        **_lfm2(own),
        **experts(own, "num_experts"),
        "num_dense_layers": own.integer("leading_dense_block_count", 0, minimum=0),
        "use_expert_bias": own.has(".exp_probs_b.bias"),
    }


def _nemotron_h(own: Entries) -> Values:
    """A layer is attention, an MLP or Mamba-2: the first has KV heads, the second a width."""
    kv_heads, widths = own.per_layer("attention.head_count_kv"), own.per_layer("feed_forward_length")
    heads, head_dim = _heads(own)
    return {
        "layers_block_type": [
            FULL if kv else "mlp" if width else _LINEAR for kv, width in zip(kv_heads, widths, strict=True)
        ],
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": own.integer("ssm.state_size"),
        "n_groups": own.integer("ssm.group_count"),
        "conv_kernel": own.integer("ssm.conv_kernel"),
        "use_conv_bias": own.has(".ssm_conv1d.bias"),
        "mamba_proj_bias": own.has(".ssm_in.bias"),
        "attention_bias": own.has(".attn_q.bias"),
        "mlp_bias": own.has(".ffn_up.bias"),
    }


def _nemotron_h_moe(own: Entries) -> Values:
    """A layer with a width, but no KV heads, is a mixture of experts, which may read a narrower state."""
    values = _nemotron_h(own)
    return {
        **values,
        **routed(own),
        "layers_block_type": ["moe" if kind == "mlp" else kind for kind in values["layers_block_type"]],
        "moe_shared_expert_intermediate_size": own.integer(_SHARED_WIDTH),
        "moe_latent_size": own.integer("moe_latent_size", 0, minimum=0) or None,
    }


def _granite_hybrid(own: Entries) -> Values:
    """Layers without KV heads are Mamba-2; `rope.scaling.finetuned` says that RoPE is used."""
    width = _SHARED_WIDTH if _SHARED_WIDTH in own else "feed_forward_length"
    return {
        **_mamba(own),
        **scales(own),
        "mamba_expand": own.integer("ssm.inner_size") // own.hidden_size,
        "layer_types": [FULL if heads else _LINEAR for heads in own.per_layer("attention.head_count_kv")],
        "position_embedding_type": "rope" if own.boolean("rope.scaling.finetuned", True) else None,
        "num_local_experts": own.integer("expert_count", 0, minimum=0),
        "num_experts_per_tok": own.integer("expert_used_count", 0, minimum=0),
        "shared_intermediate_size": own.integer(width),
    }


def _falcon_h1(own: Entries) -> Values:
    """The converter multiplies weights by Falcon's factors, so all of them are one."""
    return {
        **_mamba(own),
        "mamba_d_ssm": own.integer("ssm.inner_size"),
        "mamba_rms_norm": own.has(".ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _mamba(own: Entries) -> Values:
    heads, head_dim = _heads(own)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": own.integer("ssm.state_size"),
        "mamba_n_groups": own.integer("ssm.group_count"),
        "mamba_d_conv": own.integer("ssm.conv_kernel"),
        "mamba_conv_bias": own.has(".ssm_conv1d.bias"),
    }


def _heads(own: Entries) -> tuple[int, int]:
    """Return number and size of recurrent heads. Raise ModelError if they do not divide the layer's width."""
    heads = own.integer("ssm.time_step_rank")
    width = own.integer("ssm.inner_size")
    if width % heads or width // heads > limits.MAX_HEAD_DIM:
        raise ModelError(f"{own.path} has an ssm.inner_size of {width} for {heads} heads: download it again.")
    return heads, width // heads


def _tiled_orders(values: Values) -> Orders:
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


def _split_orders(values: Values) -> Orders:
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


def _delta_sizes(values: Values) -> tuple[int, int, int, int]:
    """Return key heads, value heads per key head, a value head's size, and rows of queries and keys."""
    key_heads = values["linear_num_key_heads"]
    per_key = values["linear_num_value_heads"] // key_heads
    keys = 2 * key_heads * values["linear_key_head_dim"]
    return key_heads, per_key, values["linear_value_head_dim"], keys


def _transposed_inputs(values: Values) -> tuple[tuple[str, int, int], ...]:
    """Return Qwen3.5's matrices whose columns are sorted like the rows of `_tiled_orders`; see `Source`."""
    key_heads, per_key, _, _ = _delta_sizes(values)
    return () if per_key == 1 else ((".linear_attn.out_proj", key_heads, per_key),)


def _granite_orders(_: Values) -> Orders:
    """Return the dense network's matrices: experts that all tokens use, if there are others."""
    gate, up, down = (
        f"shared_mlp.{end}"
        for end in ("input_linear.weight[0]", "input_linear.weight[1]", "output_linear.weight")
    )
    of_kind = {"ffn_gate": gate, "ffn_up": up, "ffn_down": down}
    return {kind + end: {name: None} for kind, name in of_kind.items() for end in ("", "_shexp")}


_BIAS = {".dt_bias": ".dt_proj.bias"}
_DELTA = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _delta,
    idle=frozenset(("rope.dimension_sections", "full_attention_interval")),
    has_head_dim=True,
    is_partly_rotated=True,
    is_hybrid=True,
    shifts_norms=True,
    renamed=_BIAS,
    orders=_tiled_orders,
    transposed=_transposed_inputs,
)
_DELTA_MOE = replace(
    _DELTA, model_type="qwen3_5_moe_text", architecture="Qwen3_5MoeForCausalLM", values=_delta_moe
)
_NEMOTRON = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    _nemotron_h,
    eps="layer_norm_epsilon",
    eps_entry=NORM_EPS,
    idle=frozenset(("expert_gating_func", "expert_group_count", "expert_group_used_count")),
    has_head_dim=True,
    is_partly_rotated=True,  # no layer rotates, and the entry is hidden size / heads
    rotates_neighbours=True,
    is_hybrid=True,
    renamed={"model.layers.": "backbone.layers."} | _BIAS,
)
HYBRIDS = {
    "qwen35": _DELTA,
    "qwen35moe": _DELTA_MOE,
    # Its layers are Qwen3.5's, after the converter has cut their matrices.
    "qwen3next": replace(
        _DELTA_MOE, architecture="Qwen3NextForCausalLM", orders=_split_orders, transposed=lambda _: ()
    ),
    "lfm2": Family("lfm2", "Lfm2ForCausalLM", _lfm2, eps="norm_eps", is_hybrid=True),
    "lfm2moe": Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _lfm2_moe,
        eps="norm_eps",
        is_hybrid=True,
        renamed={".expert_bias": ".expert_bias.bias"},
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(
        _NEMOTRON, values=_nemotron_h_moe, renamed={**_NEMOTRON.renamed, **ROUTER_BIAS}
    ),
    "granitehybrid": Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _granite_hybrid,
        rotates_neighbours=True,
        is_hybrid=True,
        renamed=_BIAS | {"router.weight": "router.layer.weight"},
        orders=_granite_orders,
    ),
    "falcon-h1": Family(
        "falcon_h1", "FalconH1ForCausalLM", _falcon_h1, has_head_dim=True, is_hybrid=True, renamed=_BIAS
    ),
}
