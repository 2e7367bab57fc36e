"""Matmuls of few rows with a matrix of 4 or 8 bits, and dequantisation of its rows.

With few rows, a matmul should take as long as reading the matrix. Neither weights nor inputs are rounded.
"""

import torch
import triton
from torch import Tensor

from neo_desktop.engine.kernels.in_triton.paged_decode import has_tensor_cores
from neo_desktop.engine.kernels.in_triton.quantised_kernels import (
    _dequantise,
    _multiply_plain,
    _multiply_tiles,
)
from neo_desktop.models.linear.codes import UNIT
from neo_desktop.models.linear.grouped import MOST_ROWS, TILE_ROWS, Grouped

PLAIN_ROWS = 4  # most input rows without tensor cores, if the GPU has them.
ROWS = 16  # matrix rows per program.
TILES_ROWS = 32  # matrix rows per program on tensor cores.
STEP_WORDS = 64  # words of a row per step.
STEP_COLUMNS_TILES = 256  # columns per step on tensor cores.
STEP_COLUMNS = 256  # columns per program of the dequantisation.
NUM_WARPS = 8


def multiply_few(x: Tensor, weight: Grouped, bias: Tensor | None, out: Tensor) -> None:
    """Compute `models.linear.grouped.multiply_few`."""
    count, coding = len(x), weight.coding
    assert 0 < count <= MOST_ROWS
    assert x.shape[1] == weight.columns
    assert x.stride(1) == out.stride(1) == 1
    assert x.dtype is out.dtype
    stride = x.stride(0) if count > 1 else weight.columns
    assert stride % 16 == x.data_ptr() % 16 == 0
    constants = {
        **_constants(weight),
        "HAS_BIAS": bias is not None,
        "IS_EXPERT": False,
        "num_warps": NUM_WARPS,
        "enable_fp_fusion": True,
    }
    stored = (
        *_pointers(weight),
        out if bias is None else bias,
        *(out, out, 1),  # unused: ids, blocks and per_row of experts
        out,
        count,
        weight.rows,
    )
    if count > PLAIN_ROWS and x.dtype is not torch.float32 and has_tensor_cores(x.device):
        _multiply_tiles[(triton.cdiv(weight.rows, TILES_ROWS),)](
            x,
            *stored,
            weight.columns // weight.coding.group,
            stride,
            out.stride(0),
            COUNT=MOST_ROWS,
            ROWS=TILES_ROWS,
            STEP=STEP_COLUMNS_TILES // coding.group,
            num_stages=3,
            **constants,
        )
        return
    eights = x.view(torch.int64)
    _multiply_plain[(triton.cdiv(weight.rows, ROWS),)](
        eights,
        *stored,
        weight.words.shape[1],
        stride * x.element_size() // 8,
        out.stride(0),
        COUNT=1 if count == 1 else PLAIN_ROWS if count <= PLAIN_ROWS else MOST_ROWS,
        ROWS=ROWS,
        STEP=STEP_WORDS,
        **constants,
    )


def multiply_pairs(
    x: Tensor,
    per_row: int,
    weight: Grouped,
    bias: Tensor | None,
    rows: int,
    ids: Tensor,
    blocks: Tensor,
    out: Tensor,
) -> None:
    """Multiply rows by the matrices of their experts into `out`; see `experts`.

    Args:
        x: [n, columns]; a row is contiguous.
        per_row: Pairs per row of x.
        weight: [experts * rows, columns]
        bias: [experts * rows]
        rows: Matrix rows per expert, a multiple of 64.
        ids: [pairs] int32: the pairs' experts.
        blocks: [blocks, count] int32: pairs; count is 1, 4 or 16.
        out: [pairs, rows] in the dtype of x; a row is contiguous.
    """
    count, coding = blocks.shape[1], weight.coding
    assert x.stride(1) == out.stride(1) == 1
    stride = x.stride(0) if len(x) > 1 else weight.columns
    assert stride % 16 == x.data_ptr() % 16 == 0
    constants = {
        **_constants(weight),
        "HAS_BIAS": bias is not None,
        "IS_EXPERT": True,
        "num_warps": NUM_WARPS,
        "enable_fp_fusion": True,
    }
    stored = (
        *_pointers(weight),
        out if bias is None else bias,
        *(ids, blocks, per_row),
        out,
        count,
        rows,
    )
    if count > PLAIN_ROWS:
        _multiply_tiles[(triton.cdiv(rows, TILES_ROWS), len(blocks))](
            x,
            *stored,
            weight.columns // weight.coding.group,
            stride,
            out.stride(0),
            COUNT=count,
            ROWS=TILES_ROWS,
            STEP=STEP_COLUMNS_TILES // coding.group,
            num_stages=3,
            **constants,
        )
        return
    _multiply_plain[(triton.cdiv(rows, ROWS), len(blocks))](
        x.view(torch.int64),
        *stored,
        weight.words.shape[1],
        stride * x.element_size() // 8,
        out.stride(0),
        COUNT=count,
        ROWS=ROWS,
        STEP=STEP_WORDS,
        **constants,
    )


def dequantise(weight: Grouped, rows: Tensor | int, out: Tensor) -> None:
    """Compute `models.linear.grouped.dequantise`."""
    assert out.is_contiguous()
    assert out.shape[1] == weight.columns
    if not len(out):
        return
    is_first = isinstance(rows, int)
    _dequantise[triton.cdiv(len(out), ROWS), triton.cdiv(weight.columns, STEP_COLUMNS)](
        *_pointers(weight),
        out if is_first else rows,
        rows if is_first else 0,
        out,
        len(out),
        weight.words.shape[1],
        IS_FIRST=is_first,
        **_constants(weight),
        ROWS=ROWS,
        STEP=STEP_COLUMNS // weight.per_word,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _pointers(weight: Grouped) -> tuple[Tensor, ...]:
    """Return the tensors of a weight; kernels do not read the stand-ins for missing tensors."""
    every = (weight.minima, weight.scale_units, weight.minimum_units)
    return weight.words, weight.scales, *(weight.scales if each is None else each for each in every)


def _constants(weight: Grouped) -> dict[str, int]:
    coding = weight.coding
    return {
        "BITS": coding.bits,
        "CENTRE": coding.centre,
        "HAS_MINIMA": coding.has_minima,
        "HAS_UNITS": coding.has_units,
        "TILE_ROWS": TILE_ROWS,
        "GROUP": coding.group,
        "UNIT": UNIT,
    }
