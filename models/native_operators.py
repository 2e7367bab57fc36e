"""A layer's operators between its matmuls on a CPU, by the native kernels.

The module implements `operators.Operators`; `operators` documents the functions.
"""

from torch import Tensor

from neo_desktop import native
from neo_desktop.models import operators
from neo_desktop.models.recurrent import Spans

multiply_experts = operators.multiply_experts
write_rows = operators.write_rows
add_rms_norm = native.add_rms_norm
silu_mul = native.silu_mul
choose_experts = native.choose_experts
choose_tokens = native.choose_tokens


def scan_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    spans: Spans,
    out: Tensor,
    *,
    is_delta: bool,
) -> None:
    """Pass tokens through states, see `recurrent.scan_state`."""
    native.scan_state(q, k, v, decay, beta, state, spans.table, out, is_delta=is_delta)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    spans: Spans,
    out: Tensor,
    *,
    has_silu: bool,
) -> None:
    """Convolve each channel with its last inputs, see `recurrent.short_convolution`."""
    native.short_convolution(x, weight, bias, state, spans.table, out, has_silu=has_silu)


def rope(qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, qk_norm: Tensor | None, eps: float) -> None:
    """Normalise (with `qk_norm`) and rotate queries and keys of `qkv` in place."""
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
    """Rotate and append, see `operators.rope_append`."""
    rope(qkv, cos, sin, k_cache.shape[2], qk_norm, eps)
    operators.append(qkv, slots, k_cache, v_cache)
