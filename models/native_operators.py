"""A layer's operators between its matmuls on a CPU, by the native kernels.

The module implements `operators.Operators`; `operators` documents the functions.
"""

from torch import Tensor

from neo_desktop import native
from neo_desktop.models.operators import choose_experts, multiply_experts, write_rows

__all__ = [
    "add_rms_norm",
    "choose_experts",
    "multiply_experts",
    "rope",
    "rope_append",
    "silu_mul",
    "write_rows",
]

add_rms_norm = native.add_rms_norm
silu_mul = native.silu_mul


def rope(qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, qk_norm: Tensor | None, eps: float) -> None:
    """Normalise (if asked) and rotate queries and keys of `qkv` in place."""
    heads = qkv.view(len(qkv), -1, cos.shape[-1])[:, :-kv_heads]
    native.rope(heads, cos[:, 0], sin[:, 0], qk_norm, eps)


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qk_norm: Tensor | None,
    eps: float,
) -> None:
    """Rotate as `rope` does, and store keys and values in the cache."""
    kv_heads, head_dim = k_cache.shape[2:]
    rope(qkv, cos, sin, kv_heads, qk_norm, eps)
    heads = qkv.view(len(qkv), -1, head_dim)
    write_rows(heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:], k_cache, v_cache, slots)
