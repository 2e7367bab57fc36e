"""Layers with a state of fixed size per request: linear attention, state-space models, short convolutions.

A state belongs to a slot; slot numbers are the same in all layers. Spans of tokens pass through states, see
`scan_state`. The functions compute in torch, without synchronising with the host, for GPUs without Triton;
`native.recurrent` and `engine.kernels.in_triton.recurrent` have the kernels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu


class Spans(NamedTuple):
    """Tokens that pass through states, in one call of a kernel."""

    table: Tensor  # [n, 4] int32, see `scan_state`
    longest: int  # most tokens of a span


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """The states of a sub-batch's requests.

    Args:
        states: per recurrent operator, [slots, ...] float32.
        passes: spans, in the order of the calls: a later call may read a state that an earlier one wrote.
    """

    states: Sequence[Tensor]
    passes: tuple[Spans, ...]


def fresh_batch(rows: int, shapes: Sequence[tuple[int, ...]], device: torch.device) -> RecurrentBatch:
    """Return the batch of one sequence of `rows` tokens that starts with empty states."""
    table = torch.full((1, 4), -1, dtype=torch.int32, device=device)  # no copy: it may run in a capture
    table[:, 0], table[:, 1] = 0, rows
    return RecurrentBatch([torch.zeros(1, *shape, device=device) for shape in shapes], (Spans(table, rows),))


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
    """Pass tokens through the states of heads: Gated DeltaNet (arXiv:2412.06464), without its rule Mamba-2.

    With S the state of a head, for each token: S = exp(decay) * S; d = beta * (v - S^T k), or beta * v;
    S = S + k d^T; out = S^T q.

    Args:
        q: [tokens, key_heads, key_dim]; k is the same. Neighbouring heads share a key.
        v: [tokens, heads, value_dim]; out is the same.
        decay: [tokens, heads] float32, at most 0; beta: the same.
        state: [slots, heads, key_dim, value_dim] float32; the last slot is scratch.
        spans: rows {first, end, source, target}: a request's tokens `first .. end - 1`, the slot of its state
            before them (-1: zeros) and after them (-1: dropped). Tokens outside the spans are ignored.
    """
    shared, heads = v.shape[1] // k.shape[1], v.shape[1]
    now = _sources(state, spans.table)
    for rows, is_in in _tokens(spans):
        key, query = (x[rows].float().repeat_interleave(shared, 1, output_size=heads) for x in (k, q))
        decayed = now * decay[rows].exp()[:, :, None, None]
        delta = v[rows].float()
        if is_delta:
            delta = delta - torch.einsum("nhkv,nhk->nhv", decayed, key)
        after = decayed + key[..., None] * (delta * beta[rows][..., None])[:, :, None]
        result = torch.einsum("nhkv,nhk->nhv", after, query).to(out.dtype)
        now = torch.where(is_in[:, None, None, None], after, now)
        out[rows] = torch.where(is_in[:, None, None], result, out[rows])
    _keep(now, state, spans.table)


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
    """Convolve each channel with its last inputs, causally; add the bias; apply silu if asked.

    Args:
        x: [tokens, channels]; out is the same.
        weight: [width, channels] float32, oldest input first.
        bias: [channels] float32.
        state: [slots, width - 1, channels] float32: a request's last inputs, oldest first; the last slot is
            scratch.
        spans: as in `scan_state`.
    """
    now = _sources(state, spans.table)
    for rows, is_in in _tokens(spans):
        inputs = torch.cat((now, x[rows].float()[:, None]), dim=1)
        sums = (inputs * weight).sum(1) if bias is None else (inputs * weight).sum(1) + bias
        result = (silu(sums) if has_silu else sums).to(out.dtype)
        now = torch.where(is_in[:, None, None], inputs[:, 1:], now)
        out[rows] = torch.where(is_in[:, None], result, out[rows])
    _keep(now, state, spans.table)


def _sources(state: Tensor, table: Tensor) -> Tensor:
    """Return the states before the spans, [spans, ...]."""
    source = table[:, 2].long()
    is_known = (source >= 0).view(-1, *[1] * (state.dim() - 1))
    return torch.where(is_known, state[source.clamp(min=0)], 0.0)


def _keep(now: Tensor, state: Tensor, table: Tensor) -> None:
    target = table[:, 3].long()
    state[torch.where(target < 0, len(state) - 1, target)] = now


def _tokens(spans: Spans) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows [spans] of the next token of every span, and True for spans that have one."""
    first, end = spans.table[:, 0].long(), spans.table[:, 1].long()
    for step in range(spans.longest):
        is_in = first + step < end
        # Spans are not empty: those without a further token name their own last row.
        yield torch.where(is_in, first + step, end - 1), is_in
