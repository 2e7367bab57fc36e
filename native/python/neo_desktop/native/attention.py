"""Decode attention over a paged KV cache, prefill attention over rows, and copies of rows to and from a
cache.
"""

import torch

from neo_desktop.native import _native
from neo_desktop.native.arguments import default_isa, view_of


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    num_threads: int = 0,
    *,
    block_size: int | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    window: int = 0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    isa: str | None = None,
) -> torch.Tensor:
    """Compute attention of one new token per request over its paged context; return `out`.

    Work is split over requests, KV heads and chunks of context, whose partial softmaxes are merged in fp32
    (Flash-Decoding). The result depends neither on the number of threads nor on the rest of the batch.

    Args:
        q: [batch, heads, head_dim], fp32, fp16 or bf16; may be strided in batch and heads.
        k_cache: [num_pages, kv_heads, page_tokens, head_dim], fp32, fp16 or bf16; may be strided in
            num_pages and kv_heads. Query head h reads KV head h // (heads // kv_heads). head_dim is a
            multiple of 8 up to 512. `empty_paired_keys()`, [num_pages, kv_heads, page_tokens,
            head_dim / 2, 2], is faster, above all for grouped queries, and may also be int8.
        v_cache: [num_pages, kv_heads, page_tokens, head_dim] in the dtype of k_cache. It may be k_cache, in
            rows: values are keys. With blocks of a multiple of 16 tokens, that is as fast as pairs, with the
            same bits, and may also be int8; v and v_scale are then k and k_scale.
        block_tables: [batch, max_blocks] int32; token t is in slot
            block_tables[b, t // block_size] * block_size + t % block_size, and slot s is row
            s % page_tokens of page s // page_tokens. Entries outside a request's context or window are not
            read.
        context_lens: [batch] int32, tokens in the cache, the newest included; 0: no request, and its row of
            `out` is not written.
        scale: multiplies q·k, usually head_dim ** -0.5.
        out: [batch, heads, head_dim], fp32, fp16 or bf16, made in q's dtype when None; must not overlap the
            inputs.
        num_threads: 0 means `default_num_threads()`.
        block_size: tokens per entry of block_tables; divides page_tokens, and is a multiple of 16 for paired
            keys. None: page_tokens. Reading is fastest if the blocks of a page are consecutive in a table.
        k: [batch, kv_heads, head_dim], fp32, fp16 or bf16: the newest tokens' keys. The call writes them to
            the cache, cast to its dtype, before it attends; None if the cache has them. No two requests may
            have the same last slot.
        v: as k.
        window: attend to the last `window` tokens only; 0 means all.
        k_scale: [num_pages, kv_heads, page_tokens] fp32, the row scales of an int8 cache; None for
            other dtypes.
        v_scale: as k_scale.
        sinks: [heads] fp32: per head, the score of one more token whose value is zero; None: no sinks.
        softcap: scores s become softcap * tanh(s / softcap), except the sinks'; 0: no cap.
        isa: one of `available_isas()`; None means `default_isa()`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was read or written.

    Non-finite keys, values or queries make only those heads non-finite that attend to them.
    """
    if (k is None) != (v is None):
        raise ValueError("k and v of the new tokens must be given together")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size}; expected at least 1 token")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    _native.paged_attention_decode(
        (
            view_of("q", q),
            view_of("out", out),
            view_of("block_tables", block_tables),
            view_of("context_lens", context_lens),
            None if k is None else view_of("k", k),
            None if v is None else view_of("v", v),
            block_size or 0,
            scale,
            softcap,
        ),
        view_of("k_cache", k_cache),
        view_of("v_cache", v_cache),
        None if k_scale is None else view_of("k_scale", k_scale),
        None if v_scale is None else view_of("v_scale", v_scale),
        window,
        None if sinks is None else view_of("sinks", sinks),
        num_threads,
        isa or default_isa(),
    )
    return out


