"""Weights of a CPU that stay quantised as in a GGUF file, multiplied by the native kernels.

Each block of 32 input elements is rounded to 8 bits, with a scale; weights are exact. A row's result does not
depend on the number of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.linear.packed import PackedMatrix, PackedRows, Room, huge_pages

KERNEL_TYPES = native.STORED_TYPES  # matrices that kernels multiply as they are, on a CPU and on a GPU
WIDENED = {"Q2_K": 4, "Q3_K": 6, "IQ4_NL": 8, "IQ4_XS": 8}  # type -> bits in memory


@dataclass(frozen=True, slots=True)
class PartShape:
    """Consecutive rows of a matrix with one type."""

    type_name: str  # one of KERNEL_TYPES
    rows: int


class Part(PackedRows):
    """Packed rows; native/include/neo_desktop/quantised_kernels.h draws the layout."""

    def __init__(self, shape: PartShape, columns: int, room: Room = huge_pages) -> None:
        packed = room(native.packed_bytes(shape.type_name, shape.rows, columns))
        super().__init__(KERNEL_TYPES.index(shape.type_name), shape.rows, columns, packed)
        self.type_name = shape.type_name

    def load(self, row: int, raw: Tensor) -> None:
        """Load rows in the file's format, `[rows, bytes of a row]`; each row once.

        Raises ValueError for scales that are not finite.
        """
        if not native.pack_quantised(self.type_name, raw.contiguous(), row, self.packed):
            raise ValueError("scales that are not finite")

    def rows_of(self, rows: Tensor) -> Tensor:
        floats = torch.empty(len(rows), self.columns)
        native.unpack_quantised(self.type_name, self.packed, rows.tolist(), floats)
        return floats


class Quantised(PackedMatrix):
    """A quantised `protocol.Linear`."""

    def __init__(
        self,
        parts: Sequence[PartShape],
        columns: int,
        bias: Tensor | None,
        dtype: torch.dtype,
        room: Room = huge_pages,
    ) -> None:
        self._dtype = dtype
        self.parts = [Part(part, columns, room) for part in parts]
        super().__init__(self.parts, bias)

    @property
    def form(self) -> str:
        return "+".join(sorted({part.type_name for part in self.parts}))

    def load(self, row: int, weight: Tensor) -> None:
        raise TypeError("this matrix loads rows only in the file's format")

    def load_stored(self, row: int, raw: Tensor) -> None:
        """Load rows of a part in the file's format, `[rows, bytes of a row]`; each row once.

        Raises ValueError for scales that are not finite.
        """
        for part in self.parts:
            if row < part.rows:
                part.load(row, raw)
                return
            row -= part.rows

    def dense(self) -> Tensor:
        return torch.cat([part.rows_of(torch.arange(part.rows)) for part in self.parts]).to(self._dtype)

    def look_up(self, rows: Tensor, out: Tensor) -> None:
        """Write rows `[n]` to `out` `[n, columns]`; only for matrices with one part."""
        (part,) = self.parts
        out.copy_(part.rows_of(rows))
