"""A layer's operators between its matmuls on a CPU, by the native kernels.

The module implements `operators.Operators`; `operators` documents the functions.
"""

from collections.abc import Callable
from typing import Any

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


def _with_spans(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel that takes `Spans` in place of their table."""

    def run(*arguments: Any, **named: Any) -> None:
        kernel(*(each.table if isinstance(each, Spans) else each for each in arguments), **named)

    return run


scan_state = _with_spans(native.scan_state)
short_convolution = _with_spans(native.short_convolution)


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
