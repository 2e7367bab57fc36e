"""Weights of a GPU that stay in 2 to 8 bits.

Kernels multiply few rows by packed weights, and may round inputs to 8 bits as on a CPU. For more rows they
dequantise the weights to the model's dtype, piece by piece.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from neo_desktop.models.linear import unpack
from neo_desktop.models.linear.grouped import MOST_ROWS, Dequantise, Grouped
from neo_desktop.models.linear.packed import HOST, Room
from neo_desktop.models.linear.quantised import PartShape


class Kernels(Protocol):
    """Matmul operators: `models.linear.grouped` or a faster implementation."""

    @property
    def dequantise(self) -> Dequantise:
        """Counterpart of `grouped.dequantise`."""

    def multiply_packed(
        self, x: Tensor, weights: Sequence[Grouped], bias: Tensor | None, out: Tensor, /
    ) -> None:
        """Write `x @ torch.cat(weights).T + bias` to `out`, see `grouped.multiply_packed`."""


def merged(parts: Sequence[PartShape]) -> Sequence[PartShape]:
    """Return the parts that are multiplied at once: adjacent parts of one type are merged."""
    alike = groupby(parts, lambda part: part.type_name)
    return [PartShape(name, sum(part.rows for part in group)) for name, group in alike]


class QuantisedOnGPU:
    """A quantised `protocol.Linear` on a GPU.

    Args:
        is_stacked: the matrix holds several experts, which are never multiplied all at once.
        table_room: allocates host memory that the device reads, for a matrix that is only looked up; None: it
            is in device memory.
    """

    def __init__(
        self,
        parts: Sequence[PartShape],
        columns: int,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        *,
        is_stacked: bool = False,
        table_room: Room | None = None,
    ) -> None:
        self.bias = bias
        self._dtype, self._device, self._kernels = dtype, device, kernels
        self._is_stacked, self._is_table = is_stacked, table_room is not None
        self._missing_rows = sum(part.rows for part in parts)
        self.parts = [
            Grouped(part.type_name, part.rows, columns, device, table_room) for part in merged(parts)
        ]

    @property
    def form(self) -> str:
        return "+".join(sorted({part.type_name for part in self.parts}))

    def memory(self) -> dict[torch.device, int]:
        nbytes = sum(part.nbytes for part in self.parts)
        where = HOST if self._is_table else self._device
        return {where: nbytes + (0 if self.bias is None else self.bias.nbytes)}

    def load(self, row: int, weight: Tensor) -> None:
        raise TypeError("this matrix loads rows only in the file's format")

    def load_stored(self, row: int, raw: Tensor) -> None:
        """Load rows of a part in the file's format, `[rows, bytes of a row]`; each row once.

        Raises ValueError for scales that are not finite.
        """
        self._missing_rows -= len(raw)
        for part in self.parts:
            if row < part.rows:
                unpack.load_stored(part, row, raw)
                break
            row -= part.rows
        if self._missing_rows == 0 and self._device.type == "cuda" and not self._is_stacked:
            self.launch_all()

    def launch_all(self) -> None:
        """Launch all kernels of matmuls and lookups once, so that no iteration waits for a compiler."""
        rows, columns = sum(part.rows for part in self.parts), self.parts[0].columns
        most = MOST_ROWS + 1
        x, out = (torch.zeros(most, n, dtype=self._dtype, device=self._device) for n in (columns, rows))
        for count in () if self._is_table else (1, 2, 4, 8, MOST_ROWS, most):  # each selects another kernel
            self.multiply(x[:count], out[:count])
        for part in self.parts:
            self._kernels.dequantise(part, torch.zeros(1, dtype=torch.int64, device=self._device), x[:1])
            self._kernels.dequantise(part, 0, x[:1])

    def dense(self) -> Tensor:
        dtype, device = self._dtype, self._device
        pieces = [torch.empty(part.rows, part.columns, dtype=dtype, device=device) for part in self.parts]
        for part, piece in zip(self.parts, pieces, strict=True):
            self._kernels.dequantise(part, 0, piece)
        return torch.cat(pieces)

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        self._kernels.multiply_packed(x, self.parts, self.bias, out)
        return out

    def look_up(self, rows: Tensor, out: Tensor) -> None:
        """Write rows `[n]` to `out` `[n, columns]`; only for matrices with one type."""
        (part,) = self.parts
        self._kernels.dequantise(part, rows, out)
