"""Matmuls of few rows with a matrix of 2 to 8 bits, and dequantisation of its rows.

With few rows, a matmul should take as long as reading the matrix. At the level "integers" inputs are rounded
to 8 bits per block of 32, as on a CPU; at "exact" neither weights nor inputs are rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels.in_triton.integer_matrices import (
    MATRIX_ROWS,
    _multiply_matrices,
    instructions,
)
from neo_desktop.engine.kernels.in_triton.integer_products import _multiply_integers, _round
from neo_desktop.engine.kernels.in_triton.paged_decode import has_tensor_cores
from neo_desktop.engine.kernels.in_triton.quantised_kernels import _multiply_plain
from neo_desktop.engine.kernels.in_triton.tile_kernels import _dequantise, _multiply_tiles
from neo_desktop.models.linear.grouped import (
    BLOCK,
    MOST_ROWS,
    PIECE_BYTES,
    Grouped,
    multiply_many,
    parts_of,
)

SLICED_ROWS = 128  # most rows of inputs that packed weights are multiplied by, in slices.
PLAIN_ROWS = 4  # most input rows without tensor cores, if the GPU has them.
COUNTS = (1, 2, 4, 8, 16, 64)  # of inputs, for which kernels with integers are compiled
FEW = 4  # most inputs of integer dot products; more are multiplied on tensor cores.
ROUNDED_BLOCKS = 16  # blocks per program
ROWS = 16  # matrix rows per program.
TILES_ROWS = 32  # matrix rows per program on tensor cores.
STEP_WORDS = 64  # words of a row per step.
STEP_COLUMNS_TILES = 256  # columns per step on tensor cores.
STEP_COLUMNS = 256  # columns per program of the dequantisation.
NUM_WARPS = 8
SMS_ELSEWHERE = 64  # multiprocessors, where no GPU is


class Rounded(NamedTuple):
    """Rows of inputs in 8 bits."""

    codes: Tensor  # [n, columns] int8
    factors: Tensor  # [n, columns / 32, 4] float32: the scale, and its products with sums: all, each half's


@dataclass(frozen=True, slots=True)
class Product:
    """A matmul of few rows, or of experts' pairs."""

    weight: Grouped  # the matrix, or the experts' matrices
    bias: Tensor | None  # of the weight's rows
    rows: int  # of a matrix
    out: Tensor  # a row is contiguous
    count: int  # rows of inputs, or pairs per block
    # ids, pairs and per_row of `multiply_pairs`; None: all inputs meet one matrix
    pairs: tuple[Tensor, Tensor, int] | None = None

    def grid(self, rows: int) -> tuple[int, int]:
        return triton.cdiv(self.rows, rows), 1 if self.pairs is None else len(self.pairs[1])

    def launch(
        self,
        kernel: Any,
        inputs: Sequence[Tensor],
        strides: tuple[int, ...],
        rows: int,
        grid: tuple[int, int] | None = None,
        **constants: Any,
    ) -> None:
        """Launch a kernel whose programs compute `rows` matrix rows each.

        It does not read the stand-ins for missing tensors.

        Args:
            strides: what follows the arguments that all kernels have.
            grid: programs; None: tiles of matrix rows, then blocks of pairs.
        """
        bias = self.out if self.bias is None else self.bias
        pairs = (self.out, self.out, 1) if self.pairs is None else self.pairs
        kernel[grid or self.grid(rows)](
            *inputs,
            *_pointers(self.weight),
            bias,
            *pairs,
            self.out,
            self.count,
            self.rows,
            *strides,
            self.out.stride(0),
            ROWS=rows,
            HAS_BIAS=self.bias is not None,
            IS_EXPERT=self.pairs is not None,
            CODING=self.weight.coding,
            **constants,
            enable_fp_fusion=True,
        )


def multiply_packed(x: Tensor, weights: Sequence[Grouped], bias: Tensor | None, out: Tensor) -> None:
    """Compute `models.linear.grouped.multiply_packed`; some rows more than a kernel takes are sliced."""
    assert x.stride(1) == out.stride(1) == 1
    assert x.dtype is out.dtype
    if len(x) > sliced_rows(out.device):
        multiply_many(x, weights, bias, out, dequantise)
        return
    step = SLICED_ROWS if multiplies_integers() else MOST_ROWS
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        _multiply_few(x[rows], weights, bias, out[rows])


def _multiply_few(x: Tensor, weights: Sequence[Grouped], bias: Tensor | None, out: Tensor) -> None:
    inputs = inputs_of(x)
    for weight, offset, target in parts_of(weights, bias, out):
        assert x.shape[1] == weight.columns
        product = Product(weight, offset, weight.rows, target, len(x))
        if isinstance(inputs, Rounded):
            _multiply_by_integers(
                inputs, product, next((each for each in COUNTS if len(x) <= each), COUNTS[-1])
            )
        elif len(x) > PLAIN_ROWS and x.dtype is not torch.float32 and has_tensor_cores(x.device):
            _multiply_in_tiles(inputs, product, MOST_ROWS)
        else:
            most = 1 if len(x) == 1 else PLAIN_ROWS if len(x) <= PLAIN_ROWS else MOST_ROWS
            _multiply_by_floats(inputs, product, most)


