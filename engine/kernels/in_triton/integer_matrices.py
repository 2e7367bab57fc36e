"""The kernel of `quantised` that multiplies rounded inputs by packed weights on tensor cores, for many rows.

It is written for single threads: in a tensor `[threads]` an element belongs to the thread with its number.
Tensor cores multiply 16 rows by 32 columns, and four neighbouring threads hold a row's 32 bytes. Here thread
`4 * quad + part` of a warp reads words of four neighbouring rows, 16 bytes at once: every row's places
`2 * part` and `2 * part + 1` of a block (`models.linear.grouped`). So words become operands without
leaving their thread. The inputs' codes have the same order; an instruction takes eight inputs. The warps of a
program share out the blocks of columns.
"""

import triton
import triton.language as tl

from neo_desktop.engine.kernels.in_triton.integer_products import (
    _VARYING,
    START,
    TILE_ROWS,
    UNIT,
    _as_floats,
    _high,
    _low,
    _row,
    from_start,
    numbers_of,
)

MATRIX_ROWS = 32  # per program: eight quads of threads, four rows each


def instructions(*, is_signed: bool, is_whole: bool, has_large: bool) -> str:
    """Return PTX that multiplies places of 16 rows by those of eight inputs.

    Operands: four sums; codes of the first place in two rows; the same of the second place if there are two;
    the inputs' places.

    Args:
        is_signed: codes are signed.
        is_whole: two places per thread, which are a block; False: one place, a group of 16 columns.
        has_large: instructions of compute capability 8.0 exist.
    """
    kind = f"row.col.s32.{'s8' if is_signed else 'u8'}.s8.s32"
    places = (("$4", "$5", "$8"), ("$6", "$7", "$9")) if is_whole else (("$4", "$5", "$6"),)
    if has_large:
        codes = ", ".join(code for *both, _ in places for code in both)
        inputs = ", ".join(each for *_, each in places)
        shape = "m16n8k32" if is_whole else "m16n8k16"
        lines = [
            f"mma.sync.aligned.{shape}.{kind} {{$0, $1, $2, $3}}, {{{codes}}}, {{{inputs}}}, {{z, z, z, z}};"
        ]
    else:
        lines, sums = [], ("z, z", "z, z")
        for *both, inputs in places:
            for code, into, start in zip(both, ("$0, $1", "$2, $3"), sums, strict=True):
                lines.append(
                    f"mma.sync.aligned.m8n8k16.{kind} {{{into}}}, {{{code}}}, {{{inputs}}}, {{{start}}};"
                )
            sums = ("$0, $1", "$2, $3")
    return f"{{ .reg .b32 z; mov.b32 z, 0x4B400000; {' '.join(lines)} }}"


