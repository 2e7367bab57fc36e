"""Dequantisation of the CPU's quantised tiles to rows of floats, for matmuls on the GPU.

A program makes 16 rows of some blocks. It reads 4-byte words of 16 neighbouring rows; the values of a word
end up in separate columns of the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from neo_desktop.models.linear.packed import TILE_ROWS
from neo_desktop.models.linear.unpack import BLOCK, LAYOUTS

BLOCKS = 8  # blocks of 32 columns per program


def unpack_quantised(type_name: str, packed: Tensor, out: Tensor) -> None:
    """Compute `models.linear.unpack.unpack_quantised`."""
    layout = LAYOUTS[type_name]
    assert all(each.is_contiguous() for each in (packed, out))
    assert out.shape[1] % (BLOCK * layout.unit_blocks) == 0
    rows, blocks = len(out), out.shape[1] // BLOCK
    if not rows:
        return
    _unpack[triton.cdiv(rows, TILE_ROWS), triton.cdiv(blocks, BLOCKS)](
        packed.view(torch.int32),
        packed.view(layout.scale_dtype),
        packed.view(torch.int8),
        out,
        rows,
        blocks,
        LAYOUT=layout,
        ROWS=TILE_ROWS,
        BLOCK=BLOCK,
        BLOCKS=BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=("count", "blocks"))
def _unpack(
    words,
    halves,
    bytes_of_scales,
    out,
    count,
    blocks,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    QUADS: tl.constexpr = BLOCK // 4  # groups of 4 columns in a block
    tile_bytes = (blocks // LAYOUT.unit_blocks).to(tl.int64) * LAYOUT.unit_bytes
    start = tl.program_id(0) * tile_bytes
    row = tl.arange(0, ROWS)[None, :]
    quad = tl.arange(0, BLOCKS * QUADS)[:, None]
    block = tl.program_id(1) * BLOCKS + quad // QUADS
    in_row = block < blocks
    unit = block // LAYOUT.unit_blocks * LAYOUT.unit_bytes
    at = LAYOUT.header_bytes + unit + block % LAYOUT.unit_blocks * LAYOUT.block_bytes  # offset in the tile
    group = quad % LAYOUT.groups
    half = quad % QUADS // LAYOUT.groups  # 1: the high halves of bytes
    numbers_at = at + LAYOUT.scale_bytes + group * (ROWS * 4)
    word = tl.load(words + start // 4 + numbers_at // 4 + row, mask=in_row, other=0)[:, :, None]
    byte = 8 * tl.arange(0, 4)[None, None, :]
    if LAYOUT.bits == 8:  # noqa: SIM108 - the branch that is not taken must not be compiled
        code = ((word >> byte) & 255 ^ 128) - 128
    else:
        code = (word >> (byte + 4 * half[:, :, None])) & 15
    if LAYOUT.bits > 4 and LAYOUT.bits < 8:
        HIGH: tl.constexpr = LAYOUT.bits - 4
        high_at = at + LAYOUT.scale_bytes + (LAYOUT.groups + group // 2 * (HIGH - 1)) * (ROWS * 4)
        high = tl.load(words + start // 4 + high_at // 4 + row, mask=in_row, other=0)[:, :, None]
        from_bit = 4 * half + group if HIGH == 1 else 2 * half + 4 * (group % 2)
        code |= ((high >> (byte + from_bit[:, :, None])) & (2**HIGH - 1)) << 4
    if LAYOUT.is_fp4:  # 0, 1, 2, 3, 4, 6, 8, 12, and their negatives
        exponent = (code >> 1) & 3
        size = tl.where(exponent > 0, (2 + (code & 1)) << tl.maximum(exponent - 1, 0), code & 1)
        code = tl.where(code > 7, -size, size)
    number = (code - LAYOUT.offset).to(tl.float32)

    halves += (start + unit) // 2 + row
    scale = tl.load(halves, mask=in_row, other=0.0).to(tl.float32)
    small = bytes_of_scales + start + at + row
    if LAYOUT.scales == 2:
        small += quad % QUADS // (QUADS // 2) * ROWS
    if LAYOUT.scales:
        scale *= tl.load(small, mask=in_row, other=0).to(tl.float32)
    number *= scale[:, :, None]
    if LAYOUT.has_minima:
        minimum = tl.load(halves + ROWS, mask=in_row, other=0.0).to(tl.float32)
        if LAYOUT.scales:
            unsigned = tl.load(small + LAYOUT.scales * ROWS, mask=in_row, other=0).to(tl.int32) & 255
            minimum *= unsigned.to(tl.float32)
        number += minimum[:, :, None]

    lines = tl.permute(number.to(out.dtype.element_ty), (1, 0, 2)).reshape(ROWS, BLOCKS * BLOCK)
    into = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * (BLOCKS * BLOCK) + tl.arange(0, BLOCKS * BLOCK)[None, :]
    columns = blocks * BLOCK
    tl.store(out + into.to(tl.int64) * columns + column, lines, mask=(into < count) & (column < columns))
