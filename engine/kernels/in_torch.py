"""Decode attention over a paged KV cache in torch, piece by piece with a running softmax.

A piece has the same number of tokens for every request, copied out of the cache in fp32:

    top        the largest score so far
    total      sum(exp(score - top))
    weighted   sum(exp(score - top) * v); the output is `weighted / total`

The number of pieces follows from shapes alone: every request takes the time of the longest context that fits
its row of the block tables.
"""

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20  # K and V of a piece in fp32: enough work for a launch, small compared to a model


def num_pieces(requests: int, kv_heads: int, head_dim: int, max_tokens: int) -> int:
    """Return the number of pieces per context; each piece takes about 20 launches.

    Args:
        max_tokens: Most tokens that a request attends to: the room in a block table, or the window if less.
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
    """Attend from one new token per request to its whole context. The cache already has all its KV.

    Requests with a context of 0 tokens, the padding of a batch, get zeros. Content beyond a context, in block
    tables and in the cache, has no influence.

    Args:
        q: [requests, heads, head_dim], fp16, fp32 or (from 8.0 on) bf16; the heads of a token contiguous.
        k_cache: [num_blocks, block_size, kv_heads, head_dim] in q's dtype; `v_cache` has the same shape and
            strides. The dimensions of a head must be contiguous; other strides are arbitrary.
        block_tables: [requests, max_blocks] int32, contiguous.
        context_lens: [requests] int32, the new token included.
        out: Same shape as q.
        partial_out: [requests, heads, num_splits, head_dim] fp32, contiguous: workspace of the Triton kernel,
            uninitialized; for one split, [0, heads, 1, head_dim] suffices.
        partial_lse: [requests, heads, num_splits] fp32, contiguous: workspace like `partial_out`.
        scale: Factor on q·k.
        window: Sliding window in tokens; None: the whole context.
        sinks: [heads] fp32: per head, the score of one more token with a value of zero; None: no sinks.
        softcap: The score s of every other token becomes softcap * tanh(s / softcap); None: no softcap.
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
        # Tables and cache have arbitrary content beyond a context: read block 0 instead, and mask it.
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
    return max(1, PIECE_BYTES // (2 * requests * kv_heads * head_dim * torch.float32.itemsize))
