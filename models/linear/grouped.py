"""Matrices of 2, 4 or 8 bits on a GPU, with a scale for each group of 16 or 32 numbers.

A number is `(code - centre) * scale + minimum`. Codes are packed into words of 32 bits, see `Coding.shifts`.
64 rows are interleaved, so that neighbouring threads read neighbouring words:

    words             [tiles of 64 rows, columns / numbers of a word, 64] int32
    scales, minima    [tiles, columns / numbers of a group, 64] float16; 8-bit integers for K types,
                      bfloat16 for MXFP4
    scale_units, minimum_units    only K types: [tiles, columns / 256, 64] float16, factors on the above

These operators use torch; `engine.kernels` has faster ones.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from neo_desktop.models.gguf.types import BY_NAME
from neo_desktop.models.linear.codes import CODINGS, UNIT, Coding, decode

TILE_ROWS = 64
MOST_ROWS = 16  # of inputs of a kernel that multiplies packed weights
LOADING_BYTES = 64 * 1024**2  # upper bound of the memory to pack a piece of a file
PIECE_BYTES = 32 * 1024**2  # of a matrix that is dequantised and multiplied at once
WIDENED = {name: coding.bits for name, coding in CODINGS.items() if coding.is_wider}
"""Types that take more bits in memory than in files -> bits in memory."""
Dequantise = Callable[["Grouped", Tensor | int, Tensor], None]


def packed_bytes(type_name: str, rows: int, columns: int) -> int:
    """Return the bytes of a packed matrix, padded to whole tiles."""
    coding = CODINGS[type_name]
    scales = columns // coding.group * (1 if coding.has_units else 2)
    units = columns // UNIT * 2 if coding.has_units else 0
    row_bytes = columns * coding.bits // 8 + (scales + units) * (2 if coding.has_minima else 1)
    return -(-rows // TILE_ROWS) * TILE_ROWS * row_bytes


class Grouped:
    """A matrix in this layout."""

    def __init__(self, type_name: str, rows: int, columns: int, device: torch.device) -> None:
        self.type_name, self.rows, self.columns = type_name, rows, columns
        self.coding: Coding = CODINGS[type_name]
        self.per_word = 32 // self.coding.bits
        tiles = -(-rows // TILE_ROWS)

        def room(numbers: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(tiles, columns // numbers, TILE_ROWS, dtype=dtype, device=device)

        self.words = room(self.per_word, torch.int32)
        self.scales = room(self.coding.group, self.coding.scale_dtype)
        has_units, has_minima = self.coding.has_units, self.coding.has_minima
        self.minima = torch.zeros_like(self.scales) if has_minima else None
        self.scale_units = room(UNIT, torch.float16) if has_units else None
        self.minimum_units = room(UNIT, torch.float16) if has_units and has_minima else None

    def tensors(self) -> list[Tensor]:
        every = (self.words, self.scales, self.minima, self.scale_units, self.minimum_units)
        return [tensor for tensor in every if tensor is not None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def to(self, device: torch.device) -> "Grouped":
        copy = Grouped(self.type_name, self.rows, self.columns, device)
        for target, source in zip(copy.tensors(), self.tensors(), strict=True):
            target.copy_(source)
        return copy

    def fill(self, generator: torch.Generator) -> None:
        """Fill with random numbers, for measurements and checks."""
        for tensor in self.tensors():
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.01, generator=generator)
            else:
                limits = torch.iinfo(tensor.dtype)
                tensor.random_(limits.min, limits.max, generator=generator)

    def load(self, row: int, raw: Tensor) -> None:
        """Load rows in the file's format, `[rows, bytes of a row]` uint8.

        Raises ValueError for scales that are not finite.
        """
        blocks = raw.to(self.words.device).reshape(-1, BY_NAME[self.type_name].nbytes)
        codes, *others = decode(self.type_name, blocks)
        if any(each.is_floating_point() and not each.isfinite().all() for each in others):
            raise ValueError("scales that are not finite")
        self.store(row, codes, [each.reshape(len(raw), -1) for each in others])

    def store(self, row: int, codes: Tensor, others: Sequence[Tensor]) -> None:
        """Write rows from `row` on.

        Args:
            codes: [rows, columns] uint8, or of another shape in this order.
            others: scales and so on, [rows, …], in the order of `tensors`.
        """
        count, bits = len(others[0]), self.coding.bits
        if bits < 8:
            parts = codes.view(-1, 4, 2).mT if self.coding.table else codes.view(-1, 8 // bits, 4)
            codes, *rest = parts.unbind(1)
            for place, part in enumerate(rest, start=1):
                codes = codes | (part << (bits * place))
        small = (
            each.view(to.dtype) if each.dtype.itemsize == 1 else each
            for each, to in zip(others, self.tensors()[1:], strict=True)
        )
        values = codes.reshape(count, -1).contiguous().view(torch.int32), *small
        if row % TILE_ROWS == count % TILE_ROWS == 0:
            tiles = slice(row // TILE_ROWS, (row + count) // TILE_ROWS)
            for target, new in zip(self.tensors(), values, strict=True):
                target[tiles].copy_(new.view(-1, TILE_ROWS, new.shape[1]).mT)
            return
        rows = torch.arange(row, row + count, device=self.words.device)
        at = rows // TILE_ROWS, slice(None), rows % TILE_ROWS
        for target, new in zip(self.tensors(), values, strict=True):
            target[at] = new

    def scales_of(self, at: tuple[Tensor, slice, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return scales and minima `[n, groups, 1]` of some rows, in float32."""

        def product(values: Tensor | None, units: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            floats = values[at].float()
            if units is not None:
                floats = (
                    floats.view(len(floats), -1, UNIT // self.coding.group) * units[at].float()[:, :, None]
                )
            return floats.reshape(len(floats), -1, 1)

        scales = product(self.scales, self.scale_units)
        assert scales is not None
        return scales, product(self.minima, self.minimum_units)


def dequantise(weight: Grouped, rows: Tensor | int, out: Tensor) -> None:
    """Write rows to `out` `[n, columns]`, of any floating-point dtype: rounded once, from float32.

    Args:
        rows: row numbers, `[n]` int64; or the first of n consecutive rows, a multiple of 64.
        out: contiguous.
    """
    if isinstance(rows, int):
        rows = torch.arange(rows, rows + len(out), device=out.device)
    at = rows // TILE_ROWS, slice(None), rows % TILE_ROWS
    coding, device = weight.coding, out.device
    shifts = torch.tensor(coding.shifts, dtype=torch.int32, device=device)
    codes = (weight.words[at][:, :, None] >> shifts) & (2**coding.bits - 1)
    if coding.table:
        codes = torch.tensor(coding.table, dtype=torch.int32, device=device)[codes]
    numbers = (codes - coding.centre).float().view(len(out), -1, coding.group)
    scales, minima = weight.scales_of(at)
    numbers *= scales
    if minima is not None:
        numbers += minima
    out.copy_(numbers.view_as(out))


def multiply_packed(x: Tensor, weights: Sequence[Grouped], bias: Tensor | None, out: Tensor) -> None:
    """Write `x @ torch.cat(weights).T + bias` to `out`.

    Args:
        x: [n, columns]; a row is contiguous.
        out: [n, rows], in x's dtype; a row is contiguous.
    """
    multiply_many(x, weights, bias, out, dequantise)


def rounded(x: Tensor) -> Tensor:
    """Return inputs as kernels that multiply integers round them: to 8 bits per block of 32, in float32."""
    blocks = x.float().view(len(x), -1, 32)
    scales = blocks.abs().amax(2, keepdim=True) / 127.0
    return ((blocks * scales.clamp(min=1e-38).reciprocal()).round() * scales).view(x.shape)


def parts_of(
    weights: Sequence[Grouped], bias: Tensor | None, out: Tensor
) -> Iterator[tuple[Grouped, Tensor | None, Tensor]]:
    """Yield matrices with their parts of the bias and of the output."""
    first = 0
    for weight in weights:
        rows = slice(first, first := first + weight.rows)
        yield weight, None if bias is None else bias[rows], out[:, rows]


def multiply_many(
    x: Tensor, weights: Sequence[Grouped], bias: Tensor | None, out: Tensor, dequantise: Dequantise
) -> None:
    """Do the same; dequantise one piece of a matrix after the other to x's dtype."""
    for weight, offset, target in parts_of(weights, bias, out):
        step = max(PIECE_BYTES // (weight.columns * x.element_size()) // TILE_ROWS, 1) * TILE_ROWS
        room = x.new_empty(min(step, weight.rows), weight.columns)
        for first in range(0, weight.rows, step):
            rows = slice(first, min(first + step, weight.rows))
            piece = room[: rows.stop - first]
            dequantise(weight, first, piece)
            if offset is None:
                torch.mm(x, piece.t(), out=target[:, rows])
            else:
                torch.addmm(offset[rows], x, piece.t(), out=target[:, rows])
