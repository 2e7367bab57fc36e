"""The kernels of `quantised` for many rows of floats: tiles of a product, and dequantising.

`_multiply_tiles`: for more than four rows, arithmetic would take longer than memory. If the GPU has tensor
cores, they multiply inputs by codes, exact in 16 bits, and scales are multiplied by the sums of their groups.
"""

import triton
import triton.language as tl

from neo_desktop.engine.kernels.in_triton.integer_products import _VARYING, TILE_ROWS, UNIT
from neo_desktop.engine.kernels.in_triton.quantised_kernels import _numbers, _place_above, _scale


@triton.jit(do_not_specialize=_VARYING)
def _multiply_tiles(  # noqa: PLR0915
    x,
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
    GROUP: tl.constexpr = CODING.group
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
        own = pairs + tl.program_id(1) * COUNT
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
    words += tile * blocks * (BITS * TILE_ROWS)
    groups_per_row = blocks * GROUPS
    scales += tile * groups_per_row * TILE_ROWS
    minima += tile * groups_per_row * TILE_ROWS
    scale_units += tile * (blocks * 32 // UNIT) * TILE_ROWS
    minimum_units += tile * (blocks * 32 // UNIT) * TILE_ROWS
    # Input columns of the codes. With one group per block, runs of four columns alternate between its halves.
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
            other, position = _place_above(word, CODING)
            above = tl.load(own_rows + (block * BITS + other) * TILE_ROWS, mask=mask, other=0) >> position
        place = code // 4 * GROUPS + (group % GROUPS)[:, None, None, None]
        numbers = _numbers(packed, above, place, code % 4, CODING)
        numbers = numbers.to(dtype).reshape(STEP, GROUP, ROWS)
        given = in_row[:, None, None] & is_token[None, :, None]
        inputs = tl.load(x_rows + group[:, None, None] * GROUP, mask=given, other=0.0)
        by = group[:, None] * TILE_ROWS + places[None, :]
        unit = group[:, None] // (UNIT // GROUP) * TILE_ROWS + places[None, :]
        scale = _scale(scales + by, scale_units + unit, in_row[:, None], CODING.has_units)
        sums += tl.dot(inputs, numbers) * scale[:, None, :]
        if CODING.has_minima:
            minimum = _scale(minima + by, minimum_units + unit, in_row[:, None], CODING.has_units)
            ones = tl.full([STEP, GROUP, ROWS], 1.0, dtype)
            sums += tl.dot(inputs, ones) * minimum[:, None, :]

    row = first + tl.arange(0, ROWS)
    in_rows = row < rows
    total = tl.sum(sums, axis=0)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    into = out + out_row[:, None] * out_stride + row[None, :]
    tl.store(into, total.to(dtype), mask=is_token[:, None] & in_rows[None, :])


@triton.jit(do_not_specialize=("rows", "count", "blocks"))
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
    blocks,
    IS_FIRST: tl.constexpr,
    CODING: tl.constexpr,  # the weight's `Coding`
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    BITS: tl.constexpr = CODING.bits
    FIRST: tl.constexpr = CODING.first
    GROUP: tl.constexpr = CODING.group
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
    mask = block < blocks
    own_rows = words + tile * blocks * (BITS * TILE_ROWS) + place
    packed = tl.load(own_rows + (block * BITS + word) * TILE_ROWS, mask=mask, other=0)
    above = packed
    if FIRST < BITS:
        other, position = _place_above(word, CODING)
        above = tl.load(own_rows + (block * BITS + other) * TILE_ROWS, mask=mask, other=0) >> position
    numbers = _numbers(packed, above, code // 4, code % 4, CODING)
    numbers = numbers.reshape(STEP, 4, 2, 4, ROWS).permute(0, 2, 1, 3, 4).reshape(STEP * GROUPS, GROUP, ROWS)

    group = tl.program_id(1) * STEP * GROUPS + tl.arange(0, STEP * GROUPS)[:, None, None]
    mask = group < blocks * GROUPS
    by = (tile * blocks * GROUPS + group) * TILE_ROWS + place
    unit = tile * (blocks * 32 // UNIT) + group // (UNIT // GROUP)
    unit = unit * TILE_ROWS + place
    numbers *= _scale(scales + by, scale_units + unit, mask, CODING.has_units)
    if CODING.has_minima:
        numbers += _scale(minima + by, minimum_units + unit, mask, CODING.has_units)
    lines = numbers.to(out.dtype.element_ty).reshape(STEP * 32, ROWS).trans()
    columns = blocks * 32
    in_line = tl.program_id(1) * STEP * 32 + tl.arange(0, STEP * 32)[None, :]
    into = out + index.to(tl.int64)[:, None] * columns + in_line
    tl.store(into, lines, mask=(index < count)[:, None] & (in_line < columns))
