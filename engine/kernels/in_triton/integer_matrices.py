"""The kernel of `quantised` that multiplies rounded inputs by packed weights on tensor cores, for 5 to 64 rows.

It is written for single threads: in a tensor `[threads]` an element belongs to the thread with its number.
Tensor cores take a block of 16 rows and 32 columns in which four neighbouring threads hold a row's 32 bytes.
Here thread `4 * quad + part` of a warp reads words of four neighbouring rows, 16 bytes at once, and of each
row the places `2 * part` and `2 * part + 1` of a block (`models.linear.grouped`). So words become operands
without leaving their thread. The inputs' codes have the same order, eight inputs per instruction.

The warps of a program share out the columns' blocks. Sums of integers start at the bits of 1.5 * 2 ** 23, of
which they are the mantissa: a subtraction makes them floats.
"""

import triton
import triton.language as tl

from neo_desktop.engine.kernels.in_triton.integer_products import _VARYING, _high, _low, _numbers_of, _row

_ZERO: tl.constexpr = tl.constexpr(0x4B400000)  # the bits of 1.5 * 2 ** 23
_KINDS: tl.constexpr = tl.constexpr("s32.u8.s8.s32")
_BLOCK: tl.constexpr = tl.constexpr(
    "mma.sync.aligned.m16n8k32.row.col.s32.KIND.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9},"
    " {$10, $10, $10, $10};"
)
_HALF_BLOCK: tl.constexpr = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.s32.KIND.s8.s32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $7, $7, $7};"
)
