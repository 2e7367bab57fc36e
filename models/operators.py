"""A layer's operators between its matmuls, in torch.

`engine.kernels.dispatch` offers the same functions as single kernels; both modules implement `Operators`.
They compute in float32 and round to the dtype at the points where training rounds, so 16-bit logits agree
with the reference. They never synchronise with the host, and no shape depends on values: CUDA graphs can
capture them.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from neo_desktop.models import expert_operators, recurrent
from neo_desktop.models.expert_operators import ExpertScratch
from neo_desktop.models.linear.stacked import StackedExperts

choose_experts = expert_operators.choose_experts
multiply_experts = expert_operators.multiply_experts
scan_state = recurrent.scan_state
short_convolution = recurrent.short_convolution


NO_TOKEN = -1  # replaces a token if the logits are not finite


class Store(NamedTuple):
    """Destination of a layer's keys and values; see `rope_append`."""

    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor


class Operators(Protocol):
    """Operators between the matmuls: this module, whose functions describe them, or the engine's kernels."""

    @property
    def add_rms_norm(self) -> Callable[[Tensor, Tensor, Tensor, float, Tensor], None]: ...
    @property
    def rope(self) -> Callable[[Tensor, Tensor, Tensor, int, Tensor | None, float], None]: ...
    @property
    def rope_append(
        self,
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, float], None]: ...
    @property
    def write_rows(self) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]: ...
    @property
    def silu_mul(self) -> Callable[[Tensor, Tensor], None]: ...
    @property
    def choose_tokens(self) -> Callable[[Tensor, Tensor], None]: ...
    @property
    def choose_experts(self) -> Callable[[Tensor, bool, Tensor, Tensor], None]: ...
    @property
    def multiply_experts(
        self,
    ) -> Callable[[StackedExperts, Tensor, Tensor, Tensor, ExpertScratch, Tensor, bool], None]: ...
    @property
    def scan_state(self) -> Callable[..., None]: ...
    @property
    def short_convolution(self) -> Callable[..., None]: ...


def rotation(
    positions: Tensor, inverse_frequencies: Tensor, attention_factor: float, cos: Tensor, sin: Tensor
) -> None:
    """Compute cos and sin of RoPE (arXiv 2104.09864), the same in all layers.

    The first half of `sin` is negated, so that rotating is `x * cos + (x with its halves swapped) * sin`.

    Args:
        positions: [tokens]
        inverse_frequencies: [head_dim / 2] float32
        attention_factor: on both, see `rope.RopeConfig`.
        cos: [tokens, 1, head_dim] float32, an output; sin is the same.
    """
    angles = (positions.float()[:, None] * inverse_frequencies)[:, None, :]
    half_cos, half_sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    torch.cat((half_cos, half_cos), dim=-1, out=cos)
    torch.cat((-half_sin, half_sin), dim=-1, out=sin)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Add `x` to `residual` in place, and write the RMSNorm of the sum to `out`.

    Rounds the sum, the normalised sum, and its product with the weights. The mean square is that of the
    rounded sum.

    Args:
        x: [tokens, hidden], contiguous, as are residual and out. out may be x.
        weight: [hidden]
    """
    residual.add_(x)
    torch.mul(torch.rms_norm(residual, residual.shape[-1:], eps=eps), weight, out=out)


def rope(qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, qk_norm: Tensor | None, eps: float) -> None:
    """Normalise (if asked) and rotate queries and keys of `qkv` in place; see `rope_append`."""
    head_dim = cos.shape[-1]
    query_key = qkv.view(len(qkv), -1, head_dim)[:, :-kv_heads]
    heads = query_key
    if qk_norm is not None:
        heads = torch.rms_norm(query_key, (head_dim,), eps=eps) * qk_norm
    swapped = heads.roll(head_dim // 2, dims=-1)
    torch.add(heads * cos, swapped * sin, out=query_key)


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
    """Normalise (if asked) and rotate queries and keys of `qkv` in place; store keys and values in the cache.

    Rounds the normalised head, its product with the weights, and the rotated head.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim], queries, keys, values; each token contiguous.
        cos: [tokens, 1, head_dim] float32, contiguous; sin is the same. See `rotation`.
        slots: [tokens] int32 or int64: block * block_size + offset, distinct; negative: not stored. Negative
            are the padding of a batch and tokens with KV in host memory.
        k_cache: [num_blocks, block_size, kv_heads, head_dim], in qkv's dtype; v_cache has the same shape and
            strides. Only the dimensions of a head must be contiguous.
        qk_norm: [heads + kv_heads, head_dim], contiguous: weights of an RMSNorm per head before the rotation.
    """
    rope(qkv, cos, sin, k_cache.shape[2], qk_norm, eps)
    append(qkv, slots, k_cache, v_cache)


def append(qkv: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Store keys and values of `qkv` in the cache; see `rope_append`."""
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    write_rows(heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:], k_cache, v_cache, slots)


def choose_tokens(logits: Tensor, out: Tensor) -> None:
    """Write the most probable tokens of logits [rows, vocab] to `out` [rows] int64, or `NO_TOKEN`."""
    largest, tokens = logits.max(dim=-1)
    out.copy_(torch.where(largest.isfinite(), tokens, NO_TOKEN))


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Write `silu(gate) * up` to `out` (SwiGLU).

    Rounds silu(gate), and its product with up.

    Args:
        gate_up: [tokens, 2 * intermediate], gates, then ups; contiguous. The gates may be overwritten.
        out: [tokens, intermediate], contiguous.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(silu(gate, inplace=True), up, out=out)


def write_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Copy rows to slots of the caches.

    Args:
        k: [tokens, kv_heads, head_dim], each token contiguous, as is v. Tokens may be strided.
        k_cache: [num_blocks, block_size, kv_heads, head_dim]; v_cache is the same.
        slots: [tokens] int32 or int64, distinct: block * block_size + offset; negative: the row is skipped.
    """
    if not len(slots):
        return
    # Filtering the skipped rows would need their count on the host. Instead they repeat the first row that is
    # copied; if no row is copied, they write a slot's own content back to it.
    belongs = slots >= 0
    any_belongs = belongs.any()
    first = belongs.int().argmax().view(1)
    target = torch.where(belongs, slots, slots.index_select(0, first).clamp_min(0)).long()
    place = _place(k_cache, target)
    keep = belongs.view(-1, 1, 1)
    for rows, cache in ((k, k_cache), (v, v_cache)):
        other = torch.where(any_belongs, rows.index_select(0, first), cache[_place(cache, target[:1])])
        cache.index_put_(place, torch.where(keep, rows, other))


def read_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Copy slots of the caches to `k` and `v`; arguments as in `write_rows`, but slots may repeat."""
    if not len(slots):
        return
    place = _place(k_cache, slots.clamp_min(0).long())
    is_read = (slots >= 0).view(-1, 1, 1)
    for rows, cache in ((k, k_cache), (v, v_cache)):
        rows.copy_(torch.where(is_read, cache[place], rows))


def _place(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks, and offsets in them, of slots >= 0."""
    block_size = cache.shape[1]
    return slots // block_size, slots % block_size
