"""Blocks of a layer's KV into one buffer and back, K and V in one launch: one piece for the bus."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 2048


def gather_blocks(k_cache: Tensor, v_cache: Tensor, blocks: Tensor, buffer: Tensor) -> None:
    """Copy blocks of the caches into `buffer`.

    Args:
        k_cache: [num_blocks, block_size, kv_heads, head_dim], each block contiguous; v_cache likewise, with
            the same strides.
        blocks: [n] int64
        buffer: [2, n * block_size, kv_heads, head_dim], K, then V, contiguous.
    """
    _launch(k_cache, v_cache, blocks, buffer, gather=True)


def scatter_blocks(k_cache: Tensor, v_cache: Tensor, blocks: Tensor, buffer: Tensor) -> None:
    """Copy `buffer` into blocks of the caches, each block once; shapes as in `gather_blocks`."""
    _launch(k_cache, v_cache, blocks, buffer, gather=False)


def _launch(k_cache: Tensor, v_cache: Tensor, blocks: Tensor, buffer: Tensor, *, gather: bool) -> None:
    assert k_cache.stride() == v_cache.stride()
    assert k_cache[0].is_contiguous()
    assert buffer.is_contiguous()
    elements = k_cache[0].numel()
    _copy_blocks[len(blocks), triton.cdiv(elements, TILE)](
        k_cache,
        v_cache,
        blocks,
        buffer,
        k_cache.stride(0),
        ELEMENTS=elements,
        TILE=TILE,
        GATHER=gather,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def _copy_blocks(
    k_cache,
    v_cache,
    blocks,
    buffer,
    block_stride,
    ELEMENTS: tl.constexpr,
    TILE: tl.constexpr,
    GATHER: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_block = offsets < ELEMENTS
    cached = tl.load(blocks + index) * block_stride + offsets
    k_part = buffer + index * ELEMENTS + offsets
    v_part = k_part + tl.num_programs(0).to(tl.int64) * ELEMENTS
    if GATHER:
        tl.store(k_part, tl.load(k_cache + cached, mask=in_block), mask=in_block)
        tl.store(v_part, tl.load(v_cache + cached, mask=in_block), mask=in_block)
    else:
        tl.store(k_cache + cached, tl.load(k_part, mask=in_block), mask=in_block)
        tl.store(v_cache + cached, tl.load(v_part, mask=in_block), mask=in_block)
