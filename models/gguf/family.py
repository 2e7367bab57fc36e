"""GGUF architectures, and the values of config.json that several architectures share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from neo_desktop.models.gguf.entries import RMS_EPS, Entries
from neo_desktop.models.json_file import UnsupportedModelError

Values = dict[str, Any]
"""Of a config.json."""
Orders = Mapping[str, Mapping[str, Tensor | None]]
"""Kind of a tensor -> end of a parameter's name -> its rows in the file; None: all."""
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of a router's function
ROUTER_BIAS = {".e_score_correction_bias": ".e_score_correction.bias"}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """The counterpart in `transformers` of an architecture of llama.cpp.

    Args:
        values: further values of config.json, which may replace the first two.
        eps: the norms' epsilon in config.json.
        eps_entry: the same in the file.
        idle: entries without effect.
        varying: entries that may differ between layers.
        has_head_dim: config.json has the head size; otherwise it follows from other sizes.
        has_own_heads: `values` has all sizes of heads, and RoPE's parameters.
        is_partly_rotated: RoPE may cover only part of a head.
        rotates_neighbours: RoPE pairs neighbouring rows of queries and keys, not those of two halves.
        is_hybrid: some layers have no attention.
        shifts_norms: the converter has added one to the norms' weights, except a state's (`ssm_norm`).
        renamed: text in parameter names -> text in the names that gguf's table has.
        orders: rows of tensors, from config.json's values; see `Orders`.
        transposed: matrices with sorted columns, from the same values; see `Source`.
        unused: names of tensors that the model does not read.
    """

    model_type: str
    architecture: str
    values: Callable[[Entries], Values] = lambda _: {}
    eps: str = "rms_norm_eps"
    eps_entry: str = RMS_EPS
    idle: frozenset[str] = frozenset()
    varying: frozenset[str] = frozenset()
    has_head_dim: bool = False
    has_own_heads: bool = False
    is_partly_rotated: bool = False
    rotates_neighbours: bool = False
    is_hybrid: bool = False
    shifts_norms: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    orders: Callable[[Values], Orders] = lambda _: {}
    transposed: Callable[[Values], tuple[tuple[str, int, int], ...]] = lambda _: ()
    unused: Callable[[Values], frozenset[str]] = lambda _: frozenset()


def yarn(own: Entries) -> Values:
    """Return RoPE's parameters: scaled by YaRN, or not scaled."""
    rope = own.rope("yarn")
    if rope["rope_type"] == "yarn":
        if "rope.scaling.yarn_attn_factor" in own:
            rope["attention_factor"] = own.number("rope.scaling.yarn_attn_factor")
        if "rope.scaling.yarn_log_multiplier" in own:
            # llama.cpp also knows no other factor of rotations than 1 here.
            factor = round(10 * own.number("rope.scaling.yarn_log_multiplier"), 6)
            rope |= {"mscale": factor, "mscale_all_dim": factor}
    return rope


def scales(own: Entries) -> Values:
    """Return Granite's factors."""
    return {
        "attention_multiplier": own.number("attention.scale", own.head_dim**-0.5),
        "embedding_multiplier": own.number("embedding_scale", 1.0),
        "residual_multiplier": own.number("residual_scale", 1.0),
        "logits_scaling": own.number("logit_scale", 1.0),
    }


def unknown_router(own: Entries) -> UnsupportedModelError:
    """Return an error: the router's function is not supported."""
    return UnsupportedModelError(f"{own.path} sets expert_gating_func to a value that is not supported.")


def experts(
    own: Entries,
    count: str,
    per_token: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
) -> dict[str, int]:
    """Return the numbers of experts under these keys of config.json, and their width."""
    entry = "expert_feed_forward_length"
    return {
        count: own.integer("expert_count"),
        per_token: own.integer("expert_used_count"),
        width: own.integer(entry if entry in own else "feed_forward_length"),
    }


def routed(own: Entries) -> Values:
    """Return the values of routers that choose among groups of experts, and of experts for all tokens."""

    def count(key: str, default: int) -> int:
        return own.integer(key, default, minimum=0) or default

    return {
        **experts(own, "n_routed_experts"),
        "n_shared_experts": own.integer("expert_shared_count"),
        "first_k_dense_replace": own.integer("leading_dense_block_count", 0, minimum=0),
        "routed_scaling_factor": own.number("expert_weights_scale", 1.0, allow_zero=True) or 1.0,
        "norm_topk_prob": own.boolean("expert_weights_norm", False),
        "n_group": count("expert_group_count", 1),
        "topk_group": count("expert_group_used_count", 1),
    }
