"""Positions of a tensor's numbers in row buffers, computed by running view operators on their addresses."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from neo_desktop.models.row_stages import Call, RowStage
from neo_desktop.native import Buffer, Columns, Step

ROWS = 5  # rows in tensors of addresses; differs from every size of a model
# An address is buffer * _BUFFER + row * _ROW + column.
_ROW, _BUFFER = 1 << 24, 1 << 28
_MOST_MOVES = 256  # of one value; with more, the graph's own operators are as fast


class NotRowsError(Exception):
    """An operator or layout that row programs do not support."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a graph, for `ROWS` rows.

    Torch's own view operators run on its addresses.
    """

    at: Tensor  # addresses of its numbers, in its shape
    dtype: torch.dtype

    @classmethod
    def new(cls, buffer: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> "Value":
        """Return a tensor whose rows are contiguous in a buffer.

        Args:
            shape: of a row, without dimension `dim`, which counts the rows.
            dim: position of the row dimension.
        """
        columns = torch.arange(torch.Size(shape).numel()).view(1, *shape)
        rows = torch.arange(ROWS).view(ROWS, *[1] * len(shape))
        address = buffer * _BUFFER + rows * _ROW + columns
        return cls(address.movedim(0, dim), dtype)


class Complex(NamedTuple):
    """A tensor of complex numbers."""

    real: Value
    imaginary: Value

    @classmethod
    def of(cls, pairs: Value) -> Self:
        """Return the tensor whose numbers are pairs [..., 2]."""
        return cls(*(replace(pairs, at=pairs.at[..., part]) for part in range(2)))

    def pairs(self) -> Value:
        """Return the numbers as pairs [..., 2]."""
        return replace(self.real, at=torch.stack([part.at for part in self], dim=-1))

    def times(self, other: Self, compute: Callable[[str, Value, Value], Value]) -> Self:
        """Multiply by numbers; `compute`: an operator of two values by its name."""
        (a, b), (c, d) = self, other
        real = compute("subtract", compute("times", a, c), compute("times", b, d))
        return type(self)(real, compute("add", compute("times", a, d), compute("times", b, c)))


def row_dim(at: Tensor) -> int:
    """Return the dimension of addresses that counts rows. Raise NotRowsError if no dimension does."""
    rows = at % _BUFFER // _ROW
    for dim, size in enumerate(at.shape):
        expected = torch.arange(ROWS).view(-1, *[1] * (at.dim() - 1 - dim)) if size == ROWS else None
        if expected is not None and torch.equal(rows, expected.expand_as(rows)):
            return dim
    raise NotRowsError("a value without rows")


def of_row(at: Tensor) -> Tensor:
    """Return the addresses of one row, in the order of the other dimensions [width].

    Raise NotRowsError if rows differ in more than the row number.
    """
    rows = at.movedim(row_dim(at), 0).reshape(ROWS, -1)
    expected = rows[0] + torch.arange(ROWS)[:, None] * _ROW
    if not torch.equal(rows, expected):
        raise NotRowsError("rows that combine several rows")
    return rows[0]


def columns_of(row: Tensor) -> dict[int, Tensor]:
    """Return buffer -> columns of a row's addresses."""
    buffers = row // _BUFFER
    return {buffer: row[buffers == buffer] % _ROW for buffer in set(buffers.tolist())}


