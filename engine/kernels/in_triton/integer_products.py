"""Kernels of `quantised` that round inputs to 8 bits per block of 32 and multiply integers.

`_multiply_integers`: a thread reads blocks of four neighbouring rows, 16 bytes at once, and keeps a sum per
row and input. DP4A, of compute capability 6.1 or later, multiplies four codes by four inputs; the
sum of a group becomes a float once (`from_start`). With x = q * scale and a weight (code - centre) * s + m:

    sum(x * weight) = sum(q * code) * s * scale + sum(q) * scale * (m - centre * s)

PRMT, which selects four of eight bytes, looks up codes with a table: MXFP4's and IQ4's.
"""

import triton
import triton.language as tl

from neo_desktop.models.linear import grouped

TILE_ROWS: tl.constexpr = tl.constexpr(grouped.TILE_ROWS)
UNIT: tl.constexpr = tl.constexpr(grouped.UNIT)
_VARYING = ("ids", "pairs", "per_row", "out", "count", "rows", "blocks", "out_stride", "bias")
START: tl.constexpr = tl.constexpr(0x4B400000)
_DOT: tl.constexpr = tl.constexpr("dp4a.u32.s32 $0, $1, $2, $3;")
_SIGNED_DOT: tl.constexpr = tl.constexpr("dp4a.s32.s32 $0, $1, $2, $3;")
_LOOK_UP: tl.constexpr = tl.constexpr(
    "{ .reg .b32 low, high; prmt.b32 low, $2, $3, $1; prmt.b32 high, $4, $5, $1;"
    " prmt.b32 $0, low, high, $6; }"
)


@triton.jit(do_not_specialize=("blocks",))
def _round(x, codes, factors, blocks, x_stride, BLOCKS: tl.constexpr):
    """Round rows of inputs; layouts as in `quantised.Rounded`."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.arange(0, 32)[None, :]
    in_row = block < blocks
    at = block[:, None] * 32 + column
    value = tl.load(x + row * x_stride + at, mask=in_row[:, None], other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(value), axis=1) / 127.0
    code = value * tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)[:, None]
    code = (code + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: rounds to the nearest integer
    place = column % 16 // 4 * 2 + column // 16
    into = codes + (row * blocks + block[:, None]) * 32 + place * 4 + column % 4
    tl.store(into, code.to(tl.int8), mask=in_row[:, None])
    first = tl.sum(tl.where(column < 16, code, 0.0), axis=1) * scale
    second = tl.sum(tl.where(column < 16, 0.0, code), axis=1) * scale
    own = factors + (row * blocks + block) * 4
    tl.store(own, scale, mask=in_row)
    tl.store(own + 1, first + second, mask=in_row)
    tl.store(own + 2, first, mask=in_row)
    tl.store(own + 3, second, mask=in_row)


@triton.jit(do_not_specialize=_VARYING)
def _multiply_integers(  # noqa: PLR0912, PLR0915
    codes,  # int64: 8 rounded inputs
    factors,  # int64: 2 floats
    words,
    scales,
    minima,
    scale_units,
    minimum_units,
    bias,
    ids,  # ids, pairs, per_row: see `quantised.multiply_pairs`
    pairs,
    per_row,
    out,
    count,
    rows,
    blocks,
    out_stride,
    CODING: tl.constexpr,  # the weight's `Coding`
    HAS_BIAS: tl.constexpr,
    IS_EXPERT: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    BITS: tl.constexpr = CODING.bits
    GROUPS: tl.constexpr = 32 // CODING.group
    dtype: tl.constexpr = out.dtype.element_ty
    first = tl.program_id(0) * ROWS
    tile = (first // TILE_ROWS).to(tl.int64)
    own = pairs + tl.program_id(1) * COUNT
    leader = 0
    if IS_EXPERT:
        leader = tl.load(own)
        if leader < 0:
            return
        expert = tl.load(ids + leader).to(tl.int64)
        tile += expert * (rows // TILE_ROWS)
        bias += expert * rows
    x_rows = ()
    for m in tl.static_range(COUNT):
        row = _row(own, m, leader, count, IS_EXPERT)
        x_rows = x_rows + ((row // per_row if IS_EXPERT else row) * blocks,)
    places = tl.multiple_of(first % TILE_ROWS, ROWS) + tl.arange(0, ROWS)[None, :]
    words += tile * blocks * (BITS * TILE_ROWS)
    scales += tile * blocks * (GROUPS * TILE_ROWS)
    minima += tile * blocks * (GROUPS * TILE_ROWS)
    scale_units += tile * (blocks * 32 // UNIT) * TILE_ROWS
    minimum_units += tile * (blocks * 32 // UNIT) * TILE_ROWS

    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([STEP, ROWS], tl.float32),)
    for start in range(0, blocks, STEP):
        block = start + tl.arange(0, STEP)[:, None]
        given = block < blocks
        packed = ()
        for word in tl.static_range(BITS):
            at = (block * BITS + word) * TILE_ROWS + places
            packed = packed + (tl.load(words + at, mask=given, other=0),)
        unit = block // (UNIT // 32) * TILE_ROWS + places
        if CODING.has_units:
            scale_unit = tl.load(scale_units + unit, mask=given, other=0.0).to(tl.float32)
            if CODING.has_minima:
                minimum_unit = tl.load(minimum_units + unit, mask=given, other=0.0).to(tl.float32)
        for group in tl.static_range(GROUPS):
            at = (block * GROUPS + group) * TILE_ROWS + places
            by = _as_floats(tl.load(scales + at, mask=given, other=0))
            if CODING.has_units:
                by *= scale_unit
            offset = by * -CODING.centre
            if CODING.has_minima:
                minimum = _as_floats(tl.load(minima + at, mask=given, other=0))
                if CODING.has_units:
                    minimum *= minimum_unit
                offset += minimum
            added = ()
            for m in tl.static_range(COUNT):
                own_block = x_rows[m] + block
                total = tl.full([STEP, ROWS], START, tl.int32)
                for pair in tl.static_range(4):  # of places
                    eight = tl.load(codes + own_block * 4 + pair, mask=given, other=0)
                    if GROUPS == 1 or group == 0:
                        four = _four_codes(packed, 2 * pair, CODING, IS_INTERPRETED)
                        total = _dot(four, eight.to(tl.int32), total, CODING.low != 0, IS_INTERPRETED)
                    if GROUPS == 1 or group == 1:
                        four = _four_codes(packed, 2 * pair + 1, CODING, IS_INTERPRETED)
                        total = _dot(four, (eight >> 32).to(tl.int32), total, CODING.low != 0, IS_INTERPRETED)
                factor = tl.load(factors + own_block * 2, mask=given, other=0)
                value = sums[m] + from_start(total) * by * _low(factor)
                if CODING.has_minima or CODING.centre != 0:
                    if GROUPS == 1:
                        met = _high(factor)
                    else:
                        halves = tl.load(factors + own_block * 2 + 1, mask=given, other=0)
                        met = _low(halves) if group == 0 else _high(halves)
                    value += offset * met
                added = added + (value,)
            sums = added

    row = first + tl.arange(0, ROWS)
    in_rows = row < rows
    added_bias = tl.zeros([ROWS], tl.float32)
    if HAS_BIAS:
        added_bias += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)
    for m in tl.static_range(COUNT):
        total = tl.sum(sums[m], axis=0) + added_bias
        into = out + _row(own, m, leader, count, IS_EXPERT) * out_stride + row
        tl.store(into, total.to(dtype), mask=in_rows)


@triton.jit
def _row(own, place, leader, count, IS_EXPERT: tl.constexpr):
    """Return the number of a row, or of a block's pair; repeat one if there are fewer."""
    if IS_EXPERT:
        pair = tl.load(own + place)
        row = tl.where(pair < 0, leader, pair)
    else:
        row = tl.minimum(place, count - 1)
    return row.to(tl.int64)


