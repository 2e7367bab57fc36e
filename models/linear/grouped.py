"""Matrices of 2 to 8 bits on a GPU, with a scale for each group of 16 or 32 numbers.

A number is `(code - centre) * scale + minimum`. A block of 32 columns has eight places of four codes: place
`2 * w + h` has the columns from `16 * h + 4 * w` on. So a word of 4-bit codes serves both groups of 16.
Codes of 3, 5 and 6 bits are divided: 2 or 4 bits in one plane of words, the others in a second plane. 64 rows
are interleaved, so that neighbouring threads read neighbouring words:

    words             [tiles of 64 rows, columns / 32 * bits, 64] int32: a block's planes, see `Coding.shifts`
    scales, minima    [tiles, columns / numbers of a group, 64] float16; 8-bit integers for K types,
                      bfloat16 for MXFP4
    scale_units, minimum_units    only K types: [tiles, columns / 256, 64] float16, factors on the above

These operators use torch; `engine.kernels` has faster ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from neo_desktop.models.linear.packed import Room

TILE_ROWS = 64
MOST_ROWS = 16  # of inputs of a kernel that multiplies packed weights
LOADING_BYTES = 64 * 1024**2  # upper bound of the memory to pack a piece of a file
PIECE_BYTES = 32 * 1024**2  # of a matrix that is dequantised and multiplied at once
BLOCK = 32  # columns
Dequantise = Callable[["Grouped", Tensor | int, Tensor], None]
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values, whose scales are halved
UNIT = 256  # numbers in a block of K types; they share a float16 factor on their scales


@dataclass(frozen=True, slots=True)
class Coding:
    """Encoding of a type's numbers: each is `(code - centre) * scale + minimum`, or `table[code] * scale`."""

    bits: int
    centre: int
    has_minima: bool = False
    group: int = 32  # numbers that share a scale
    scale_dtype: torch.dtype = torch.float16
    table: tuple[int, ...] = ()  # of 16 numbers

    @property
    def has_units(self) -> bool:
        """True if scales are integers, to be multiplied by a float16 unit."""
        return not self.scale_dtype.is_floating_point

    @property
    def first(self) -> int:
        """Bits per code in the first plane of words."""
        return next(bits for bits in (8, 4, 2) if bits <= self.bits)

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits per code in every plane of words, the lowest bits first."""
        return (self.first, self.bits - self.first) if self.bits > self.first else (self.first,)

    @property
    def low(self) -> int:
        """The first half of the table, as eight signed bytes; 0: there is no table."""
        return _eight_bytes(self.table[:8])

    @property
    def high(self) -> int:
        """The second half of the table."""
        return _eight_bytes(self.table[8:])

    def shifts(self, plane: int) -> tuple[tuple[int, ...], ...]:
        """Return the positions of a word's codes, `[places of a word][4]`, in a plane of these bits.

        Four codes are in one byte each, for DP4A, or in neighbouring half bytes, for look-ups.
        """
        apart, step = (16, 4) if self.table else (plane, 8)
        return tuple(tuple(apart * place + step * code for code in range(4)) for place in range(8 // plane))


def _eight_bytes(numbers: tuple[int, ...]) -> int:
    return int.from_bytes(bytes(number % 256 for number in numbers), "little", signed=True)


CODINGS = {
    "Q8_0": Coding(8, 128),
    "Q4_0": Coding(4, 8),
    "Q4_1": Coding(4, 0, has_minima=True),
    "Q5_0": Coding(5, 16),
    "Q5_1": Coding(5, 0, has_minima=True),
    "Q2_K": Coding(2, 0, has_minima=True, group=16, scale_dtype=torch.uint8),
    "Q3_K": Coding(3, 4, group=16, scale_dtype=torch.int8),
    "Q4_K": Coding(4, 0, has_minima=True, scale_dtype=torch.uint8),
    "Q5_K": Coding(5, 0, has_minima=True, scale_dtype=torch.uint8),
    "Q6_K": Coding(6, 32, group=16, scale_dtype=torch.int8),
    "IQ4_NL": Coding(4, 0, table=IQ4),
    "IQ4_XS": Coding(4, 0, scale_dtype=torch.int8, table=IQ4),
    "MXFP4": Coding(4, 0, scale_dtype=torch.bfloat16, table=FP4),
}
"""Keys are the names of GGUF types."""


def packed_bytes(type_name: str, rows: int, columns: int) -> int:
    """Return the bytes of a packed matrix, padded to whole tiles."""
    coding = CODINGS[type_name]
    scales = columns // coding.group * (1 if coding.has_units else 2)
    units = columns // UNIT * 2 if coding.has_units else 0
    row_bytes = columns * coding.bits // 8 + (scales + units) * (2 if coding.has_minima else 1)
    return -(-rows // TILE_ROWS) * TILE_ROWS * row_bytes


class Grouped:
    """A matrix in this layout.

    Args:
        memory: allocates bytes that the device reads; None: device memory.
    """

    def __init__(
        self, type_name: str, rows: int, columns: int, device: torch.device, memory: Room | None = None
    ) -> None:
        self.type_name, self.rows, self.columns = type_name, rows, columns
        self.coding: Coding = CODINGS[type_name]
        tiles = -(-rows // TILE_ROWS)

        def room(numbers: int, dtype: torch.dtype, each: int = 1) -> Tensor:
            shape = tiles, columns // numbers * each, TILE_ROWS
            if memory is None:
                return torch.zeros(shape, dtype=dtype, device=device)
            return memory(prod(shape) * dtype.itemsize).view(dtype).view(shape).zero_()

        self.words = room(BLOCK, torch.int32, self.coding.bits)
        self.scales = room(self.coding.group, self.coding.scale_dtype)
        has_units, has_minima = self.coding.has_units, self.coding.has_minima
        self.minima = room(self.coding.group, self.coding.scale_dtype) if has_minima else None
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

    def store(self, row: int, codes: Tensor, others: Sequence[Tensor]) -> None:
        """Write rows from `row` on.

        Args:
            codes: [rows, columns] uint8, or of another shape in this order.
            others: scales and so on, [rows, …], in the order of `tensors`.
        """
        count = len(others[0])
        words = _packed(codes.reshape(count, -1, BLOCK), self.coding)
        small = (
            each.view(to.dtype) if each.dtype.itemsize == 1 else each
            for each, to in zip(others, self.tensors()[1:], strict=True)
        )
        values = words.view(count, -1), *small
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


@cache
def _shifts(coding: Coding, plane: int, device: torch.device) -> Tensor:
    """Return `Coding.shifts` on a device; a copy per call would block the launching thread."""
    return torch.tensor(coding.shifts(plane), dtype=torch.int32, device=device)


def _packed(codes: Tensor, coding: Coding) -> Tensor:
    """Pack codes `[rows, blocks, 32]` uint8 into words `[rows, blocks, bits]`."""
    places = torch.unflatten(codes, 2, (2, 4, 4)).transpose(2, 3).flatten(2, 3).int()
    words, below = [], 0
    for plane in coding.planes:
        shifts = _shifts(coding, plane, codes.device)
        parts = torch.unflatten((places >> below) & (2**plane - 1), 2, (plane, -1))
        words.append((parts << shifts).sum((3, 4), dtype=torch.int32))
        below += plane
    return torch.cat(words, 2)


def _unpacked(words: Tensor, coding: Coding) -> Tensor:
    """Return the codes `[rows, columns]` int32 of words `[rows, blocks * bits]`."""
    planes = torch.split(torch.unflatten(words, 1, (-1, coding.bits)), list(coding.planes), 2)
    places, below = torch.zeros((), dtype=torch.int32, device=words.device), 0
    for plane, part in zip(coding.planes, planes, strict=True):
        shifts = _shifts(coding, plane, words.device)
        codes = (part[:, :, :, None, None] >> shifts) & (2**plane - 1)
        places = places + (codes.flatten(2, 3) << below)
        below += plane
    return torch.unflatten(places, 2, (4, 2)).transpose(2, 3).flatten(1)


def dequantise(weight: Grouped, rows: Tensor | int, out: Tensor) -> None:
    """Write rows to `out` `[n, columns]`, of any floating-point dtype: rounded once, from float32.

    Args:
        rows: row numbers, `[n]` int64; or the first of n consecutive rows, a multiple of 64.
        out: contiguous.
    """
    if isinstance(rows, int):
        rows = torch.arange(rows, rows + len(out), device=out.device)
    at = rows // TILE_ROWS, slice(None), rows % TILE_ROWS
    coding = weight.coding
    codes = _unpacked(weight.words[at], coding)
    if coding.table:
        codes = torch.tensor(coding.table, dtype=torch.int32, device=out.device)[codes]
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
