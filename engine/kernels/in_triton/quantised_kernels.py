"""The kernels of `quantised` that multiply floats.

`_multiply_plain`: a thread reads words of four neighbouring rows in one load, and the matching inputs, and
keeps a sum per row and input; one reduction at the end combines the threads. Written into the mantissa of the
power of two p = 2 ** bits, a code becomes the float p + code. One instruction then makes it a weight:

    fma(p + code, scale, -(p + centre) * scale) = (code - centre) * scale

This rounds nothing: a scale has at most 18 bits and its factor 6, or a scale has 11 and a code 8. Minima are
multiplied by the sum of a word's inputs.

`_multiply_tiles`: for more than four rows, arithmetic would take longer than memory. If the GPU has tensor
cores, they multiply inputs by codes, exact in 16 bits, and scales are multiplied by the sums of their groups.
"""

import triton
import triton.language as tl

from neo_desktop.engine.kernels.in_triton.integer_products import looked_up

_VARYING = (
    "bias",
    "ids",
    "blocks",
    "per_row",
    "out",
    "count",
    "rows",
    "blocks_per_row",
    "out_stride",
)


@triton.jit(do_not_specialize=_VARYING)
def _multiply_plain(  # noqa: PLR0912, PLR0915
    x,  # int64: 8 bytes of input elements
    words,
    scales,
    minima,
    scale_units,
    minimum_units,
    bias,
    ids,  # ids, blocks, per_row: see `multiply_pairs`
    blocks,
    per_row,
    out,
    count,
    rows,
    blocks_per_row,
    x_stride,
    out_stride,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,  # bits of the first plane, see `Coding.planes`
    CENTRE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EXPERT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
):
    PLACES: tl.constexpr = 8 // FIRST  # of a word
    GROUPS: tl.constexpr = 32 // GROUP  # of a block; a place with an odd number is in the second
    dtype: tl.constexpr = out.dtype.element_ty
    PER_LOAD: tl.constexpr = 64 // dtype.primitive_bitwidth
    LOADS: tl.constexpr = 4 // PER_LOAD
    first = tl.program_id(0) * ROWS
    tile = (first // TILE_ROWS).to(tl.int64)
    own = blocks + tl.program_id(1) * COUNT
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
    words += tile * blocks_per_row * (BITS * TILE_ROWS)
    scales += tile * blocks_per_row * (GROUPS * TILE_ROWS)
    minima += tile * blocks_per_row * (GROUPS * TILE_ROWS)
    scale_units += tile * (blocks_per_row * 32 // UNIT) * TILE_ROWS
    minimum_units += tile * (blocks_per_row * 32 // UNIT) * TILE_ROWS
    words_per_row = blocks_per_row * FIRST

    # The bits of 2.0 ** BITS, plus 0, which keeps the value in a register and saves an instruction.
    power = ((127 + BITS) << 23) + tl.program_id(2)
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([STEP, ROWS], tl.float32),)
    loaded = _load_words(
        0, words_per_row, words, scales, minima, scale_units, minimum_units, places,
        BITS, FIRST, HAS_MINIMA, HAS_UNITS, TILE_ROWS, GROUP, UNIT, STEP,
    )  # fmt: skip
    for start in range(0, words_per_row, STEP):
        now, above, factors, offsets, unit, minimum_unit = loaded
        column = start + tl.arange(0, STEP)[:, None]  # column of words
        in_row = column < words_per_row
        # loaded during the computation of this step
        loaded = _load_words(
            start + STEP, words_per_row, words, scales, minima, scale_units, minimum_units, places,
            BITS, FIRST, HAS_MINIMA, HAS_UNITS, TILE_ROWS, GROUP, UNIT, STEP,
        )  # fmt: skip
        block = column // FIRST
        place = column % FIRST * PLACES
        if FIRST < BITS:
            _, position = _place_above(column % FIRST, BITS, FIRST)
            above >>= position
        for half in tl.static_range(GROUPS):
            by = factors[half].to(tl.float32)
            if HAS_UNITS:
                by *= unit.to(tl.float32)
            shift = -(2**BITS + CENTRE) * by
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
                        if LOW != 0:
                            code = (now >> (16 * i + 4 * (load * PER_LOAD + j))) & 15
                            number = looked_up(code, LOW, HIGH).to(tl.float32) * by
                        else:
                            number = (
                                _code(now, above, i, load * PER_LOAD + j, power, BITS, FIRST) * by + shift
                            )
                        added = ()
                        all_met = ()
                        for m in tl.static_range(COUNT):
                            one = _input(inputs[m], j, dtype)
                            added = added + (sums[m] + one * number,)
                            all_met = all_met + (met[m] + one,)
                        sums = added
                        met = all_met
            if HAS_MINIMA:
                offset = offsets[half].to(tl.float32)
                if HAS_UNITS:
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
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_UNITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Load words of both planes, and the scales and minima of their groups."""
    SECOND: tl.constexpr = BITS - FIRST
    GROUPS: tl.constexpr = 32 // GROUP
    column = start + tl.arange(0, STEP)[:, None]
    in_row = column < words_per_row
    block = column // FIRST
    if SECOND == 0:
        now = tl.load(words + column * TILE_ROWS + places, mask=in_row, other=0)
        above = now
    else:
        now = tl.load(words + (block * BITS + column % FIRST) * TILE_ROWS + places, mask=in_row, other=0)
        word, _ = _place_above(column % FIRST, BITS, FIRST)
        above = tl.load(words + (block * BITS + word) * TILE_ROWS + places, mask=in_row, other=0)
    factors = ()
    offsets = ()
    scale = now
    for half in tl.static_range(GROUPS):
        group = (block * GROUPS + half) * TILE_ROWS + places
        scale = tl.load(scales + group, mask=in_row, other=0)
        factors = factors + (scale,)
        if HAS_MINIMA:
            offsets = offsets + (tl.load(minima + group, mask=in_row, other=0),)
        else:
            offsets = offsets + (scale,)
    at = block // (UNIT // 32) * TILE_ROWS + places
    unit = scale
    minimum_unit = scale
    if HAS_UNITS:
        unit = tl.load(scale_units + at, mask=in_row, other=0.0)
        minimum_unit = unit
        if HAS_MINIMA:
            minimum_unit = tl.load(minimum_units + at, mask=in_row, other=0.0)
    return now, above, factors, offsets, unit, minimum_unit


@triton.jit
def _first_column(place):
    """Return the first column of a place of a block; see `models.linear.grouped`."""
    return place % 2 * 16 + place // 2 * 4


@triton.jit
def _code(
    first,
    second,
    place: tl.constexpr,
    number: tl.constexpr,
    power,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Return 2 ** BITS plus a place's code, as a float."""
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
def _numbers(
    words,
    above,
    place,
    number,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    CENTRE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Return the floats of codes.

    Args:
        place: of a word of the first plane.
        number: of a place's four codes.
    """
    if LOW != 0:
        codes = (words >> (16 * place + 4 * number)) & 15
        numbers = looked_up(codes, LOW, HIGH).to(tl.float32)
    else:
        codes = (words >> (FIRST * place + 8 * number)) & (2**FIRST - 1)
        if FIRST < BITS:
            SECOND: tl.constexpr = BITS - FIRST
            codes |= ((above >> (SECOND * place + 8 * number)) & (2**SECOND - 1)) << FIRST
        numbers = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (2**23 + CENTRE)
    return numbers


@triton.jit
def _place_above(word, BITS: tl.constexpr, FIRST: tl.constexpr):
    """Return the word of the second plane with the codes of a block's word, and the first code's position."""
    bits = word * (8 // FIRST * (BITS - FIRST))
    return FIRST + bits // 8, bits % 8


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


@triton.jit(do_not_specialize=_VARYING)
def _multiply_tiles(  # noqa: PLR0915
    x,
    words,
    scales,
    minima,
    scale_units,
    minimum_units,
    bias,
    ids,  # ids, blocks, per_row: see `multiply_pairs`
    blocks,
    per_row,
    out,
    count,
    rows,
    blocks_per_row,
    x_stride,
    out_stride,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,  # bits of the first plane, see `Coding.planes`
    CENTRE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EXPERT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
):
    GROUPS: tl.constexpr = 32 // GROUP  # of a block; a place with an odd number is in the second
    PER_WORD: tl.constexpr = GROUP // FIRST  # codes of a group in a word of the first plane
    dtype: tl.constexpr = out.dtype.element_ty
    first = tl.program_id(0) * ROWS
    tile = (first // TILE_ROWS).to(tl.int64)
    places = tl.multiple_of(first % TILE_ROWS, ROWS) + tl.arange(0, ROWS)
    tokens = tl.arange(0, COUNT)
    is_token = tokens < count
    x_row = tokens
    out_row = tokens
    if IS_EXPERT:
        own = blocks + tl.program_id(1) * COUNT
        leader = tl.load(own)
        if leader < 0:
            return
        expert = tl.load(ids + leader).to(tl.int64)
        tile += expert * (rows // TILE_ROWS)
        bias += expert * rows
        pair = tl.load(own + tokens)
        is_token = pair >= 0
        out_row = tl.maximum(pair, 0).to(tl.int64)
        x_row = out_row // per_row
    words += tile * blocks_per_row * (BITS * TILE_ROWS)
    groups_per_row = blocks_per_row * GROUPS
    scales += tile * groups_per_row * TILE_ROWS
    minima += tile * groups_per_row * TILE_ROWS
    scale_units += tile * (blocks_per_row * 32 // UNIT) * TILE_ROWS
    minimum_units += tile * (blocks_per_row * 32 // UNIT) * TILE_ROWS
    # Codes of a group in the order of places; with two groups, a place has every other column of four.
    number = tl.arange(0, GROUP)
    column = number if GROUPS == 2 else number // 4 % 2 * 16 + number // 8 * 4 + number % 4
    x_rows = x + x_row[None, :, None] * x_stride + column[None, None, :]
    code = tl.arange(0, PER_WORD)[None, None, :, None]
    word = tl.arange(0, FIRST)[None, :, None, None]

    sums = tl.zeros([STEP, COUNT, ROWS], tl.float32)  # a warp computes a group
    for start in range(0, groups_per_row, STEP):
        group = start + tl.arange(0, STEP)
        in_row = group < groups_per_row
        block = (group // GROUPS)[:, None, None, None]
        mask = in_row[:, None, None, None]
        own_rows = words + places[None, None, None, :]
        packed = tl.load(own_rows + (block * BITS + word) * TILE_ROWS, mask=mask, other=0)
        above = packed
        if FIRST < BITS:
            other, position = _place_above(word, BITS, FIRST)
            above = tl.load(own_rows + (block * BITS + other) * TILE_ROWS, mask=mask, other=0) >> position
        place = code // 4 * GROUPS + (group % GROUPS)[:, None, None, None]
        numbers = _numbers(packed, above, place, code % 4, BITS, FIRST, CENTRE, LOW, HIGH)
        numbers = numbers.to(dtype).reshape(STEP, GROUP, ROWS)
        given = in_row[:, None, None] & is_token[None, :, None]
        inputs = tl.load(x_rows + group[:, None, None] * GROUP, mask=given, other=0.0)
        by = group[:, None] * TILE_ROWS + places[None, :]
        unit = group[:, None] // (UNIT // GROUP) * TILE_ROWS + places[None, :]
        scale = _scale(scales + by, scale_units + unit, in_row[:, None], HAS_UNITS)
        sums += tl.dot(inputs, numbers) * scale[:, None, :]
        if HAS_MINIMA:
            minimum = _scale(minima + by, minimum_units + unit, in_row[:, None], HAS_UNITS)
            ones = tl.full([STEP, GROUP, ROWS], 1.0, dtype)
            sums += tl.dot(inputs, ones) * minimum[:, None, :]

    row = first + tl.arange(0, ROWS)
    in_rows = row < rows
    total = tl.sum(sums, axis=0)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    into = out + out_row[:, None] * out_stride + row[None, :]
    tl.store(into, total.to(dtype), mask=is_token[:, None] & in_rows[None, :])


@triton.jit(do_not_specialize=("rows", "count", "blocks_per_row"))
def _dequantise(
    words,
    scales,
    minima,
    scale_units,
    minimum_units,
    rows,
    first,
    out,
    count,
    blocks_per_row,
    IS_FIRST: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,  # bits of the first plane, see `Coding.planes`
    CENTRE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_UNITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    GROUPS: tl.constexpr = 32 // GROUP
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if IS_FIRST:
        begin = first + tl.program_id(0) * ROWS
        tile = (begin // TILE_ROWS).to(tl.int64)
        place = tl.multiple_of(begin % TILE_ROWS, ROWS) + tl.arange(0, ROWS)[None, None, :]
    else:
        row = tl.load(rows + index, mask=index < count, other=0)[None, None, :]
        tile = (row // TILE_ROWS).to(tl.int64)
        place = row % TILE_ROWS
    # Unneeded rows need no mask, since tiles are complete.
    block = tl.program_id(1) * STEP + tl.arange(0, STEP * FIRST)[:, None, None] // FIRST
    word = tl.arange(0, STEP * FIRST)[:, None, None] % FIRST
    code = tl.arange(0, 32 // FIRST)[None, :, None]
    mask = block < blocks_per_row
    own_rows = words + tile * blocks_per_row * (BITS * TILE_ROWS) + place
    packed = tl.load(own_rows + (block * BITS + word) * TILE_ROWS, mask=mask, other=0)
    above = packed
    if FIRST < BITS:
        other, position = _place_above(word, BITS, FIRST)
        above = tl.load(own_rows + (block * BITS + other) * TILE_ROWS, mask=mask, other=0) >> position
    numbers = _numbers(packed, above, code // 4, code % 4, BITS, FIRST, CENTRE, LOW, HIGH)
    numbers = numbers.reshape(STEP, 4, 2, 4, ROWS).permute(0, 2, 1, 3, 4).reshape(STEP * GROUPS, GROUP, ROWS)

    group = tl.program_id(1) * STEP * GROUPS + tl.arange(0, STEP * GROUPS)[:, None, None]
    mask = group < blocks_per_row * GROUPS
    by = (tile * blocks_per_row * GROUPS + group) * TILE_ROWS + place
    unit = tile * (blocks_per_row * 32 // UNIT) + group // (UNIT // GROUP)
    unit = unit * TILE_ROWS + place
    numbers *= _scale(scales + by, scale_units + unit, mask, HAS_UNITS)
    if HAS_MINIMA:
        numbers += _scale(minima + by, minimum_units + unit, mask, HAS_UNITS)
    lines = numbers.to(out.dtype.element_ty).reshape(STEP * 32, ROWS).trans()
    columns = blocks_per_row * 32
    in_line = tl.program_id(1) * STEP * 32 + tl.arange(0, STEP * 32)[None, :]
    into = out + index.to(tl.int64)[:, None] * columns + in_line
    tl.store(into, lines, mask=(index < count)[:, None] & (in_line < columns))
