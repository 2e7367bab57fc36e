"""Decode attention over a paged KV cache, split over the context (flash decoding).

A program attends from all query heads of one KV head to one part of one request's context: K and V are read
once. A second kernel merges the parts in fp32; nothing is lost by cutting:

    part      out_p = softmax(scores of p) @ V of p          lse_p = log2(sum(exp(scores of p)))
    request   out   = sum(w_p * out_p) / sum(w_p)            w_p   = 2 ** (lse_p - max(lse))

How many parts there may be, and with it the grid, follows from shapes alone (`num_splits`), so that one CUDA
graph serves all batches of these shapes. Where the parts begin is decided on the device, from each request's
length; programs for which nothing is left end at once, and what they would have written is never read.

`tl.dot` becomes tensor-core instructions from compute capability 8.0 on. For 7.5 Triton makes fp32 FMAs of
it: still far fewer instructions than of a broadcast product and its sum.
"""

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
EVERYTHING = 2**31 - 1  # a window that no context fills


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
) -> None:
    """Attend from one new token per request to its whole context, whose KV is in the cache already.

    Requests with a context of 0 tokens get zeros: the padding of a batch. What lies beyond a context, in
    tables and in the cache, is not read.

    Args:
        q: [requests, heads, head_dim], fp16, fp32 or (from 8.0 on) bf16; the heads of a token contiguous.
        k_cache: [num_blocks, block_size, kv_heads, head_dim], of q's dtype; v_cache likewise, with the
            same strides. Any will do with which the dimensions of a head are contiguous.
        block_tables: [requests, max_blocks] int32, contiguous.
        context_lens: [requests] int32, the new token included.
        out: as q.
        partial_out: [requests, heads, num_splits, head_dim] fp32, contiguous: workspace, with any content.
        partial_lse: [requests, heads, num_splits] fp32, contiguous: likewise.
        scale: the factor on q·k.
        window: how many of the last tokens are attended to; None: all.
    """
    requests, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == q.stride(2) == out.stride(2) == 1
    assert q.stride(1) == out.stride(1) == head_dim
    splits = partial_lse.shape[2]
    window = EVERYTHING if window is None else window
    group = heads // kv_heads
    head_pad = triton.next_power_of_2(head_dim)
    tile = min(32, 4096 // head_pad)  # more tokens at once spill registers on 7.5
    _attend[kv_heads, splits, requests](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        partial_out,
        partial_lse,
        scale * LOG2_E,
        window,
        q.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_tables.shape[1],
        GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        NUM_SPLITS=splits,
        TILE=tile,
        num_warps=4,
        num_stages=5,  # from 8.0 on: two tiles of K and V are under way, and the tables of two more
        enable_fp_fusion=True,
    )
    _merge[heads, requests](
        partial_out,
        partial_lse,
        context_lens,
        out,
        window,
        out.stride(0),
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        NUM_SPLITS=splits,
        TILE=tile,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def _cut(context_len, window, NUM_SPLITS: tl.constexpr, TILE: tl.constexpr):
    # The first token that is attended to, and the tokens of a part: whole tiles, except for the last.
    first = tl.maximum(context_len - window, 0)
    return first, tl.cdiv(tl.cdiv(context_len - first, NUM_SPLITS), TILE) * TILE


# What differs from batch to batch or from layer to layer, alignment included, must not make another variant.
@triton.jit(do_not_specialize=("block_tables", "context_lens", "max_blocks", "window"))
def _attend(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    partial_out,
    partial_lse,
    scale,
    window,
    q_stride,
    block_stride,
    token_stride,
    head_stride,
    max_blocks,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    kv_head = tl.program_id(0)  # neighbours in the grid read neighbours in memory
    split = tl.program_id(1)
    request = tl.program_id(2)
    context_len = tl.load(context_lens + request)
    first, split_tokens = _cut(context_len, window, NUM_SPLITS, TILE)
    begin = first + split * split_tokens
    end = tl.minimum(begin + split_tokens, context_len)
    if begin >= end:
        return

    dims = tl.arange(0, HEAD_PAD)
    group = tl.arange(0, GROUP_PAD)
    heads = kv_head * GROUP + group
    in_heads = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = q + request * q_stride + heads * HEAD_DIM
    queries = tl.load(q_rows[:, None] + dims[None, :], mask=in_heads, other=0.0)
    table = block_tables + request * max_blocks

    # The running softmax of each query head: the largest score, the sum of weights, the weighted sum of V.
    top = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    out = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        in_context = positions < end
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=in_context, other=0).to(tl.int64)
        rows = blocks * block_stride + positions % BLOCK_SIZE * token_stride + kv_head * head_stride
        elements = rows[:, None] + dims[None, :]
        # Beyond the context may be anything, and 0 * nan is nan.
        in_tile = in_context[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(k_cache + elements, mask=in_tile, other=0.0)
        values = tl.load(v_cache + elements, mask=in_tile, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(in_context[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=1)
        out = out * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new_top

    parts = (request * tl.num_programs(0) * GROUP + heads) * NUM_SPLITS + split
    tl.store(partial_lse + parts, top + tl.log2(total), mask=group < GROUP)
    tl.store(partial_out + parts[:, None] * HEAD_DIM + dims[None, :], out / total[:, None], mask=in_heads)


@triton.jit(do_not_specialize=("context_lens", "window"))
def _merge(
    partial_out,
    partial_lse,
    context_lens,
    out,
    window,
    out_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(0)
    request = tl.program_id(1)
    context_len = tl.load(context_lens + request)
    first, split_tokens = _cut(context_len, window, NUM_SPLITS, TILE)
    dims = tl.arange(0, HEAD_PAD)
    in_head = dims < HEAD_DIM
    out_row = out + request * out_stride + head * HEAD_DIM + dims
    if context_len == 0:  # padding: no part was written
        tl.store(out_row, tl.zeros([HEAD_PAD], out.dtype.element_ty), mask=in_head)
        return

    splits = tl.arange(0, NUM_SPLITS)
    written = first + splits * split_tokens < context_len
    parts = (request * tl.num_programs(0) + head) * NUM_SPLITS + splits
    lse = tl.load(partial_lse + parts, mask=written, other=-float("inf"))
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    rows = partial_out + parts[:, None] * HEAD_DIM + dims[None, :]
    outs = tl.load(rows, mask=written[:, None] & in_head[None, :], other=0.0)
    merged = tl.sum(weights[:, None] * outs, axis=0) / tl.sum(weights, axis=0)
    tl.store(out_row, merged.to(out.dtype.element_ty), mask=in_head)
