"""Where the numbers of tensors lie in buffers of rows, found by moving their addresses about."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from neo_desktop.native import Columns

ROWS = 5  # of the tensors of addresses; no other size of a model
# An address is time * _TIME + buffer * _BUFFER + row * _ROW + column.
_ROW, _BUFFER, _TIME = 1 << 24, 1 << 28, 1 << 44


class NotRowsError(Exception):
    """What steps over rows do not compute."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a graph, for `ROWS` rows.

    Views, slices and the like are done with its addresses, by torch's own operators.
    """

    at: Tensor  # of its shape: where its numbers lie, and after how many steps
    dtype: torch.dtype

    @classmethod
    def new(cls, buffer: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype, time: int) -> "Value":
        """Return a tensor whose rows lie in a buffer, each in one piece.

        Args:
            buffer: which.
            shape: of a row: without dimension `dim`, which counts the rows.
            dim: where that dimension belongs.
            dtype: of the buffer.
            time: how many steps are taken before.
        """
        columns = torch.arange(torch.Size(shape).numel()).view(1, *shape)
        rows = torch.arange(ROWS).view(ROWS, *[1] * len(shape))
        address = time * _TIME + buffer * _BUFFER + rows * _ROW + columns
        return cls(address.movedim(0, dim), dtype)

    def renewed(self, time: int) -> "Value":
        """Return the same after steps that have changed its numbers."""
        return Value(self.at % _TIME + time * _TIME, self.dtype)


def row_dim(at: Tensor) -> int:
    """Return the dimension of addresses that counts rows.

    Raises:
        NotRowsError: there is none.
    """
    rows = at % _BUFFER // _ROW
    for dim, size in enumerate(at.shape):
        expected = torch.arange(ROWS).view(-1, *[1] * (at.dim() - 1 - dim)) if size == ROWS else None
        if expected is not None and torch.equal(rows, expected.expand_as(rows)):
            return dim
    raise NotRowsError("a value that has no rows")


def of_row(at: Tensor) -> Tensor:
    """Return the addresses of a row, in the order of the other dimensions [width].

    Raises:
        NotRowsError: rows differ in more than the row.
    """
    of_rows = at.movedim(row_dim(at), 0).reshape(ROWS, -1) % _TIME
    expected = of_rows[0] + torch.arange(ROWS)[:, None] * _ROW
    if not torch.equal(of_rows, expected):
        raise NotRowsError("rows that are put together of several ones")
    return of_rows[0]


def columns_of(row: Tensor) -> dict[int, Tensor]:
    """Return which columns of which buffers addresses of a row name."""
    buffers = row // _BUFFER
    return {buffer: row[buffers == buffer] % _ROW for buffer in set(buffers.tolist())}


def ages_of(at: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each buffer of addresses, columns of it, and how many steps are taken before they are right."""
    flat = at.flatten()
    buffers = flat % _TIME // _BUFFER
    for buffer in set(buffers.tolist()):
        of_it = flat[buffers == buffer]
        yield buffer, of_it % _ROW, of_it // _TIME


def grouped(row: Tensor, length: int) -> Columns | None:
    """Return addresses [groups * length] as columns of a buffer; None: they are not so regular."""
    groups = row.view(-1, length)
    first = int(groups[0, 0])
    stride = int(groups[1, 0]) - first if len(groups) > 1 else length
    expected = first + torch.arange(len(groups))[:, None] * stride + torch.arange(length)
    if stride < 0 or stride >= _ROW or not torch.equal(groups, expected):
        return None
    return Columns(first // _BUFFER, first % _ROW, stride)


@dataclass(frozen=True, slots=True)
class Move:
    """Columns that become others."""

    source: Columns
    first: int  # where the first group goes
    stride: int  # where the next one goes, from there
    length: int
    groups: int


def moves_of(row: Tensor) -> list[Move]:
    """Return how addresses [width] become columns 0 to width, in as few moves as is easily found."""
    breaks = [0, *(torch.nonzero(row.diff() != 1).flatten() + 1).tolist(), len(row)]
    runs = [(first, int(row[first]), last - first) for first, last in pairwise(breaks)]
    alike: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for first, address, length in runs:
        alike.setdefault((address // _BUFFER, length), []).append((first, address % _ROW))
    moves = []
    for (buffer, length), of_it in alike.items():
        strides = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(of_it)}
        if len(strides) <= 1 and all(stride >= 0 for _, stride in strides):
            to, stride = next(iter(strides), (length, length))
            (first, column), *_ = of_it
            moves.append(Move(Columns(buffer, column, stride), first, to, length, len(of_it)))
        else:
            moves += [
                Move(Columns(buffer, column, length), first, length, length, 1) for first, column in of_it
            ]
    return moves