@triton.jit
def _as_floats(values):
    """Convert scales; those in 8 bits by their place in the mantissa of 2 ** 23, faster than conversions."""
    if values.dtype == tl.uint8:
        floats = (values.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif values.dtype == tl.int8:
        bits = (values.to(tl.int32) & 255) ^ 0x4B000080
        floats = bits.to(tl.float32, bitcast=True) - 8388736.0
    else:
        floats = values.to(tl.float32)
    return floats


@triton.jit
def from_start(total):
    """Return a sum of integers that started at `START`, the bits of 1.5 * 2 ** 23, as a float."""
    return total.to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def _low(pair):
    return pair.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _high(pair):
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _four_codes(packed, place: tl.constexpr, CODING: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Return codes of a place of a block's words, or their numbers, in bytes; see `Coding.shifts`."""
    FIRST: tl.constexpr = CODING.first
    SECOND: tl.constexpr = CODING.bits - FIRST
    word = packed[place * FIRST // 8]
    part: tl.constexpr = place % (8 // FIRST)
    if CODING.bits == 8:
        four = word
    elif CODING.low == 0:
        four = (word >> (FIRST * part)) & ((2**FIRST - 1) * 0x01010101)
        if SECOND != 0:
            above = packed[FIRST + place * SECOND // 8]
            MASK: tl.constexpr = (2**SECOND - 1) << FIRST
            UP: tl.constexpr = FIRST - place * SECOND % 8
            four |= (above << UP if UP >= 0 else above >> -UP) & (MASK * 0x01010101)
    else:
        four = numbers_of(word >> (16 * part), CODING, IS_INTERPRETED)
    return four


@triton.jit
def numbers_of(half, CODING: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Return the numbers of four codes in the lower half of a word, in bytes."""
    if IS_INTERPRETED:
        four = half & 0
        for i in tl.static_range(4):
            four |= (looked_up((half >> (4 * i)) & 15, CODING) & 255) << (8 * i)
    else:
        four = tl.inline_asm_elementwise(
            _LOOK_UP,
            "=r,r,r,r,r,r,r",
            [
                half & 0x7777,
                _of_table(half, CODING.low),
                _of_table(half, CODING.low >> 32),
                _of_table(half, CODING.high),
                _of_table(half, CODING.high >> 32),
                ((half & 0x8888) >> 1) | 0x3210,  # the position of a number, or 4 + it, of codes from 8
            ],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return four


@triton.jit
def _of_table(like, four: tl.constexpr):
    return tl.full(like.shape, four, tl.int64).to(tl.int32)


@triton.jit
def looked_up(code, CODING: tl.constexpr):
    """Return the numbers of codes from 0 to 15."""
    table = tl.where(code < 8, CODING.low, CODING.high)
    return (table >> ((code & 7) * 8).to(tl.int64)).to(tl.int8).to(tl.int32)


@triton.jit
def _dot(codes, inputs, total, IS_SIGNED: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    if IS_INTERPRETED:
        shifts = 8 * tl.arange(0, 4)[None, None, :]
        code = (codes[:, :, None] >> shifts) & 255
        if IS_SIGNED:
            code = code << 24 >> 24
        total += tl.sum(code * (inputs[:, :, None] << (24 - shifts) >> 24), axis=2)
    elif IS_SIGNED:
        total = tl.inline_asm_elementwise(_SIGNED_DOT, "=r,r,r,r", [codes, inputs, total], tl.int32, True, 1)
    else:
        total = tl.inline_asm_elementwise(_DOT, "=r,r,r,r", [codes, inputs, total], tl.int32, True, 1)
    return total