@triton.jit(do_not_specialize=_VARYING)
def _multiply_matrices(  # noqa: PLR0912, PLR0915
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
    WARPS: tl.constexpr,
    MULTIPLY: tl.constexpr,  # see `instructions`
    IS_INTERPRETED: tl.constexpr,
):
    GROUPS: tl.constexpr = 32 // CODING.group
    EIGHTS: tl.constexpr = COUNT // 8
    dtype: tl.constexpr = out.dtype.element_ty
    thread = tl.arange(0, 32 * WARPS)
    quad = thread % 32 // 4
    part = thread % 4
    first = tl.program_id(1) * ROWS
    tile = (first // TILE_ROWS).to(tl.int64)
    first_input = tl.program_id(0) * COUNT
    own = pairs + first_input.to(tl.int64)
    leader = 0
    if IS_EXPERT:
        first_input = 0
        leader = tl.load(own)
        if leader < 0:
            return
        expert = tl.load(ids + leader).to(tl.int64)
        tile += expert * (rows // TILE_ROWS)
        bias += expert * rows
    places = (tl.multiple_of(first % TILE_ROWS, ROWS) + quad * 4)[:, None] + tl.arange(0, 4)[None, :]
    words += tile * blocks * (CODING.bits * TILE_ROWS)
    scales += tile * blocks * (GROUPS * TILE_ROWS)
    minima += tile * blocks * (GROUPS * TILE_ROWS)
    scale_units += tile * (blocks * 32 // UNIT) * TILE_ROWS
    minimum_units += tile * (blocks * 32 // UNIT) * TILE_ROWS
    given_inputs = COUNT
    if COUNT > 16:  # the last eights may be missing
        given_inputs = count - first_input
        if IS_EXPERT:
            given_inputs = tl.sum((tl.load(own + tl.arange(0, COUNT)) >= 0).to(tl.int32), axis=0)
    own_codes = ()
    own_factors = ()
    for eight in tl.static_range(EIGHTS):
        row = _input_row(own, first_input + 8 * eight + quad, leader, count, per_row, IS_EXPERT)
        own_codes = own_codes + (row * (blocks * 4) + part,)
        for i in tl.static_range(2):
            place = first_input + 8 * eight + 2 * part + i
            row = _input_row(own, place, leader, count, per_row, IS_EXPERT)
            own_factors = own_factors + (row * (blocks * 2),)

    sums = ()
    for _ in tl.static_range(8 * EIGHTS):
        sums = sums + (tl.zeros([32 * WARPS], tl.float32),)
    for start in range(0, blocks, WARPS):
        given = start + thread // 32 < blocks
        block = tl.minimum(start + thread // 32, blocks - 1)
        at = (block * CODING.bits)[:, None]
        fours = _codes_of(words + places, at, part, CODING, IS_INTERPRETED)
        unit = (block // (UNIT // 32) * TILE_ROWS)[:, None] + places
        by = ()
        offsets = ()
        for group in tl.static_range(GROUPS):
            at = (block * (GROUPS * TILE_ROWS) + group * TILE_ROWS)[:, None] + places
            values = _as_floats(tl.load(scales + at))
            if CODING.has_units:
                values *= tl.load(scale_units + unit).to(tl.float32)
            by = by + _rows_of(values)
            if CODING.has_minima:
                minimum = _as_floats(tl.load(minima + at))
                if CODING.has_units:
                    minimum *= tl.load(minimum_units + unit).to(tl.float32)
                offsets = offsets + _rows_of(minimum)
            elif CODING.centre != 0:
                offsets = offsets + _rows_of(values * -CODING.centre)
        added = ()
        for eight in tl.static_range(EIGHTS):
            new = ()
            for i in tl.static_range(8):
                new = new + (sums[8 * eight + i],)
            if 8 * eight < given_inputs:
                two = own_factors[2 * eight], own_factors[2 * eight + 1]
                new = _add_eight(
                    new, fours, by, offsets, codes + own_codes[eight] + block * 4,
                    factors + two[0] + block * 2, factors + two[1] + block * 2, given,
                    CODING, MULTIPLY, IS_INTERPRETED,
                )  # fmt: skip
            added = added + new
        sums = added

    lane = tl.arange(0, 32)[:, None]
    number = tl.arange(0, 8)[None, :]  # of a thread's sums, in the order of `_together`
    row = first + lane // 4 * 4 + number // 2 % 2 + number % 2 * 2
    in_rows = row < rows
    added_bias = tl.zeros([32, 8], tl.float32)
    if HAS_BIAS:
        added_bias += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)
    for eight in tl.static_range(EIGHTS):
        total = tl.sum(_together(sums, 8 * eight).reshape(WARPS, 32, 8), axis=0) + added_bias
        place = first_input + 8 * eight + lane % 4 * 2 + number // 4
        if IS_EXPERT:
            pair = tl.load(own + place)
            given = pair >= 0
        else:
            pair = place
            given = place < count
        into = out + pair.to(tl.int64) * out_stride + row
        tl.store(into, total.to(dtype), mask=in_rows & given)


@triton.jit
def _add_eight(
    sums, fours, by, offsets, codes, first_factors, second_factors, given,
    CODING: tl.constexpr, MULTIPLY: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the products of a block's codes with eight inputs to a thread's sums, four rows by two inputs."""
    GROUPS: tl.constexpr = 32 // CODING.group
    HAS_OFFSETS: tl.constexpr = CODING.has_minima or CODING.centre != 0
    IS_SIGNED: tl.constexpr = CODING.low != 0
    inputs = tl.load(codes)
    low = inputs.to(tl.int32)
    high = (inputs >> 32).to(tl.int32)
    first = tl.load(first_factors, mask=given, other=0)
    second = tl.load(second_factors, mask=given, other=0)
    scale = _low(first), _low(second)
    met = _high(first), _high(second)
    if GROUPS == 2 and HAS_OFFSETS:
        first = tl.load(first_factors + 1, mask=given, other=0)
        second = tl.load(second_factors + 1, mask=given, other=0)
        met = _low(first), _low(second), _high(first), _high(second)
    for group in tl.static_range(GROUPS):
        totals = ()
        for two in tl.static_range(0, 8, 4):  # of fours
            if GROUPS == 1:
                totals = totals + _multiply(
                    fours[two], fours[two + 2], fours[two + 1], fours[two + 3], low, high,
                    MULTIPLY, IS_SIGNED, IS_INTERPRETED,
                )  # fmt: skip
            else:
                totals = totals + _multiply_half(
                    fours[two + group], fours[two + 2 + group], low if group == 0 else high,
                    MULTIPLY, IS_SIGNED, IS_INTERPRETED,
                )  # fmt: skip
        added = ()
        for i in tl.static_range(8):
            value = sums[i] + from_start(totals[i]) * by[4 * group + i // 2] * scale[i % 2]
            if HAS_OFFSETS:
                value += offsets[4 * group + i // 2] * met[2 * group + i % 2]
            added = added + (value,)
        sums = added
    return sums


@triton.jit
def _input_row(own, place, leader, count, per_row, IS_EXPERT: tl.constexpr):
    """Return the rows of inputs, which have fewer than 2 ** 31 elements."""
    row = _row(own, place, leader, count, IS_EXPERT).to(tl.int32)
    if IS_EXPERT:
        row = row // per_row
    return row


@triton.jit
def _rows_of(four):
    """Return `[threads, 4]` as four tensors."""
    even, odd = tl.split(tl.reshape(four, (four.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _together(sums, first: tl.constexpr):
    """Return eight sums as `[threads, 2 (inputs), 2, 2 (rows)]`; the last dimension has rows 0 and 2."""
    first_row = tl.join(sums[first], sums[first + 1])
    second_row = tl.join(sums[first + 2], sums[first + 3])
    third_row = tl.join(sums[first + 4], sums[first + 5])
    fourth_row = tl.join(sums[first + 6], sums[first + 7])
    return tl.join(tl.join(first_row, second_row), tl.join(third_row, fourth_row))


@triton.jit
def _codes_of(words, at, part, CODING: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Return two places' codes, or their numbers, in bytes, for each of four rows.

    Args:
        words: pointers to the rows' first words, [threads, 4].
        at: first word of the block.
        part: of the block.
    """
    FIRST: tl.constexpr = CODING.first
    SECOND: tl.constexpr = CODING.bits - FIRST
    MASK: tl.constexpr = (2**FIRST - 1) * 0x01010101
    bit = part[:, None] * (2 * FIRST)
    packed = tl.load(words + (at + bit // 8) * TILE_ROWS)
    if FIRST == 8:
        first = packed
        second = tl.load(words + (at + bit // 8 + 1) * TILE_ROWS)
    elif CODING.low != 0:
        first = numbers_of(packed, CODING, IS_INTERPRETED)
        second = numbers_of(packed >> 16, CODING, IS_INTERPRETED)
    else:
        if FIRST == 2:
            packed >>= bit % 8
        first = packed & MASK
        second = (packed >> FIRST) & MASK
        if SECOND != 0:
            bit = part[:, None] * (2 * SECOND)
            above = tl.load(words + (at + FIRST + bit // 8) * TILE_ROWS) >> (bit % 8)
            MASK_ABOVE: tl.constexpr = ((2**SECOND - 1) << FIRST) * 0x01010101
            first |= (above << FIRST) & MASK_ABOVE
            second |= (above << (FIRST - SECOND)) & MASK_ABOVE
    codes = ()
    firsts = _rows_of(first)
    seconds = _rows_of(second)
    for row in tl.static_range(4):
        codes = codes + (firsts[row], seconds[row])
    return codes


@triton.jit
def _multiply(
    first, first_below, second, second_below, low, high,
    MULTIPLY: tl.constexpr, IS_SIGNED: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Multiply two places of two rows by both places of the inputs; see `instructions`."""
    if IS_INTERPRETED:
        own = _product_of_warps(first, low, IS_SIGNED)
        below = _product_of_warps(first_below, low, IS_SIGNED)
        more = _product_of_warps(second, high, IS_SIGNED)
        more_below = _product_of_warps(second_below, high, IS_SIGNED)
        sums = (
            own[0] + more[0] + START, own[1] + more[1] + START,
            below[0] + more_below[0] + START, below[1] + more_below[1] + START,
        )  # fmt: skip
    else:
        sums = tl.inline_asm_elementwise(
            MULTIPLY,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [first, first_below, second, second_below, low, high],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return sums


@triton.jit
def _multiply_half(
    codes, codes_below, inputs, MULTIPLY: tl.constexpr, IS_SIGNED: tl.constexpr, IS_INTERPRETED: tl.constexpr
):
    """Multiply a place of two rows by one of the inputs; see `instructions`."""
    if IS_INTERPRETED:
        own = _product_of_warps(codes, inputs, IS_SIGNED)
        below = _product_of_warps(codes_below, inputs, IS_SIGNED)
        sums = own[0] + START, own[1] + START, below[0] + START, below[1] + START
    else:
        sums = tl.inline_asm_elementwise(
            MULTIPLY,
            "=&r,=&r,=&r,=&r,r,r,r",
            [codes, codes_below, inputs],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return sums


@triton.jit
def _product_of_warps(codes, inputs, IS_SIGNED: tl.constexpr):
    """Compute what tensor cores do with a place of eight rows and inputs, for Triton's interpreter."""
    WARPS: tl.constexpr = codes.shape[0] // 32
    shifts = 8 * tl.arange(0, 4)[None, :]
    a = (codes[:, None] >> shifts) & 255
    if IS_SIGNED:
        a = a << 24 >> 24
    b = inputs[:, None] << (24 - shifts) >> 24
    a = a.reshape(WARPS, 8, 1, 16)
    b = b.reshape(WARPS, 1, 8, 16)
    even, odd = tl.split(tl.sum(a * b, axis=3).reshape(32 * WARPS, 2))
    return even, odd
