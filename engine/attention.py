"""Attention over the paged KV cache, computed next to the KV.

One layer's attention of one sub-batch. Rows are the tokens of the sub-batch; those of one place are
adjacent, prompts first:

    place 0                              place 1
    | prompt a | prompt b | decodes .... | prompt c | decodes ......... |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from neo_desktop import native
from neo_desktop.engine.batch import ScheduledSequence, SubBatch
from neo_desktop.engine.kv_storage import KVPool, KVStorage


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A prompt chunk: rows of the sub-batch, where its KV lies, and what precedes it."""

    rows: slice
    start: int  # tokens in the cache before this chunk
    context_len: int  # tokens in the cache after it
    block_table: Tensor  # [blocks] int64 on the pool's device


@dataclass(frozen=True, slots=True)
class _PlaceBatch:
    """The sequences of one sub-batch that live in one place."""

    pool: KVPool
    rows: slice
    slots: Tensor  # [rows] int64: block * block_size + offset, where each row's K and V go
    prefills: tuple[_Prefill, ...]
    decode_rows: slice
    block_tables: Tensor  # [decodes, max_blocks] int32, padded with 0
    context_lens: Tensor  # [decodes] int32


class AttentionBatch:
    """The paged attention of one sub-batch; built once, used by every layer."""

    def __init__(self, sub_batch: SubBatch, storage: KVStorage) -> None:
        self._batches: list[_PlaceBatch] = []
        row = 0
        for place, group in groupby(sub_batch.sequences, key=lambda sequence: sequence.place):
            batch = _place_batch(tuple(group), storage[place], row)
            self._batches.append(batch)
            row = batch.rows.stop

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Store K and V of the new tokens, then attend to the whole context of each.

        Args:
            q: [tokens, heads, head_dim]
            k: [tokens, kv_heads, head_dim]
            v: [tokens, kv_heads, head_dim]
            scale: factor on q·k.
            window: each token sees only the last `window` tokens, itself included; None: all.

        Returns:
            [tokens, heads, head_dim] on q's device.
        """
        out = torch.empty_like(q)
        for batch in self._batches:
            k_cache, v_cache = batch.pool.layer(layer)
            _write(k[batch.rows], v[batch.rows], k_cache, v_cache, batch.slots)
            for prefill in batch.prefills:
                out[prefill.rows] = _prefill(prefill, q, k, v, k_cache, v_cache, scale, window)
            if len(batch.context_lens):
                out[batch.decode_rows] = decode_attention(
                    q[batch.decode_rows].to(batch.pool.device),
                    k_cache,
                    v_cache,
                    batch.block_tables,
                    batch.context_lens,
                    scale,
                    window,
                )
        return out


def _place_batch(sequences: Sequence[ScheduledSequence], pool: KVPool, first_row: int) -> _PlaceBatch:
    block_size, device = pool.block_size, pool.device
    ends = list(accumulate((len(sequence.token_ids) for sequence in sequences), initial=first_row))
    slots = [
        sequence.block_table[position // block_size] * block_size + position % block_size
        for sequence in sequences
        for position in range(sequence.start, sequence.context_len)
    ]
    prefills = []
    for sequence, begin, end in zip(sequences, ends, ends[1:], strict=False):
        if not sequence.is_decode:
            used = torch.tensor(sequence.block_table[: -(-sequence.context_len // block_size)], device=device)
            prefills.append(_Prefill(slice(begin, end), sequence.start, sequence.context_len, used))

    decodes = sequences[len(prefills) :]
    if any(not sequence.is_decode for sequence in decodes):
        raise ValueError("a plan must order the prompts of a place before its decodes")
    width = max((len(sequence.block_table) for sequence in decodes), default=0)
    padded = [sequence.block_table + (0,) * (width - len(sequence.block_table)) for sequence in decodes]
    return _PlaceBatch(
        pool=pool,
        rows=slice(first_row, ends[-1]),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        prefills=tuple(prefills),
        decode_rows=slice(ends[len(prefills)], ends[-1]),
        block_tables=torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(decodes), width),
        context_lens=torch.tensor([s.context_len for s in decodes], dtype=torch.int32, device=device),
    )


def _write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Put K and V, [tokens, kv_heads, head_dim], into their slots, wherever the cache is."""
    k, v = k.to(k_cache.device), v.to(v_cache.device)
    if k_cache.device.type == "cpu":
        native.paged_kv_write(k, v, k_cache, v_cache, slots)
        return
    blocks, offsets = slots // k_cache.shape[2], slots % k_cache.shape[2]
    k_cache[blocks, :, offsets] = k
    v_cache[blocks, :, offsets] = v


def _prefill(
    chunk: _Prefill,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend from a prompt chunk to itself and to what precedes it, on q's device."""
    if chunk.start == 0:  # all there is to see was just computed: no need to read it back
        keys, values = k[chunk.rows], v[chunk.rows]
    else:
        keys = gather(k_cache, chunk.block_table, chunk.context_len).to(q.device, q.dtype)
        values = gather(v_cache, chunk.block_table, chunk.context_len).to(q.device, q.dtype)
    return causal_attention(q[chunk.rows], keys, values, scale, window)


def gather(cache: Tensor, block_table: Tensor, num_tokens: int) -> Tensor:
    """Bring the first `num_tokens` tokens of one block table together, [num_tokens, kv_heads, head_dim]."""
    return cache[block_table].transpose(1, 2).flatten(0, 1)[:num_tokens]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend from the last `len(q)` tokens of a context to all tokens up to each of them.

    Args:
        q: [queries, heads, head_dim]
        k: [context, kv_heads, head_dim]
        v: [context, kv_heads, head_dim]
    """
    num_queries, num_keys = len(q), len(k)
    is_whole = num_queries == num_keys and (window is None or window >= num_keys)
    mask = None
    if not is_whole:
        positions = torch.arange(num_keys - num_queries, num_keys, device=q.device).unsqueeze(1)
        keys = torch.arange(num_keys, device=q.device)
        mask = keys <= positions
        if window is not None:
            mask &= keys > positions - window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=is_whole,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend from one new token per request to its whole context, on the cache's device.

    Args:
        q: [requests, heads, head_dim]
        k_cache: [num_blocks, kv_heads, block_size, head_dim]
        v_cache: likewise
        block_tables: [requests, max_blocks] int32
        context_lens: [requests] int32
    """
    if k_cache.device.type == "cpu":
        return native.paged_attention_decode(
            q, k_cache, v_cache, block_tables, context_lens, scale, window=window or 0
        )
    return gathered_decode_attention(q, k_cache, v_cache, block_tables, context_lens, scale, window)


def gathered_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """The same in plain torch, on any device: copies the KV of all requests together, then attends."""
    num_requests, max_blocks = block_tables.shape
    positions = torch.arange(max_blocks * k_cache.shape[2], device=q.device)
    mask = positions < context_lens.unsqueeze(1)
    if window is not None:
        mask &= positions >= context_lens.unsqueeze(1) - window

    def context(cache: Tensor) -> Tensor:  # [requests, kv_heads, max_tokens, head_dim]
        blocks = cache[block_tables.flatten().long()].view(num_requests, max_blocks, *cache.shape[1:])
        tokens = blocks.transpose(1, 2).flatten(2, 3)
        # Never-written memory may hold anything, and 0 * nan is nan.
        return tokens.masked_fill(~mask[:, None, :, None], 0.0).to(q.dtype)

    out = F.scaled_dot_product_attention(
        q.unsqueeze(2),
        context(k_cache),
        context(v_cache),
        attn_mask=mask[:, None, None, :],
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(2)
