"""Decode attention over a paged KV cache by torch, piece by piece with a running softmax.

A piece is the same number of tokens of every request, copied out of the cache in fp32:

    top        the largest score so far
    total      sum(exp(score - top))
    weighted   sum(exp(score - top) * v), and at the end `weighted / total` is the answer

How many pieces there are follows from shapes alone: a request takes the time of the longest context that its
row of the tables has room for.
"""

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20  # of K and V in fp32: enough work for a launch, little beside a model


def num_pieces(requests: int, kv_heads: int, head_dim: int, max_tokens: int) -> int:
    """Return how many pieces contexts are cut into; each takes about 20 launches.

    Args:
        requests: in the batch, padding included.
        kv_heads: of the model.
        head_dim: likewise.
        max_tokens: that a request may attend to: what a table has room for, or the window if that is less.
    """
    return -(-max_tokens // _piece_tokens(requests, kv_heads, head_dim))


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    out: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """Attend from one new token per request to its whole context, whose KV is in the cache already.

    Requests with a context of 0 tokens get zeros: the padding of a batch. What lies beyond a context, in
    tables and in the cache, does not matter.

    Args:
        q: [requests, heads, head_dim], fp16, fp32 or (from 8.0 on) bf16; the heads of a token contiguous.
        k_cache: [num_blocks, block_size, kv_heads, head_dim], of q's dtype; v_cache likewise, with the
            same strides. Any will do with which the dimensions of a head are contiguous.
        block_tables: [requests, max_blocks] int32, contiguous.
        context_lens: [requests] int32, the new token included.
        out: as q.
        partial_out: [requests, heads, num_splits, head_dim] fp32, contiguous: workspace of Triton's
            kernel, with any content; for one split [0, heads, 1, head_dim] will do.
        partial_lse: [requests, heads, num_splits] fp32, contiguous: likewise.
        scale: the factor on q·k.
        window: how many of the last tokens are attended to; None: all.
        sinks: [heads] fp32: the score of one more token for each head, whose value is zero; None: there is
            no such token.
        softcap: the score s of each other token becomes softcap * tanh(s / softcap); None: it does not.
    """
    requests, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    max_tokens = block_tables.shape[1] * block_size
    if window is not None:
        max_tokens = min(max_tokens, window)
    queries = q.float().view(requests, kv_heads, heads // kv_heads, head_dim) * scale
    ends = context_lens.long().view(-1, 1)
    begins = (ends - max_tokens).clamp_min(0)

    lowest = torch.finfo(torch.float32).min
    top = queries.new_full((requests, kv_heads, heads // kv_heads, 1), lowest)
    total = torch.zeros_like(top)
    weighted = torch.zeros_like(queries)
    piece = _piece_tokens(requests, kv_heads, head_dim)
    for start in range(0, max_tokens, piece):
        offsets = torch.arange(start, min(start + piece, max_tokens), device=q.device)
        positions = begins + offsets
        beyond = positions >= ends
        # Beyond a context may be anything, in tables and in the cache: block 0 is read, and does not count.
        positions = positions.masked_fill(beyond, 0)
        blocks = block_tables.gather(1, positions // block_size).long().masked_fill(beyond, 0)
        place = blocks, positions % block_size
        keys, values = (cache[place].float().transpose(1, 2) for cache in (k_cache, v_cache))
        values = values.masked_fill(beyond[:, None, :, None], 0.0)  # 0 * nan is nan

        hidden = beyond[:, None, None, :]
        scores = queries @ keys.transpose(2, 3)
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(hidden, lowest)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = (scores - new_top).exp().masked_fill(hidden, 0.0)
        decay = (top - new_top).exp()
        total = total * decay + weights.sum(-1, keepdim=True)
        weighted = weighted * decay + weights @ values
        top = new_top
    if sinks is not None:
        total = total + (sinks.view(1, kv_heads, -1, 1) - top).exp()
    is_padding = (ends == 0).view(-1, 1, 1, 1)
    out.copy_((weighted / total).masked_fill(is_padding, 0.0).view(out.shape))


def _piece_tokens(requests: int, kv_heads: int, head_dim: int) -> int:
    """Return the tokens of each request in a piece."""
    return max(1, PIECE_BYTES // (2 * requests * kv_heads * head_dim * torch.float32.itemsize))
