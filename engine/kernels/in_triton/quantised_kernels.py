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
    "words_per_row",
    "groups_per_row",
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
    words_per_row,
    x_stride,
    out_stride,
    BITS: tl.constexpr,
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
    PER_WORD: tl.constexpr = 32 // BITS
    dtype: tl.constexpr = out.dtype.element_ty
    PER_LOAD: tl.constexpr = 64 // dtype.primitive_bitwidth
    LOADS: tl.constexpr = PER_WORD // PER_LOAD
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
    groups_per_row = words_per_row * PER_WORD // GROUP
    words += tile * words_per_row * TILE_ROWS
    scales += tile * groups_per_row * TILE_ROWS
    minima += tile * groups_per_row * TILE_ROWS
    scale_units += tile * (groups_per_row * GROUP // UNIT) * TILE_ROWS
    minimum_units += tile * (groups_per_row * GROUP // UNIT) * TILE_ROWS

    # The bits of 2.0 ** BITS, plus 0, which keeps the value in a register and saves an instruction.
    power = ((127 + BITS) << 23) + tl.program_id(2)
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([STEP, ROWS], tl.float32),)
    column = tl.arange(0, STEP)[:, None]  # column of words
    in_row = column < words_per_row
    group = column // (GROUP // PER_WORD) * TILE_ROWS + places
    packed = tl.load(words + column * TILE_ROWS + places, mask=in_row, other=0)
    scale = tl.load(scales + group, mask=in_row, other=0)
    minimum = tl.load(minima + group, mask=in_row, other=0) if HAS_MINIMA else scale
    unit = column // (UNIT // PER_WORD) * TILE_ROWS + places
    scale_unit = tl.load(scale_units + unit, mask=in_row, other=0.0) if HAS_UNITS else scale
    minimum_unit = scale_unit
    if HAS_UNITS and HAS_MINIMA:
        minimum_unit = tl.load(minimum_units + unit, mask=in_row, other=0.0)
    for start in range(0, words_per_row, STEP):
        column = start + tl.arange(0, STEP)[:, None]
        now = packed
        by = scale.to(tl.float32)
        offset = minimum.to(tl.float32)
        if HAS_UNITS:
            by *= scale_unit.to(tl.float32)
            offset *= minimum_unit.to(tl.float32)
        in_row = column < words_per_row
        after = column + STEP  # loaded during the computation of this step
        in_after = after < words_per_row
        group = after // (GROUP // PER_WORD) * TILE_ROWS + places
        packed = tl.load(words + after * TILE_ROWS + places, mask=in_after, other=0)
        scale = tl.load(scales + group, mask=in_after, other=0)
        if HAS_MINIMA:
            minimum = tl.load(minima + group, mask=in_after, other=0)
        if HAS_UNITS:
            unit = after // (UNIT // PER_WORD) * TILE_ROWS + places
            scale_unit = tl.load(scale_units + unit, mask=in_after, other=0.0)
            if HAS_MINIMA:
                minimum_unit = tl.load(minimum_units + unit, mask=in_after, other=0.0)
        shift = -(2**BITS + CENTRE) * by
        met = ()
        for _ in tl.static_range(COUNT):
            met = met + (tl.zeros([STEP, 1], tl.float32),)
        for load in tl.static_range(LOADS):
            inputs = ()
            for m in tl.static_range(COUNT):
                if IS_EXPERT:
                    eights = x_rows[m] + column * LOADS + load
                else:
                    eights = x + tl.minimum(m, count - 1) * x_stride + column * LOADS + load
                inputs = inputs + (tl.load(eights, mask=in_row, other=0),)
            for i in tl.static_range(PER_LOAD):
                if LOW != 0:
                    code = (now >> (BITS * (load * PER_LOAD + i))) & 15
                    number = looked_up(code, LOW, HIGH).to(tl.float32) * by
                else:
                    number = _code(now, load * PER_LOAD + i, power, BITS) * by + shift
                added = ()
                all_met = ()
                for m in tl.static_range(COUNT):
                    one = _input(inputs[m], i, dtype)
                    added = added + (sums[m] + one * number,)
                    all_met = all_met + (met[m] + one,)
                sums = added
                met = all_met
        if HAS_MINIMA:
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
def _code(packed, place: tl.constexpr, power, BITS: tl.constexpr):
    """Return 2 ** BITS plus the code at a position in a word, as a float."""
    UP: tl.constexpr = 23 - BITS - (place % 4 * 8 + place // 4 * BITS)
    if UP >= 0:  # noqa: SIM108 - the branch that is not taken must not be compiled
        moved = packed << UP
    else:
        moved = packed >> -UP
    return ((moved & ((2**BITS - 1) << (23 - BITS))) | power).to(tl.float32, bitcast=True)


@triton.jit
def _shifts(BITS: tl.constexpr, LOW: tl.constexpr):
    place = tl.arange(0, 32 // BITS)
    shifts = place % 4 * 8 + place // 4 * BITS
    if LOW != 0:
        shifts = BITS * place
    return shifts


@triton.jit
def _numbers(codes, BITS: tl.constexpr, CENTRE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return the floats of codes in the lowest bits."""
    codes &= 2**BITS - 1
    numbers = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (2**23 + CENTRE)
    if LOW != 0:
        numbers = looked_up(codes, LOW, HIGH).to(tl.float32)
    return numbers


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
    groups_per_row,
    x_stride,
    out_stride,
    BITS: tl.constexpr,
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
    PER_WORD: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = GROUP // PER_WORD
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
    words += tile * groups_per_row * WORDS * TILE_ROWS
    scales += tile * groups_per_row * TILE_ROWS
    minima += tile * groups_per_row * TILE_ROWS
    scale_units += tile * (groups_per_row * GROUP // UNIT) * TILE_ROWS
    minimum_units += tile * (groups_per_row * GROUP // UNIT) * TILE_ROWS
    x_rows = x + x_row[None, :, None] * x_stride + tl.arange(0, GROUP)[None, None, :]

    sums = tl.zeros([STEP, COUNT, ROWS], tl.float32)  # a warp computes a group
    for start in range(0, groups_per_row, STEP):
        group = start + tl.arange(0, STEP)
        in_row = group < groups_per_row
        word = group[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        packed = tl.load(
            words + word[:, :, None, None] * TILE_ROWS + places[None, None, None, :],
            mask=in_row[:, None, None, None],
            other=0,
        )
        shifts = _shifts(BITS, LOW)[None, None, :, None]
        numbers = _numbers(packed >> shifts, BITS, CENTRE, LOW, HIGH).to(dtype).reshape(STEP, GROUP, ROWS)
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


@triton.jit(do_not_specialize=("rows", "count", "words_per_row"))
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
    words_per_row,
    IS_FIRST: tl.constexpr,
    BITS: tl.constexpr,
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
    PER_WORD: tl.constexpr = 32 // BITS
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if IS_FIRST:
        begin = first + tl.program_id(0) * ROWS
        tile = (begin // TILE_ROWS).to(tl.int64)
        place = tl.multiple_of(begin % TILE_ROWS, ROWS) + tl.arange(0, ROWS)[None, None, :]
    else:
        row = tl.load(rows + index, mask=index < count, other=0)[None, None, :]
        tile = (row // TILE_ROWS).to(tl.int64)
        place = row % TILE_ROWS
    column = tl.program_id(1) * STEP + tl.arange(0, STEP)[:, None, None]  # column of words
    in_row = column < words_per_row  # unneeded rows need no mask, since tiles are complete
    group = tile * (words_per_row * PER_WORD // GROUP) + column // (GROUP // PER_WORD)
    packed = tl.load(words + (tile * words_per_row + column) * TILE_ROWS + place, mask=in_row, other=0)
    group = group * TILE_ROWS + place
    unit = tile * (words_per_row * PER_WORD // UNIT) + column // (UNIT // PER_WORD)
    unit = unit * TILE_ROWS + place
    scale = _scale(scales + group, scale_units + unit, in_row, HAS_UNITS)
    numbers = _numbers(packed >> _shifts(BITS, LOW)[None, :, None], BITS, CENTRE, LOW, HIGH) * scale
    if HAS_MINIMA:
        numbers += _scale(minima + group, minimum_units + unit, in_row, HAS_UNITS)
    lines = numbers.to(out.dtype.element_ty).reshape(STEP * PER_WORD, ROWS).trans()
    columns = words_per_row * PER_WORD
    in_line = tl.program_id(1) * STEP * PER_WORD + tl.arange(0, STEP * PER_WORD)[None, :]
    into = out + index.to(tl.int64)[:, None] * columns + in_line
    tl.store(into, lines, mask=(index < count)[:, None] & (in_line < columns))
