"""Stages as row programs, with recurrent layers between two programs.

A row program treats rows alike, which a recurrent layer does not. So it ends one program and begins the next
one; both see the buffers that the other parts use.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.recurrent import RecurrentBatch
from neo_desktop.models.state import GIVEN, State
from neo_desktop.native import Buffer, Columns, RowProgram, Step

MOST_KEPT_ROWS = 64  # buffers for this many rows are kept


@dataclass(frozen=True, slots=True)
class Call:
    """A recurrent layer, or another function of row buffers.

    Args:
        function: writes to its second argument; the others are inputs.
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


class RowStage:
    """A stage of row programs and calls.

    Args:
        buffers: every buffer; the first are given, see `state`.
        parts: in order.
    """

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
        self._kept: dict[int, tuple[dict[int, Tensor], list[native.View]]] = {}  # rows -> shared buffers

    def run(self, state: State, batch: RecurrentBatch | None) -> None:
        """Compute the stage; `batch`: the states of recurrent layers."""
        given = state.seen_by_native()
        tensors, views = self._buffers(state.rows)
        for part in self._parts:
            if isinstance(part, RowProgram):
                part.run([*given, *views] if views else given)
                continue
            out, *inputs = (
                torch.unflatten(
                    tensors[columns.buffer].narrow(1, columns.first, torch.Size(shape).numel()),
                    1,
                    shape,
                )
                for columns, shape in (part.into, *part.inputs)
            )
            part.function(batch, out, *inputs)

    def _buffers(self, rows: int) -> tuple[dict[int, Tensor], list[native.View]]:
        """Return the shared buffers and their views; stages of a device run one after the other."""
        if rows in self._kept:
            return self._kept[rows]
        tensors = {
            index: torch.zeros(rows, each.width, dtype=each.dtype) for index, each in self._shared.items()
        }
        made = tensors, [native.view_of("rows", tensor) for tensor in tensors.values()]
        if rows <= MOST_KEPT_ROWS:
            self._kept[rows] = made
        return made


def _places(part: Sequence[Step] | Call) -> list[Columns]:
    if isinstance(part, Call):
        return part.places
    return [columns for step in part for columns in (*step.sources, step.into)]
