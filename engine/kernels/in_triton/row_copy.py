"""Rows of a layer's KV into the cache and out of it, by slot, and blocks into it, K and V in one launch."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
# Of blocks that come over the bus: so many programs with so many numbers of K and of V under way. They should
# keep the bus busy, and are few enough to leave the multiprocessors to what is computed meanwhile.
BLOCK_TILE, BLOCK_PROGRAMS = 2048, 32


def write_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `models.operators.write_rows`."""
    _launch(k, v, k_cache, v_cache, slots, write=True)


def read_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `models.operators.read_rows`."""
    _launch(k, v, k_cache, v_cache, slots, write=False)


def _launch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, write: bool) -> None:
    tokens, kv_heads, head_dim = k.shape
    assert k.shape == v.shape
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
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


@triton.jit(do_not_specialize=("slots",))  # part of a batch's slots, aligned or not: one variant for both
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
    slot = tl.load(slots + token).to(tl.int64)  # graphs have int32
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


def gather_blocks(k_home: Tensor, v_home: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor) -> None:
    """See `models.operators.gather_blocks`; reads host memory, which has to be pinned, where it lies."""
    assert k_home.is_contiguous()
    assert v_home.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    if not len(blocks):
        return
    elements = k_cache[0].numel()
    tiles = triton.cdiv(elements, BLOCK_TILE)
    _gather_blocks[(min(BLOCK_PROGRAMS, len(blocks) * tiles),)](
        k_home,
        v_home,
        k_cache,
        v_cache,
        blocks,
        len(blocks),
        ELEMENTS=elements,
        TILES=tiles,
        TILE=BLOCK_TILE,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=("blocks", "count"))  # of any number of blocks, wherever their list lies
def _gather_blocks(
    k_home,
    v_home,
    k_cache,
    v_cache,
    blocks,
    count,
    ELEMENTS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    for piece in range(tl.program_id(0), count * TILES, tl.num_programs(0)):
        block = tl.load(blocks + piece // TILES).to(tl.int64)
        if block >= 0:
            offsets = piece % TILES * TILE + tl.arange(0, TILE)
            in_block = offsets < ELEMENTS
            at = block * ELEMENTS + offsets
            k = tl.load(k_home + at, mask=in_block)
            v = tl.load(v_home + at, mask=in_block)
            tl.store(k_cache + at, k, mask=in_block)
            tl.store(v_cache + at, v, mask=in_block)
