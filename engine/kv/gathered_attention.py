"""Decode attention over a paged KV cache in plain torch, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

GATHERED_TOKENS = 8192  # whose KV is brought together at once, unless one request has more


def gathered_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend from one new token per request to its whole context.

    Copies the KV of some requests together, attends, goes on with the next ones.

    Args:
        q: [requests, heads, head_dim]
        k_cache: [num_blocks, block_size, kv_heads, head_dim]; v_cache likewise.
        block_tables: [requests, max_blocks] int32
        context_lens: [requests] int32
        scale: the factor on q·k.
        window: how many of the last tokens are attended to; None: all.

    Returns:
        [requests, heads, head_dim]
    """
    num_slots = block_tables.shape[1] * k_cache.shape[1]  # of each request: those of the longest one
    num_at_once = max(GATHERED_TOKENS // num_slots, 1)
    parts = (torch.split(tensor, num_at_once) for tensor in (q, block_tables, context_lens))
    return torch.cat(
        [
            _gathered_attention(part, k_cache, v_cache, tables, lens, scale, window)
            for part, tables, lens in zip(*parts, strict=True)
        ]
    )


def _gathered_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    num_requests, max_blocks = block_tables.shape
    positions = torch.arange(max_blocks * k_cache.shape[1], device=q.device)
    mask = positions < context_lens.unsqueeze(1)
    if window is not None:
        mask &= positions >= context_lens.unsqueeze(1) - window

    def context(cache: Tensor) -> Tensor:  # [requests, kv_heads, max_tokens, head_dim]
        tokens = cache[block_tables.flatten().long()].view(num_requests, -1, *cache.shape[2:])
        # Never-written memory may hold anything, and 0 * nan is nan.
        return tokens.masked_fill_(~mask[:, :, None, None], 0.0).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        q.unsqueeze(2),
        context(k_cache),
        context(v_cache),
        attn_mask=mask[:, None, None, :],
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(2)
