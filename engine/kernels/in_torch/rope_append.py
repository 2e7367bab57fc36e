"""Rotation of queries and keys, and KV into the paged cache."""

import torch
from torch import Tensor

from neo_desktop.engine.kernels.in_torch.row_copy import write_rows
from neo_desktop.models.layers import Rotary, rms_norm, rotate


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
    """See `dispatch.rope_append`."""
    kv_heads, head_dim = k_cache.shape[2:]
    heads = torch.unflatten(qkv, 1, (-1, head_dim))
    query_key, value = heads[:, :-kv_heads], heads[:, -kv_heads:]
    normed = query_key if qk_norm is None else rms_norm(query_key, qk_norm, eps)
    query_key.copy_(rotate(normed, Rotary(cos, sin)))
    write_rows(query_key[:, -kv_heads:], value, k_cache, v_cache, slots)