def empty_paired_keys(
    *leading: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Allocate a K cache in the layout that is fastest to read.

    Returns [*leading, kv_heads, page_tokens, head_dim / 2, 2]. In memory the tokens of a page are adjacent,
    two dimensions at a time: [*leading, kv_heads, head_dim / 2, page_tokens, 2]. `flatten(-2)` on the result,
    or on an indexed part, gives rows.

    Raises:
        ValueError: page_tokens is not a multiple of 16.
    """
    if page_tokens % 16 != 0:
        raise ValueError(f"page_tokens is {page_tokens}; paired keys need a multiple of 16")
    return torch.empty(*leading, kv_heads, head_dim // 2, page_tokens, 2, dtype=dtype).transpose(-3, -2)


def prompt_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    num_threads: int = 0,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    isa: str | None = None,
) -> torch.Tensor:
    """Compute attention of prefill chunks to their contexts; return `out`.

    A row of `out` depends only on its query and its context: it has the same bits in any chunk, in any batch
    and with any number of threads. In fp32 arithmetic `paged_attention_decode` over paired keys gives the
    same bits.

    Args:
        q: [queries, heads, head_dim], fp32, fp16 or bf16, chunks concatenated; may be strided in
            queries and heads. head_dim is a multiple of 8 up to 512.
        k: [contexts, kv_heads, head_dim] in the dtype of q, contexts concatenated; may be
            strided in contexts and KV heads. Query head h reads KV head h // (heads // kv_heads).
        v: as k.
        ends: [2, chunks + 1] int32: 0 and the ends of chunks in q; 0 and the ends of contexts in k. A chunk's
            last query attends to the whole context, each earlier query to one token less.
        scale: multiplies q·k, usually head_dim ** -0.5.
        out: as q, made when None; must not overlap the inputs.
        num_threads: 0 means `default_num_threads()`.
        window: attend to the last `window` tokens only; 0 means all.
        sinks: [heads] fp32: per head, the score of one more token whose value is zero; None: no sinks.
        softcap: scores s become softcap * tanh(s / softcap), except the sinks'; 0: no cap.
        isa: one of `available_isas()`; None means `default_isa()`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was read or written.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    _native.prompt_attention(
        view_of("q", q),
        view_of("k", k),
        view_of("v", v),
        view_of("ends", ends),
        view_of("out", out),
        window,
        None if sinks is None else view_of("sinks", sinks),
        scale,
        softcap,
        num_threads,
        isa or default_isa(),
    )
    return out


def paged_kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_threads: int = 0,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    isa: str | None = None,
) -> None:
    """Write the keys and values of new tokens to their slots of the cache, cast to its dtype.

    Args:
        k: [n, kv_heads, head_dim], fp32, fp16 or bf16; may be strided in n and kv_heads.
        v: as k.
        k_cache: as in `paged_attention_decode`.
        v_cache: as in `paged_attention_decode`.
        slots: [n] int64, see `paged_attention_decode`; distinct (of equal slots, any row may win).
        num_threads: 0 means `default_num_threads()`.
        k_scale: as in `paged_attention_decode`; an output: a row's largest element becomes 127 steps.
        v_scale: as k_scale.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was written.
    """
    _native.paged_kv_write(
        view_of("k", k),
        view_of("v", v),
        view_of("k_cache", k_cache),
        view_of("v_cache", v_cache),
        None if k_scale is None else view_of("k_scale", k_scale),
        None if v_scale is None else view_of("v_scale", v_scale),
        view_of("slots", slots),
        num_threads,
        isa or default_isa(),
    )


def paged_kv_read(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    num_threads: int = 0,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    isa: str | None = None,
) -> None:
    """Read keys and values from slots of the cache; the inverse of `paged_kv_write`.

    Consecutive slots are fastest.

    Args:
        k_cache: as in `paged_attention_decode`.
        v_cache: as in `paged_attention_decode`.
        slots: [n] int64; slots may repeat.
        k_out: [n, kv_heads, head_dim], fp32, fp16 or bf16, to which the rows are cast; may be strided in n
            and kv_heads; must not overlap the inputs.
        v_out: as k_out.
        num_threads: 0 means `default_num_threads()`.
        k_scale: as in `paged_attention_decode`.
        v_scale: as k_scale.
        isa: as in `paged_attention_decode`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was written.
    """
    _native.paged_kv_read(
        view_of("k_cache", k_cache),
        view_of("v_cache", v_cache),
        None if k_scale is None else view_of("k_scale", k_scale),
        None if v_scale is None else view_of("v_scale", v_scale),
        view_of("slots", slots),
        view_of("k_out", k_out),
        view_of("v_out", v_out),
        num_threads,
        isa or default_isa(),
    )


def store_rows(rows: torch.Tensor, slots: torch.Tensor, into: torch.Tensor, num_threads: int = 0) -> None:
    """Copy rows of several layers to their slots: `into[layer, slots[i]] = rows[layer, i]`.

    Args:
        rows: [layers, n, width], of any dtype of the native functions; may be strided in layers and n.
        slots: [n] int64, contiguous, distinct (of equal slots, any row may win).
        into: [layers, slots, width] in rows' dtype; may be strided in the same way; must not overlap rows.
        num_threads: 0 means `default_num_threads()`.

    Raises:
        ValueError: an argument's device, dtype, shape, stride or value is wrong; nothing was written.
    """
    _native.store_rows(view_of("rows", rows), view_of("slots", slots), view_of("into", into), num_threads)
