"""The parameters of models with recurrent layers as llama.cpp's converter writes them."""

from typing import Any

import torch
from gguf_files import permuted
from torch import Tensor

_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "operator_norm.weight": "attn_norm.weight",
    "norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "pre_ff_layernorm.weight": "ffn_norm",  # without the suffix, indeed
    **{f"self_attn.{each}_proj.weight": f"attn_{each}.weight" for each in "qkv"},
    **{f"mixer.{each}_proj.weight": f"attn_{each}.weight" for each in "qkv"},
    **{f"self_attn.{each}_norm.weight": f"attn_{each}_norm.weight" for each in "qk"},
    **{f"self_attn.{each}_layernorm.weight": f"attn_{each}_norm.weight" for each in "qk"},
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "mixer.o_proj.weight": "attn_output.weight",
    **{f"mlp.{each}_proj.weight": f"ffn_{each}.weight" for each in ("gate", "up", "down")},
    **{f"mixer.{each}_proj.weight": f"ffn_{each}.weight" for each in ("up", "down")},
    **{f"feed_forward.{each}_proj.weight": f"ffn_{each}.weight" for each in ("gate", "up", "down")},
    **{
        f"mlp.shared_expert.{each}_proj.weight": f"ffn_{each}_shexp.weight" for each in ("gate", "up", "down")
    },
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    **{f"mixer.shared_experts.{each}_proj.weight": f"ffn_{each}_shexp.weight" for each in ("up", "down")},
    "mixer.experts.up_proj": "ffn_up_exps.weight",
    "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
    "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "feed_forward.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    **{f"conv.{each}_proj.weight": f"shortconv.{each}_proj.weight" for each in ("in", "out")},
    "conv.conv.weight": "shortconv.conv.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
}
_STATE_NAMES = {
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "norm.weight": "ssm_norm.weight",
    "in_proj.weight": "ssm_in.weight",
    "out_proj.weight": "ssm_out.weight",
}
_OUTSIDE = {
    "embed_tokens.weight": "token_embd.weight",
    "embeddings.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "norm_f.weight": "output_norm.weight",
    "final_layernorm.weight": "output_norm.weight",
    "embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
}


def cut(name: str, x: Tensor, config: Any, architecture: str, *, is_old: bool) -> dict[str, Tensor]:
    """Return the tensors of a parameter, by name; the converter cuts, sorts and reshapes it."""
    if ".layers." not in name:
        return {_OUTSIDE[name.removeprefix("model.")]: x}
    layer, end = name.split(".layers.")[1].split(".", 1)
    block, (module, _, own) = f"blk.{layer}.", end.partition(".")
    of_mlp = _mlp(block, end, x, config)
    if of_mlp is not None:
        return of_mlp
    if own in _STATE_NAMES and module in ("mamba", "linear_attn", "mixer"):
        return {block + _STATE_NAMES[own]: _state(module, own, x, config, architecture)}
    if own == "in_proj_qkvz.weight":
        return _qkvz(block, x, config, is_old=is_old)
    stored = block + _NAMES[end]
    if end == "conv.conv.weight":
        x = x.squeeze(1)
    if end == "post_attention_layernorm.weight" and architecture == "granitehybrid":
        stored = f"{block}ffn_norm.weight"
    if architecture.startswith(("granitehybrid", "nemotron_h")) and own in ("q_proj.weight", "k_proj.weight"):
        heads = config.num_attention_heads if own[0] == "q" else config.num_key_value_heads
        x = permuted(x, len(x) // heads)
    return {stored: _by_number(end, x, config) if architecture.startswith("qwen35") else x}


def _mlp(block: str, end: str, x: Tensor, config: Any) -> dict[str, Tensor] | None:
    """Return the tensors of experts and of Granite's dense network; None: `x` is another parameter."""
    if end.startswith("mixer."):
        return None
    if end.endswith(("experts.gate_up_proj", "block_sparse_moe.input_linear.weight")):
        gate, up = x.chunk(2, dim=1)
        return {f"{block}ffn_gate_exps.weight": gate, f"{block}ffn_up_exps.weight": up}
    if end.endswith(("experts.down_proj", "block_sparse_moe.output_linear.weight")):
        return {f"{block}ffn_down_exps.weight": x}
    if not end.startswith("shared_mlp"):
        return None
    suffix = "_shexp" if config.num_local_experts else ""
    if end.endswith("output_linear.weight"):
        return {f"{block}ffn_down{suffix}.weight": x}
    gate, up = x.chunk(2)
    return {f"{block}ffn_gate{suffix}.weight": gate, f"{block}ffn_up{suffix}.weight": up}


def _state(module: str, own: str, x: Tensor, config: Any, architecture: str) -> Tensor:
    """Return a parameter of a recurrent layer in the file's shape and order."""
    if own in ("A_log", "D") and module != "linear_attn":
        return x[:, None]
    if own == "norm.weight" and module != "linear_attn":
        return x.view(config.n_groups if module == "mixer" else config.mamba_n_groups, -1)
    x = x.squeeze(1) if own == "conv1d.weight" else x
    return _by_number(f"linear_attn.{own}", x, config) if architecture.startswith("qwen35") else x


def _by_number(end: str, x: Tensor, config: Any) -> Tensor:
    """Sort Qwen3.5's value heads by their number in the group of a key head."""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * groups * config.linear_key_head_dim
    if not end.startswith("linear_attn") or end.endswith("norm.weight"):
        return x
    if end.endswith("out_proj.weight"):
        return torch.unflatten(x, 1, (groups, heads // groups, -1)).transpose(1, 2).flatten(1)
    kept, sorted_ = (x[:first], x[first:]) if "qkv" in end or "conv1d" in end else (x[:0], x)
    by_head = torch.unflatten(sorted_, 0, (groups, heads // groups, -1)).transpose(0, 1)
    return torch.cat((kept, by_head.flatten(0, 2)))


def _qkvz(block: str, x: Tensor, config: Any, *, is_old: bool) -> dict[str, Tensor]:
    if is_old:
        return {f"{block}ssm_in.weight": x}
    groups, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    value_dim = config.linear_num_value_heads // groups * config.linear_value_head_dim
    parts = torch.split(torch.unflatten(x, 0, (groups, -1)), [key_dim, key_dim, value_dim, value_dim], dim=1)
    q, k, v, z = (part.flatten(0, 1) for part in parts)
    return {f"{block}attn_qkv.weight": torch.cat((q, k, v)), f"{block}attn_gate.weight": z}


def changed(stored: str, numbers: Tensor, architecture: str) -> Tensor:
    """Return the numbers of a tensor after the converter's function."""
    if stored.endswith(".ssm_a"):
        return -torch.exp(numbers)
    is_shifted = architecture.startswith("qwen3") and stored.endswith("norm.weight")
    return numbers + 1 if is_shifted and not stored.endswith("ssm_norm.weight") else numbers


def factor_of(name: str, config: Any, rows: Tensor) -> Any:
    """Return Falcon-H1's multipliers, which the converter folds into weights.

    Args:
        rows: row of every number.
    """
    if config.model_type != "falcon_h1":
        return 1.0
    module = name.rpartition(".")[0].rpartition(".")[2]
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    ends = torch.tensor([inner, 2 * inner, 2 * inner + state, 2 * inner + 2 * state])
    of_attention = config.attention_in_multiplier
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "q_proj": of_attention,
        "k_proj": of_attention * config.key_multiplier,
        "v_proj": of_attention,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": torch.tensor(config.ssm_multipliers)[torch.bucketize(rows, ends, right=True)]
        * config.ssm_in_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return factors.get(module, 1.0)
