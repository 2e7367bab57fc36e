"""Stages as row programs, with recurrent layers and mixtures of experts between two programs.

A row program treats rows alike, which these do not. So each ends one program and begins the next one; both
see the buffers that the other parts use.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.recurrent import RecurrentBatch
from neo_desktop.models.state import GIVEN, State
from neo_desktop.native import Buffer, Columns, RowProgram, Step

MOST_KEPT_ROWS = 64  # buffers for this many rows are kept


@dataclass(frozen=True, slots=True)
class Call:
    """A recurrent layer, a mixture of experts, or another function between row programs.

    Args:
        function: receives the state, the `RecurrentBatch` or None, the output and the inputs.
        rows: columns of the output and the inputs, with their shapes per row; empty: the function finds them.
    """

    function: Callable[..., object]
    rows: tuple[tuple[Columns, tuple[int, ...]], ...] = ()

    def arguments(self, buffers: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the output and the inputs, as parts of buffers."""
        return [
            torch.unflatten(
                buffers[columns.buffer].narrow(1, columns.first, torch.Size(shape).numel()), 1, shape
            )
            for columns, shape in self.rows
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
        called = set[int]()
        for index, part in enumerate(parts):
            for columns in _places(part):
                users[columns.buffer].add(index)
                called |= {columns.buffer} if isinstance(part, Call) else set()
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
        shared = self._buffers(state.rows)
        seen = [*state.seen_by_native(), *shared.views]
        calls = iter(shared.calls)
        for part in self._parts:
            if isinstance(part, RowProgram):
                part.run(seen)
            else:
                part.function(state, batch, *next(calls))

    def _buffers(self, rows: int) -> _Buffers:
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
    """Return the columns that a part reads or writes."""
    if isinstance(part, Call):
        return [columns for columns, _ in part.rows]
    return [columns for step in part for columns in (*step.sources, step.into)]
