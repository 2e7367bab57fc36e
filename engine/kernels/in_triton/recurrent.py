"""States of recurrent layers: linear attention, and short convolutions.

Few tokens pass through a state one by one, many in chunks (`chunked_scan`), if the fallback level allows it.
"""

import triton
import triton.language as tl
from torch import Tensor

from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels.in_triton.chunked_scan import MOST_KEYS, scan_chunks
from neo_desktop.models.recurrent import Spans

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
VALUES = 8  # columns of a head's state per program: with 128 keys, 32 registers of a warp's threads
CHANNELS = 64
TOKENS = 16
FEW_KEYS = 16  # of which a thread holds at most one per column
LEAST_TOKENS = 32  # that chunks serve; no GPU has measured it


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
    """Compute `models.recurrent.scan_state`."""
    assert all(x.is_contiguous() for x in (q, k, v, decay, beta, state, out))
    is_long = spans.longest >= LEAST_TOKENS and k.shape[2] <= MOST_KEYS
    scan = scan_chunks if is_long and fallbacks.level("recurrent") == "chunks" else scan_tokens
    scan(q, k, v, decay, beta, state, spans=spans, out=out, is_delta=is_delta)


def scan_tokens(*tensors: Tensor, spans: Spans, out: Tensor, is_delta: bool) -> None:
    """Compute `models.recurrent.scan_state` token by token; the tensors are q to state."""
    _, k, v, *_ = tensors
    key_heads, key_dim = k.shape[1:]
    heads, value_dim = v.shape[1:]
    _scan[len(spans.table), heads, triton.cdiv(value_dim, VALUES)](
        *tensors,
        spans.table,
        out,
        IS_DELTA=is_delta,
        HEADS=heads,
        SHARED=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_PAD=triton.next_power_of_2(key_dim),
        VALUES=VALUES,
        num_warps=1,
        # A thread with one key would add another thread's rounded product to its own unrounded one.
        # Both hold the sum, so their copies would differ, and the result would depend on which is stored.
        enable_fp_fusion=key_dim > FEW_KEYS,
    )


@triton.jit
def _scan(
    q,
    k,
    v,
    decay,
    beta,
    state,
    spans,
    out,
    IS_DELTA: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUES: tl.constexpr,
):
    span = spans + tl.program_id(0) * 4
    begin, count = tl.load(span).to(tl.int64), tl.load(span + 1) - tl.load(span)
    source, target = tl.load(span + 2).to(tl.int64), tl.load(span + 3).to(tl.int64)
    head = tl.program_id(1)
    keys = tl.arange(0, KEY_PAD)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    own = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + values[None, :]
    is_own = is_key[:, None] & is_value[None, :]
    size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    s = tl.load(state + source * size + own, mask=is_own & (source >= 0), other=0.0)
    dtype = out.dtype.element_ty
    for step in range(count):
        row = (begin + step) * HEADS + head
        key_row = ((begin + step) * (HEADS // SHARED) + head // SHARED) * KEY_DIM + keys
        key = tl.load(k + key_row, mask=is_key, other=0.0).to(tl.float32)[:, None]
        query = tl.load(q + key_row, mask=is_key, other=0.0).to(tl.float32)[:, None]
        delta = tl.load(v + row * VALUE_DIM + values, mask=is_value, other=0.0).to(tl.float32)
        s *= tl.exp2(tl.load(decay + row) * LOG2_E)
        if IS_DELTA:
            delta -= tl.sum(s * key, axis=0)
        delta *= tl.load(beta + row)
        s += key * delta[None, :]
        result = tl.sum(s * query, axis=0)
        tl.store(out + row * VALUE_DIM + values, result.to(dtype), mask=is_value)
    tl.store(state + target * size + own, s, mask=is_own & (target >= 0))


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
    """Compute `models.recurrent.short_convolution`; out is not x."""
    width, channels = weight.shape
    assert all(each.is_contiguous() for each in (x, weight, state, out))
    grid = len(spans.table), triton.cdiv(channels, CHANNELS), triton.cdiv(spans.longest, TOKENS)
    _convolve[grid](
        x,
        weight,
        bias,
        state,
        spans.table,
        out,
        CHANNELS=channels,
        WIDTH=width,
        HAS_SILU=has_silu,
        TILE=CHANNELS,
        TOKENS=1 if spans.longest == 1 else TOKENS,
        num_warps=2,
        enable_fp_fusion=True,
    )


@triton.jit
def _convolve(
    x,
    weight,
    bias,
    state,
    spans,
    out,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SILU: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    PAST: tl.constexpr = WIDTH - 1
    span = spans + tl.program_id(0) * 4
    first, end = tl.load(span).to(tl.int64), tl.load(span + 1).to(tl.int64)
    source, target = tl.load(span + 2).to(tl.int64), tl.load(span + 3).to(tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_channel = (channels < CHANNELS)[None, :]
    channel = channels[None, :]
    past = state + source * PAST * CHANNELS + channel
    begin = tl.program_id(2) * TOKENS  # tokens before this tile
    tokens = first + begin + tl.arange(0, TOKENS)[:, None]
    total = tl.zeros([TOKENS, TILE], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=is_channel, other=0.0)
    for tap in tl.static_range(WIDTH):
        at = tokens - PAST + tap
        is_new = (at >= first) & (at < end) & is_channel
        is_old = (at < first) & (source >= 0) & is_channel
        given = tl.load(x + at * CHANNELS + channel, mask=is_new, other=0.0).to(tl.float32)
        given += tl.load(past + (at - first + PAST) * CHANNELS, mask=is_old, other=0.0)
        total += given * tl.load(weight + tap * CHANNELS + channel, mask=is_channel, other=0.0)
    if HAS_SILU:
        total = total / (1.0 + tl.exp2(-total * LOG2_E))
    dtype = out.dtype.element_ty
    tl.store(out + tokens * CHANNELS + channel, total.to(dtype), mask=(tokens < end) & is_channel)
    if begin == 0 and target >= 0:
        for row in tl.static_range(PAST):
            last = end - PAST + row
            from_x = (last >= first) & is_channel
            from_past = (last < first) & (source >= 0) & is_channel
            kept = tl.load(x + last * CHANNELS + channel, mask=from_x, other=0.0).to(tl.float32)
            kept += tl.load(past + (last - first + PAST) * CHANNELS, mask=from_past, other=0.0)
            tl.store(state + (target * PAST + row) * CHANNELS + channel, kept, mask=is_channel)