def grouped(row: Tensor, length: int) -> Columns | None:
    """Return addresses [groups * length] as strided columns of a buffer; None: they have no single stride."""
    groups = row.view(-1, length)
    first = int(groups[0, 0])
    stride = int(groups[1, 0]) - first if len(groups) > 1 else length
    expected = first + torch.arange(len(groups))[:, None] * stride + torch.arange(length)
    if stride < 0 or stride >= _ROW or not torch.equal(groups, expected):
        return None
    return Columns(first // _BUFFER, first % _ROW, stride)


def row_shape(at: Tensor, dim: int) -> tuple[int, ...]:
    """Return the shape of a row, without a batch dimension before the rows, which are dimension `dim`."""
    sizes = tuple(size for place, size in enumerate(at.shape) if place != dim)
    return sizes[1:] if dim > 0 and len(sizes) > 1 and sizes[0] == 1 else sizes


def with_addresses(value: Any) -> Any:
    """Return arguments with addresses in place of values."""
    return tree_map(lambda each: each.at if isinstance(each, Value) else each, value)


def moves_of(row: Tensor, into: Columns) -> list[Step]:
    """Return steps that copy the numbers at addresses [width] to columns; few, but not always the fewest."""
    breaks = [0, *(torch.nonzero(row.diff() != 1).flatten() + 1).tolist(), len(row)]
    runs = [(first, int(row[first]), last - first) for first, last in pairwise(breaks)]
    alike: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for first, address, length in runs:
        alike.setdefault((address // _BUFFER, length), []).append((first, address % _ROW))
    moves = []
    for (buffer, length), runs_alike in alike.items():
        for (first, column), (to, stride), count in _progressions(runs_alike, length):
            source, target = Columns(buffer, column, stride), Columns(into.buffer, into.first + first, to)
            moves.append(Step("copy", (source,), target, length, groups=count))
    return moves


def _progressions(
    places: list[tuple[int, int]], length: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int], int]]:
    """Divide places into arithmetic progressions; yield the first place, the difference and the number."""
    start, apart, count = places[0], (length, length), 1
    for before, place in pairwise(places):
        gap = place[0] - before[0], place[1] - before[1]
        if gap[1] >= 0 and (count == 1 or gap == apart):
            apart, count = gap, count + 1
        else:
            yield start, apart, count
            start, apart, count = place, (length, length), 1
    yield start, apart, count


class RowBuffers:
    """Given buffers (see `state`) and new ones, with their steps and calls; only new ones are written."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.steps: list[Step] = []  # after the last call
        self._parts: list[Sequence[Step] | Call] = []

    def stage(self) -> RowStage:
        return RowStage(self.buffers, [*self._parts, self.steps])

    def call(self, function: Callable[..., None], values: list[Value], like: Value, dim: int) -> Value:
        """Call a function of row buffers between two programs.

        Args:
            values: inputs, each with its rows in one dimension.
            like: has the output's shape and dtype, with rows in dimension `dim`.
        """
        inputs = tuple((self.packed(x), row_shape(x.at, row_dim(x.at))) for x in values)
        own = row_shape(like.at, dim)
        into = self.room(torch.Size(own).numel(), like.dtype)
        self._parts += [self.steps, Call(function, ((into, own), *inputs))]
        self.steps = []
        return self.value(into, tuple(like.at.shape), dim, like.dtype)

    def step(
        self,
        op: str,
        sources: list[Columns],
        like: Value,
        shape: tuple[int, ...],
        length: int | None = None,
        *,
        number: float = 0.0,
        weights: tuple[Tensor, ...] = (),
    ) -> Value:
        """Compute a new tensor with the row dimension of `like`; `length`: per group."""
        dim = row_dim(like.at) - like.at.dim() + len(shape)
        if shape[dim] != ROWS:
            raise NotRowsError("a change of the row dimension")
        width = torch.Size(shape).numel() // ROWS
        size = width if length is None else length
        into = self.room(width, like.dtype)._replace(stride=size)
        groups = width // size
        self.steps.append(Step(op, tuple(sources), into, size, groups=groups, number=number, weights=weights))
        return self.value(into, shape, dim, like.dtype)

    def room(self, width: int, dtype: torch.dtype) -> Columns:
        self.buffers.append(Buffer(width, dtype))
        return Columns(len(self.buffers) - 1)

    def value(self, into: Columns, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Value:
        """Return a tensor whose rows are in columns of a buffer."""
        return Value.new(into.buffer, shape[:dim] + shape[dim + 1 :], dim, dtype)

    def packed(self, x: Value) -> Columns:
        """Return the columns that hold a value's rows contiguously; copy them if necessary."""
        return self.grouped(x, torch.Size(x.at.shape).numel() // ROWS)

    def grouped(self, x: Value, length: int) -> Columns:
        """Return the columns of a value in groups of `length`; copy them if necessary."""
        row = of_row(x.at)
        columns = grouped(row, length)
        if columns is None:
            columns = grouped(of_row(self.copy(x, x.dtype).at), length)
        assert columns is not None
        return columns

    def copy(self, x: Value, dtype: torch.dtype) -> Value:
        """Copy a value to a buffer of its own."""
        row = of_row(x.at)
        into = self.room(len(row), dtype)
        self.move(row, into)
        return self.value(into, tuple(x.at.shape), row_dim(x.at), dtype)

    def move(self, row: Tensor, into: Columns) -> None:
        """Copy the numbers at addresses [width] to columns."""
        moves = moves_of(row, into)
        if len(moves) > _MOST_MOVES:
            raise NotRowsError("numbers scattered over too many places")
        self.steps += moves
