"""Copies of a layer's KV rows to and from the cache by slot, K and V in one launch."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024


def write_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Compute `models.operators.write_rows`."""
    _launch(k, v, k_cache, v_cache, slots, write=True)


def read_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Compute `models.operators.read_rows`."""
    _launch(k, v, k_cache, v_cache, slots, write=False)


def _launch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, write: bool) -> None:
    tokens, kv_heads, head_dim = k.shape
    assert k.shape == v.shape
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert all(cache.is_contiguous() for cache in (k_cache, v_cache))
    if not tokens:
        return
    _copy_rows[tokens, triton.cdiv(kv_heads * head_dim, TILE)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        k.stride(0),
        v.stride(0),
        ELEMENTS=kv_heads * head_dim,
        TILE=TILE,
        WRITE=write,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=("slots",))  # one variant for aligned and unaligned slots
def _copy_rows(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_stride,
    v_stride,
    ELEMENTS: tl.constexpr,
    TILE: tl.constexpr,
    WRITE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)  # graphs use int32
    if slot < 0:
        return
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_row = offsets < ELEMENTS
    k_row = k + token * k_stride + offsets
    v_row = v + token * v_stride + offsets
    cached = slot * ELEMENTS + offsets
    if WRITE:
        tl.store(k_cache + cached, tl.load(k_row, mask=in_row), mask=in_row)
        tl.store(v_cache + cached, tl.load(v_row, mask=in_row), mask=in_row)
    else:
        tl.store(k_row, tl.load(k_cache + cached, mask=in_row), mask=in_row)
        tl.store(v_row, tl.load(v_cache + cached, mask=in_row), mask=in_row)
