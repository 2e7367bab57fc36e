"""Rotation of queries and keys, and KV stores to the paged cache, in one pass over a layer's qkv."""

import triton
import triton.language as tl
from torch import Tensor

HEADS = 8  # heads of a token per program


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qk_norm: Tensor | None,
    eps: float,
) -> None:
    """Compute `models.operators.rope_append`."""
    _, block_size, kv_heads, head_dim = k_cache.shape
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == qkv.stride(1) == 1
    all_heads = qkv.shape[1] // head_dim
    _rope_append[len(qkv), triton.cdiv(all_heads, HEADS)](
        qkv,
        cos,
        sin,
        slots,
        k_cache,
        v_cache,
        qk_norm,
        eps,
        qkv.stride(0),
        *k_cache.stride()[:3],
        ALL_HEADS=all_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        TILE_HEADS=HEADS,
        num_warps=2,
        enable_fp_fusion=True,
    )


# A batch's slots start at any address; do not compile a variant per alignment.
@triton.jit(do_not_specialize=("slots",))
def _rope_append(
    qkv,
    cos,
    sin,
    slots,
    k_cache,
    v_cache,
    qk_norm,
    eps,
    qkv_stride,
    block_stride,
    token_stride,
    head_stride,
    ALL_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    NORMED_HEADS: tl.constexpr = ALL_HEADS - KV_HEADS  # queries and keys
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, HALF_PAD)
    in_half = (dims < HALF)[None, :]
    in_row = (heads < ALL_HEADS)[:, None] & in_half
    rotates = in_row & (heads < NORMED_HEADS)[:, None]

    row = qkv + token * qkv_stride
    dtype = qkv.dtype.element_ty
    low = heads[:, None] * HEAD_DIM + dims[None, :]  # channels of the first half, rotated with
    high = low + HALF  # the same channels of the second half
    x_low = tl.load(row + low, mask=in_row, other=0.0)
    x_high = tl.load(row + high, mask=in_row, other=0.0)

    y_low = x_low.to(tl.float32)
    y_high = x_high.to(tl.float32)
    if qk_norm is not None:
        mean_square = (tl.sum(y_low * y_low, axis=1) + tl.sum(y_high * y_high, axis=1)) / HEAD_DIM
        factor = (1.0 / tl.sqrt(mean_square + eps))[:, None]
        w_low = tl.load(qk_norm + low, mask=rotates, other=0.0).to(tl.float32)
        w_high = tl.load(qk_norm + high, mask=rotates, other=0.0).to(tl.float32)
        y_low = ((y_low * factor).to(dtype).to(tl.float32) * w_low).to(dtype).to(tl.float32)
        y_high = ((y_high * factor).to(dtype).to(tl.float32) * w_high).to(dtype).to(tl.float32)

    angle = token * HEAD_DIM + dims
    c = tl.load(cos + angle, mask=dims < HALF, other=0.0)[None, :]
    s = tl.load(sin + HALF + angle, mask=dims < HALF, other=0.0)[None, :]
    out_low = (y_low * c - y_high * s).to(dtype)
    out_high = (y_high * c + y_low * s).to(dtype)
    tl.store(row + low, out_low, mask=rotates)
    tl.store(row + high, out_high, mask=rotates)

    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride + dims[None, :]
        keys = place + (heads - (NORMED_HEADS - KV_HEADS))[:, None] * head_stride
        is_key = rotates & (heads >= NORMED_HEADS - KV_HEADS)[:, None]
        tl.store(k_cache + keys, out_low, mask=is_key)
        tl.store(k_cache + keys + HALF, out_high, mask=is_key)
        values = place + (heads - NORMED_HEADS)[:, None] * head_stride
        is_value = in_row & (heads >= NORMED_HEADS)[:, None]
        tl.store(v_cache + values, x_low, mask=is_value)
        tl.store(v_cache + values + HALF, x_high, mask=is_value)
