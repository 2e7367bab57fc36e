"""Decode attention without tensor cores, for compute capability 7.5: Triton does not use those of Turing.

`paged_decode._attend` also works on 7.5. But its matmuls go through shared memory with barriers. And Turing
cannot copy to shared memory in the background, so no loads are in flight while a tile is computed. In this
kernel a whole tile stays in registers:

    row of K or V   spread over threads, 16 bytes each, which sum a score by shuffles.
    lane            the threads of one row. It keeps a running softmax over every LANES-th token. Lanes are
                    merged once, at the end.
    share           the threads for some of the query heads, so that queries and sums fit into registers. All
                    shares read the same K and V, from the L1 cache.

Loads run ahead: after the multiplication with a tile's keys, the kernel loads the next tile's keys. It does
the same with values, and with the block-table entries for the tile after that.
"""

import triton
import triton.language as tl

MAX_GROUP = 8  # with more query heads, plain FMAs would be the bottleneck
NUM_WARPS = 4
HEADS_PER_SHARE = 4
IS_OLD = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (
    3,
    7,
)  # spills with more steps
LOG2_E_IN_KERNEL: tl.constexpr = tl.constexpr(1.4426950408889634)
NO_SCORE: tl.constexpr = tl.constexpr(-3e38)  # below every score, but finite, for lanes without tokens


def plain_shape(group: int, head_pad: int, element_bytes: int) -> dict[str, int]:
    """Return the constants of `attend_plain` for a model's shape, and `maxnreg`.

    Args:
        group: Query heads per KV head.
        head_pad: head_dim, rounded up to a power of two.
        element_bytes: Bytes per element of K and V.
    """
    group_pad = triton.next_power_of_2(group)
    heads = min(group_pad, HEADS_PER_SHARE if head_pad <= 256 else HEADS_PER_SHARE // 2)
    shares, numbers = group_pad // heads, group_pad * head_pad
    threads_per_row = max(1, head_pad * element_bytes // 16)
    return {
        "SHARES": shares,
        "HEADS": heads,
        "LANES": max(1, NUM_WARPS * 32 // threads_per_row // shares),
        "STEPS": 1 if IS_OLD else 4 if group_pad == 1 else 2,
        # Lets 6 or 4 programs fit on a multiprocessor; without it the compiler uses more registers.
        "maxnreg": 80 if group_pad <= 2 and numbers <= 512 else 128 if numbers <= 2048 else 168,
    }


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """Return CAP * tanh(scores / CAP)."""
    TURNS: tl.constexpr = 2 * LOG2_E_IN_KERNEL / CAP
    return CAP - 2 * CAP / (1 + tl.exp2(scores * TURNS))


@triton.jit
def cut(context_len, window, num_splits, TILE: tl.constexpr):
    """Return the first token of the window, and the tokens per part, a multiple of TILE."""
    first = tl.maximum(context_len - window, 0)
    return first, tl.cdiv(tl.cdiv(context_len - first, num_splits), TILE) * TILE


@triton.jit(do_not_specialize=("block_tables", "context_lens", "max_blocks", "window", "num_splits", "sinks"))
def attend_plain(  # noqa: PLR0915
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    out,
    partial_out,
    partial_lse,
    sinks,
    scale,
    window,
    num_splits,
    q_stride,
    out_stride,
    block_stride,
    token_stride,
    head_stride,
    max_blocks,
    HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,  # softcap of scores in units of log2; 0: none
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    SHARES: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Compute `paged_decode._attend`, with the same results up to rounding."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    context_len = tl.load(context_lens + request)
    first, split_tokens = cut(context_len, window, num_splits, TILE)
    begin = first + split * split_tokens
    end = tl.minimum(begin + split_tokens, context_len)

    # All tensors are [STEPS, SHARES, HEADS, LANES, HEAD_PAD], with 1 for dimensions along which they are
    # constant. With equal ranks they share the layout of loaded K and V, and Triton converts no layouts.
    dims = tl.arange(0, HEAD_PAD)[None, None, None, None, :]
    in_head = dims < HEAD_DIM
    shares = tl.arange(0, SHARES)[None, :, None, None, None]
    group = shares * HEADS + tl.arange(0, HEADS)[None, None, :, None, None]
    heads = kv_head * GROUP + group
    in_heads = (group < GROUP) & in_head
    out_rows = out + request * out_stride + heads * HEAD_DIM + dims
    if begin >= end:
        if num_splits == 1:  # padding: this program has to write the zeros
            zeros = tl.zeros([1, SHARES, HEADS, 1, HEAD_PAD], out.dtype.element_ty)
            tl.store(out_rows, zeros, mask=in_heads)
        return

    q_rows = q + request * q_stride + heads * HEAD_DIM + dims
    queries = tl.load(q_rows, mask=in_heads, other=0.0).to(tl.float32) * scale
    table = block_tables + request * max_blocks
    steps = tl.arange(0, STEPS)[:, None, None, None, None]
    lanes = tl.arange(0, LANES)[None, None, None, :, None]
    offsets = steps * LANES + lanes + shares * 0
    head = kv_head * head_stride
    positions = begin + offsets
    in_context = positions < end
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=in_context, other=0).to(tl.int64)
    elements = blocks * block_stride + positions % BLOCK_SIZE * token_stride + head + dims
    keys = tl.load(k_cache + elements, mask=in_context & in_head, other=0.0)
    values = tl.load(v_cache + elements, mask=in_context & in_head, other=0.0)
    positions += TILE
    next_blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)

    top = tl.full([1, SHARES, HEADS, LANES, 1], NO_SCORE, tl.float32)
    total = tl.zeros([1, SHARES, HEADS, LANES, 1], tl.float32)
    summed = tl.zeros([1, SHARES, HEADS, LANES, HEAD_PAD], tl.float32)
    for start in range(begin, end, TILE):
        scores = tl.sum(queries * keys.to(tl.float32), axis=4, keep_dims=True)
        if SOFTCAP > 0:
            scores = capped(scores, SOFTCAP)
        scores = tl.where(start + offsets < end, scores, -float("inf"))
        positions = start + TILE + offsets
        in_context = positions < end
        blocks = next_blocks.to(tl.int64)
        elements = blocks * block_stride + positions % BLOCK_SIZE * token_stride + head + dims
        keys = tl.load(k_cache + elements, mask=in_context & in_head, other=0.0)
        new_top = tl.maximum(top, tl.max(scores, axis=0, keep_dims=True))
        weights = tl.exp2(scores - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=0, keep_dims=True)
        summed = summed * decay + tl.sum(weights * values.to(tl.float32), axis=0, keep_dims=True)
        top = new_top
        values = tl.load(v_cache + elements, mask=in_context & in_head, other=0.0)
        positions += TILE
        next_blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)

    new_top = tl.max(top, axis=3, keep_dims=True)
    decay = tl.exp2(top - new_top)
    total = tl.sum(total * decay, axis=3, keep_dims=True)
    if HAS_SINKS and num_splits == 1:
        sink = tl.load(sinks + heads, mask=group < GROUP, other=0.0)
        total += tl.exp2(sink * LOG2_E_IN_KERNEL - new_top)
    result = tl.sum(summed * decay, axis=3, keep_dims=True) / total
    if num_splits == 1:
        tl.store(out_rows, result.to(out.dtype.element_ty), mask=in_heads)
    else:
        parts = (request * tl.num_programs(0) * GROUP + heads) * num_splits + split
        tl.store(partial_lse + parts, new_top + tl.log2(total), mask=group < GROUP)
        tl.store(partial_out + parts * HEAD_DIM + dims, result, mask=in_heads)
