"""The kernel of `quantised` that makes rows of floats from packed weights."""

import triton
import triton.language as tl

from neo_desktop.engine.kernels.in_triton.integer_products import looked_up


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
def _scale(scales, units, mask, HAS_UNITS: tl.constexpr):
    """Return scales or minima, multiplied by their units."""
    values = tl.load(scales, mask=mask, other=0).to(tl.float32)
    if HAS_UNITS:
        values *= tl.load(units, mask=mask, other=0.0).to(tl.float32)
    return values
