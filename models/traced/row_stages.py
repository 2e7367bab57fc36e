"""Stages as row programs, with recurrent layers and mixtures of experts between two programs.

A row program treats rows alike, which these do not. So each ends one program and begins the next one; both
see the buffers that the other parts use.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.expert_operators import ExpertScratch
from neo_desktop.models.recurrent import RecurrentBatch
from neo_desktop.models.state import GIVEN, State
from neo_desktop.models.traced.places import (
    ROWS,
    NotRowsError,
    Value,
    grouped,
    moves_of,
    of_row,
    row_dim,
    row_shape,
)
from neo_desktop.native import Buffer, Columns, RowProgram, Step

MOST_KEPT_ROWS = 64  # buffers for this many rows are kept
_MOST_MOVES = 256  # of one value; with more, the graph's own operators are as fast


class Beside(NamedTuple):
    """What calls use beside row buffers."""

    recurrent: Any  # a `RecurrentBatch` if the stage has recurrent layers
    room: ExpertScratch | None  # None: the model has no experts


@dataclass(frozen=True, slots=True)
class Call:
    """A recurrent layer, a mixture of experts, or another function of row buffers.

    Args:
        function: receives `Beside`, the output and the inputs.
        inputs: columns per input, with its shape per row.
        into: columns of the output, with its shape per row.
    """

    function: Callable[..., None]
    inputs: tuple[tuple[Columns, tuple[int, ...]], ...]
    into: tuple[Columns, tuple[int, ...]]

    @property
    def places(self) -> list[Columns]:
        """Columns that it reads or writes."""
        return [*(columns for columns, _ in self.inputs), self.into[0]]

    def arguments(self, buffers: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the output and the inputs, as parts of buffers."""
        return [
            torch.unflatten(
                buffers[columns.buffer].narrow(1, columns.first, torch.Size(shape).numel()), 1, shape
            )
            for columns, shape in (self.into, *self.inputs)
        ]


class _Buffers(NamedTuple):
    """Buffers that parts share, for a number of rows."""

    tensors: dict[int, Tensor]  # the memory of the views
    views: list[native.View]
    calls: list[list[Tensor]]  # arguments by call, see `Call.arguments`


class RowStage:
    """A stage of row programs and calls; the first buffers are given, see `state`."""

    def __init__(self, buffers: Sequence[Buffer], parts: Sequence[Sequence[Step] | Call]) -> None:
        users = defaultdict[int, set[int]](set)  # buffer -> parts
        for index, part in enumerate(parts):
            for columns in _places(part):
                users[columns.buffer].add(index)
        called = {columns.buffer for part in parts if isinstance(part, Call) for columns in part.places}
        self._shared = {
            index: buffer
            for index, buffer in enumerate(buffers)
            if index not in GIVEN and (len(users[index]) > 1 or index in called)
        }
        seen = [
            replace(each, is_given=each.is_given or index in self._shared)
            for index, each in enumerate(buffers)
        ]
        self._parts = [part if isinstance(part, Call) else RowProgram(seen, part) for part in parts if part]
        self._kept: dict[int, _Buffers] = {}  # by rows

    def run(self, state: State, batch: RecurrentBatch | None) -> None:
        """Compute the stage; `batch`: the states of recurrent layers."""
        beside = Beside(batch, state.scratch.experts)
        given = state.seen_by_native()
        shared = self._buffers(state.rows)
        seen = [*given, *shared.views] if shared.views else given
        calls = iter(shared.calls)
        for part in self._parts:
            if isinstance(part, RowProgram):
                part.run(seen)
            else:
                part.function(beside, *next(calls))

    def _buffers(self, rows: int) -> "_Buffers":
        """Return the shared buffers; stages of a device run one after the other."""
        if rows in self._kept:
            return self._kept[rows]
        tensors = {
            index: torch.zeros(rows, each.width, dtype=each.dtype) for index, each in self._shared.items()
        }
        made = _Buffers(
            tensors,
            [native.view_of("rows", tensor) for tensor in tensors.values()],
            [part.arguments(tensors) for part in self._parts if isinstance(part, Call)],
        )
        if rows <= MOST_KEPT_ROWS:
            self._kept[rows] = made
        return made


def _places(part: Sequence[Step] | Call) -> list[Columns]:
    if isinstance(part, Call):
        return part.places
    return [columns for step in part for columns in (*step.sources, step.into)]


class RowBuffers:
    """Given buffers (see `state`) and new ones, with their steps and calls; only new ones are written."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.steps: list[Step] = []  # after the last call
        self._parts: list[Sequence[Step] | Call] = []

    def stage(self) -> RowStage:
        """Return the stage with every step and call."""
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
        self._parts += [self.steps, Call(function, inputs, (into, own))]
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
        """Add a buffer."""
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