def multiply_pairs(
    x: Tensor | Rounded,
    per_row: int,
    weight: Grouped,
    bias: Tensor | None,
    rows: int,
    ids: Tensor,
    pairs: Tensor,
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
        pairs: [blocks, count] int32: numbers of pairs; count is 1, 4, 8, 16 or 64.
        out: [pairs, rows] in the dtype of x; a row is contiguous.
    """
    count = pairs.shape[1]
    assert out.stride(1) == 1
    product = Product(weight, bias, rows, out, count, (ids, pairs, per_row))
    if isinstance(x, Rounded):
        _multiply_by_integers(x, product, count)
    elif count > PLAIN_ROWS:
        _multiply_in_tiles(x, product, count)
    else:
        _multiply_by_floats(x, product, count)


def multiplies_integers() -> bool:
    """Return True if kernels round their inputs, at the current fallback level."""
    return fallbacks.level("quantised") == "integers"


def inputs_of(x: Tensor) -> Tensor | Rounded:
    """Return rows as the kernels of the current fallback level take them; columns are a multiple of 32."""
    if not multiplies_integers():
        return x
    rows, columns = x.shape
    assert x.stride(1) == 1
    blocks = columns // BLOCK
    codes = torch.empty(rows, columns, dtype=torch.int8, device=x.device)
    factors = torch.empty(rows, blocks, 4, dtype=torch.float32, device=x.device)
    _round[rows, triton.cdiv(blocks, ROUNDED_BLOCKS)](
        x, codes, factors, blocks, x.stride(0), BLOCKS=ROUNDED_BLOCKS, num_warps=2, enable_fp_fusion=False
    )
    return Rounded(codes, factors)


def _multiply_by_integers(x: Rounded, product: Product, most: int) -> None:
    """Multiply rounded inputs; `most`: the rows that the kernel is compiled for."""
    inputs = x.codes.view(torch.int64), x.factors.view(torch.int64)
    sizes = (x.codes.shape[1] // BLOCK,)
    is_interpreted = bool(triton.knobs.runtime.interpret)
    device = product.out.device
    if most > FEW:
        coding = product.weight.coding
        tiles, blocks = product.grid(MATRIX_ROWS)
        # Programs of the same matrix rows are neighbours, so that these rows are read from memory once.
        grid = (blocks if product.pairs else triton.cdiv(product.count, most)), tiles
        warps = 8 if grid[0] * grid[1] < 4 * _num_sms(device) else 4
        multiply = instructions(
            is_signed=bool(coding.table), is_whole=coding.group == BLOCK, has_large=has_tensor_cores(device)
        )
        product.launch(
            _multiply_matrices,
            inputs,
            sizes,
            MATRIX_ROWS,
            grid,
            COUNT=most,
            WARPS=warps,
            MULTIPLY=multiply,
            IS_INTERPRETED=is_interpreted,
            num_warps=warps,
        )
        return
    grid = product.grid(ROWS)
    programs_per_sm = grid[0] * grid[1] / _num_sms(device)
    step, num_warps = 32, 4  # chosen on an H200: few programs need more threads each
    if most == 1 and programs_per_sm < 4:
        step, num_warps = 128, 8
    elif programs_per_sm <= 2:
        step, num_warps = 64, 8
    product.launch(
        _multiply_integers,
        inputs,
        sizes,
        ROWS,
        COUNT=most,
        STEP=step,
        IS_INTERPRETED=is_interpreted,
        num_warps=num_warps,
    )


def _multiply_in_tiles(x: Tensor, product: Product, most: int) -> None:
    sizes = product.weight.columns // BLOCK, _stride(x)
    product.launch(
        _multiply_tiles,
        (x,),
        sizes,
        TILES_ROWS,
        COUNT=most,
        STEP=STEP_COLUMNS_TILES // product.weight.coding.group,
        num_stages=3,
        num_warps=NUM_WARPS,
    )


def _multiply_by_floats(x: Tensor, product: Product, most: int) -> None:
    sizes = product.weight.columns // BLOCK, _stride(x) * x.element_size() // 8
    inputs = (x.view(torch.int64),)
    product.launch(_multiply_plain, inputs, sizes, ROWS, COUNT=most, STEP=STEP_WORDS, num_warps=NUM_WARPS)


def _stride(x: Tensor) -> int:
    stride = x.stride(0) if len(x) > 1 else x.shape[1]
    assert x.stride(1) == 1
    assert stride % 16 == x.data_ptr() % 16 == 0
    return stride


def sliced_rows(device: torch.device) -> int:
    """Return the most rows that meet packed weights; more rows meet a dequantised matrix.

    That matrix passes through memory, unless a piece fits into the second-level cache.
    """
    if multiplies_integers() or _has_small_cache(device):
        return SLICED_ROWS
    return 2 * MOST_ROWS if device.type == "cuda" else MOST_ROWS


@cache
def _has_small_cache(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    cache_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
    return cache_bytes < PIECE_BYTES


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return SMS_ELSEWHERE
    return torch.cuda.get_device_properties(device).multi_processor_count


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
        weight.columns // BLOCK,
        IS_FIRST=is_first,
        CODING=weight.coding,
        ROWS=ROWS,
        STEP=STEP_COLUMNS // BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _pointers(weight: Grouped) -> tuple[Tensor, ...]:
    """Return the tensors of a weight; kernels do not read the stand-ins for missing tensors."""
    every = (weight.minima, weight.scale_units, weight.minimum_units)
    return weight.words, weight.scales, *(weight.scales if each is None else each for each in every)
