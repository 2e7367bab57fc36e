"""The kernel of `quantised` that multiplies floats by packed weights, for few rows.

A thread reads words of four neighbouring rows in one load, and the matching inputs, and
keeps a sum per row and input; one reduction at the end combines the threads. Written into the mantissa of the
power of two p = 2 ** bits, a code becomes the float p + code. One instruction then makes it a weight:

    fma(p + code, scale, -(p + centre) * scale) = (code - centre) * scale

This rounds nothing: a scale has at most 18 bits and its factor 6, or a scale has 11 and a code 8. Minima are
multiplied by the sum of a word's inputs.
"""

import triton
import triton.language as tl

from neo_desktop.engine.kernels.in_triton.integer_products import _VARYING, TILE_ROWS, UNIT, looked_up


@triton.jit(do_not_specialize=_VARYING)
def _multiply_plain(  # noqa: PLR0912, PLR0915
    x,  # int64: 8 bytes of input elements
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
    x_stride,
    out_stride,
    CODING: tl.constexpr,  # the weight's `Coding`
    HAS_BIAS: tl.constexpr,
    IS_EXPERT: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
):
    BITS: tl.constexpr = CODING.bits
    FIRST: tl.constexpr = CODING.first
    PLACES: tl.constexpr = 8 // FIRST  # of a word
    GROUPS: tl.constexpr = 32 // CODING.group  # of a block; a place with an odd number is in the second
    dtype: tl.constexpr = out.dtype.element_ty
    PER_LOAD: tl.constexpr = 64 // dtype.primitive_bitwidth
    LOADS: tl.constexpr = 4 // PER_LOAD
    first = tl.program_id(0) * ROWS
    tile = (first // TILE_ROWS).to(tl.int64)
    own = pairs + tl.program_id(1) * COUNT
    if IS_EXPERT:
        leader = tl.load(own)
        if leader < 0:
            return
        expert = tl.load(ids + leader).to(tl.int64)
        tile += expert * (rows // TILE_ROWS)
        bias += expert * rows
    x_rows = ()
    out_rows = ()
    if IS_EXPERT:
        for m in tl.static_range(COUNT):  # repeat the first pair if the block has fewer
            pair = tl.load(own + m)
            pair = tl.where(pair < 0, leader, pair).to(tl.int64)
            x_rows = x_rows + (x + pair // per_row * x_stride,)
            out_rows = out_rows + (out + pair * out_stride,)
    places = tl.multiple_of(first % TILE_ROWS, ROWS) + tl.arange(0, ROWS)[None, :]
    words += tile * blocks * (BITS * TILE_ROWS)
    scales += tile * blocks * (GROUPS * TILE_ROWS)
    minima += tile * blocks * (GROUPS * TILE_ROWS)
    scale_units += tile * (blocks * 32 // UNIT) * TILE_ROWS
    minimum_units += tile * (blocks * 32 // UNIT) * TILE_ROWS
    words_per_row = blocks * FIRST

    # The bits of 2.0 ** BITS, plus 0, which keeps the value in a register and saves an instruction.
    power = ((127 + BITS) << 23) + tl.program_id(2)
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([STEP, ROWS], tl.float32),)
    loaded = _load_words(
        0, words_per_row, words, scales, minima, scale_units, minimum_units, places, CODING, STEP
    )
    for start in range(0, words_per_row, STEP):
        now, above, factors, offsets, unit, minimum_unit = loaded
        column = start + tl.arange(0, STEP)[:, None]  # column of words
        in_row = column < words_per_row
        # loaded during the computation of this step
        loaded = _load_words(
            start + STEP, words_per_row, words, scales, minima, scale_units, minimum_units, places,
            CODING, STEP,
        )  # fmt: skip
        block = column // FIRST
        place = column % FIRST * PLACES
        if FIRST < BITS:
            _, position = _place_above(column % FIRST, CODING)
            above >>= position
        for half in tl.static_range(GROUPS):
            by = factors[half].to(tl.float32)
            if CODING.has_units:
                by *= unit.to(tl.float32)
            shift = -(2**BITS + CODING.centre) * by
            met = ()
            for _ in tl.static_range(COUNT):
                met = met + (tl.zeros([STEP, 1], tl.float32),)
            for i in tl.static_range(half, PLACES, GROUPS):
                four = block * (32 // PER_LOAD) + _first_column(place + i) // PER_LOAD
                for load in tl.static_range(LOADS):
                    inputs = ()
                    for m in tl.static_range(COUNT):
                        if IS_EXPERT:
                            eights = x_rows[m] + four + load
                        else:
                            eights = x + tl.minimum(m, count - 1) * x_stride + four + load
                        inputs = inputs + (tl.load(eights, mask=in_row, other=0),)
                    for j in tl.static_range(PER_LOAD):
                        if CODING.low != 0:
                            code = (now >> (16 * i + 4 * (load * PER_LOAD + j))) & 15
                            number = looked_up(code, CODING).to(tl.float32) * by
                        else:
                            number = _code(now, above, i, load * PER_LOAD + j, power, CODING) * by + shift
                        added = ()
                        all_met = ()
                        for m in tl.static_range(COUNT):
                            one = _input(inputs[m], j, dtype)
                            added = added + (sums[m] + one * number,)
                            all_met = all_met + (met[m] + one,)
                        sums = added
                        met = all_met
            if CODING.has_minima:
                offset = offsets[half].to(tl.float32)
                if CODING.has_units:
                    offset *= minimum_unit.to(tl.float32)
                added = ()
                for m in tl.static_range(COUNT):
                    added = added + (sums[m] + met[m] * offset,)
                sums = added

    row = first + tl.arange(0, ROWS)
    in_rows = row < rows
    added_bias = tl.zeros([ROWS], tl.float32)
    if HAS_BIAS:
        added_bias += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)
    for m in tl.static_range(COUNT):
        total = tl.sum(sums[m], axis=0) + added_bias
        if IS_EXPERT:  # noqa: SIM108 - the branch that is not taken must not be compiled
            into = out_rows[m] + row
        else:  # repeat the last row if the batch has fewer
            into = out + tl.minimum(m, count - 1) * out_stride + row
        tl.store(into, total.to(dtype), mask=in_rows)


@triton.jit
def _load_words(
    start,
    words_per_row,
    words,
    scales,
    minima,
    scale_units,
    minimum_units,
    places,
    CODING: tl.constexpr,
    STEP: tl.constexpr,
):
    """Load words of both planes, and the scales and minima of their groups."""
    BITS: tl.constexpr = CODING.bits
    FIRST: tl.constexpr = CODING.first
    GROUPS: tl.constexpr = 32 // CODING.group
    column = start + tl.arange(0, STEP)[:, None]
    in_row = column < words_per_row
    block = column // FIRST
    if FIRST == BITS:
        now = tl.load(words + column * TILE_ROWS + places, mask=in_row, other=0)
        above = now
    else:
        now = tl.load(words + (block * BITS + column % FIRST) * TILE_ROWS + places, mask=in_row, other=0)
        word, _ = _place_above(column % FIRST, CODING)
        above = tl.load(words + (block * BITS + word) * TILE_ROWS + places, mask=in_row, other=0)
    factors = ()
    offsets = ()
    scale = now
    for half in tl.static_range(GROUPS):
        group = (block * GROUPS + half) * TILE_ROWS + places
        scale = tl.load(scales + group, mask=in_row, other=0)
        factors = factors + (scale,)
        if CODING.has_minima:
            offsets = offsets + (tl.load(minima + group, mask=in_row, other=0),)
        else:
            offsets = offsets + (scale,)
    at = block // (UNIT // 32) * TILE_ROWS + places
    unit = scale
    minimum_unit = scale
    if CODING.has_units:
        unit = tl.load(scale_units + at, mask=in_row, other=0.0)
        minimum_unit = unit
        if CODING.has_minima:
            minimum_unit = tl.load(minimum_units + at, mask=in_row, other=0.0)
    return now, above, factors, offsets, unit, minimum_unit


@triton.jit
def _first_column(place):
    """Return the first column of a place of a block; see `models.linear.grouped`."""
    return place % 2 * 16 + place // 2 * 4


@triton.jit
def _code(first, second, place: tl.constexpr, number: tl.constexpr, power, CODING: tl.constexpr):
    """Return 2 ** BITS plus a place's code, as a float."""
    BITS: tl.constexpr = CODING.bits
    FIRST: tl.constexpr = CODING.first
    bits = _moved(first, 23 - BITS - (8 * number + FIRST * place)) & ((2**FIRST - 1) << (23 - BITS))
    if FIRST < BITS:
        SECOND: tl.constexpr = BITS - FIRST
        high = _moved(second, 23 - SECOND - (8 * number + SECOND * place))
        bits |= high & ((2**SECOND - 1) << (23 - SECOND))
    return (bits | power).to(tl.float32, bitcast=True)


@triton.jit
def _moved(word, up: tl.constexpr):
    if up >= 0:  # noqa: SIM108 - the branch that is not taken must not be compiled
        moved = word << up
    else:
        moved = word >> -up
    return moved


@triton.jit
def _numbers(words, above, place, number, CODING: tl.constexpr):
    """Return the floats of codes.

    Args:
        place: of a word of the first plane.
        number: of a place's four codes.
    """
    FIRST: tl.constexpr = CODING.first
    SECOND: tl.constexpr = CODING.bits - FIRST
    if CODING.low != 0:
        codes = (words >> (16 * place + 4 * number)) & 15
        numbers = looked_up(codes, CODING).to(tl.float32)
    else:
        codes = (words >> (FIRST * place + 8 * number)) & (2**FIRST - 1)
        if SECOND != 0:
            codes |= ((above >> (SECOND * place + 8 * number)) & (2**SECOND - 1)) << FIRST
        numbers = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (2**23 + CODING.centre)
    return numbers


@triton.jit
def _place_above(word, CODING: tl.constexpr):
    """Return the word of the second plane with the codes of a block's word, and the first code's position."""
    bits = word * (8 // CODING.first * (CODING.bits - CODING.first))
    return CODING.first + bits // 8, bits % 8


@triton.jit
def _input(loaded, place: tl.constexpr, dtype: tl.constexpr):
    """Return an element of 8 bytes as a float."""
    SIZE: tl.constexpr = dtype.primitive_bitwidth
    bits = (loaded >> (SIZE * place)).to(tl.int32)
    if dtype == tl.float16:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (bits << (32 - SIZE)).to(tl.float32, bitcast=True)


@triton.jit
def _scale(scales, units, mask, HAS_UNITS: tl.constexpr):
    """Return scales or minima, multiplied by their units."""
    values = tl.load(scales, mask=mask, other=0).to(tl.float32)
    if HAS_UNITS:
        values *= tl.load(units, mask=mask, other=0.0).to(tl.float32)
    return values
