"""Attention by its definition, in float64."""

import torch
from torch import Tensor


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from the last `len(q)` tokens of one context, each up to itself; [queries, heads, head_dim].

    Keys and values are [context, kv_heads, head_dim]; with a window each query sees that many tokens.
    Sinks [heads] are the scores of one more token, whose value is zero. With a softcap, a score s of any
    other token becomes softcap * tanh(s / softcap).
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    positions = torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
    past = torch.arange(len(k)).unsqueeze(0)
    hidden = past > positions
    if window is not None:
        hidden |= past <= positions - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[:, :, : len(k)], values)
