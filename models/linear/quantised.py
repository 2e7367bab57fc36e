"""Weights of a CPU that keep the numbers of a GGUF file, multiplied by the native kernels.

Each block of 32 numbers of the input is rounded to 8 bits, with a scale; weights are exact. A row's product
does not depend on how many rows there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.gguf.types import TYPES, StoredType
from neo_desktop.models.linear.packed import PackedMatrix, PackedRows, Room, huge_pages

KERNEL_TYPES = native.STORED_TYPES
WIDENED = {"Q2_K": 4, "Q3_K": 6, "IQ4_NL": 8, "IQ4_XS": 8}  # -> bits that they are kept in
_TYPES = {stored.name: stored for stored in TYPES.values() if stored.name in KERNEL_TYPES}


def has_kernel(type_name: str) -> bool:
    """Whether matrices of this type are multiplied without being turned into floats."""
    return type_name in _TYPES


def dequantised(type_name: str, raw: Tensor) -> Tensor:
    """Return rows as they are stored, `[rows, bytes of a row]`, as float32 `[rows, columns]`."""
    return _TYPES[type_name].dequantised(raw)


def packed_bytes(type_name: str, rows: int, columns: int) -> int:
    """Return the bytes of a packed matrix: about those of the file, or of the bits that it is kept in."""
    return native.packed_bytes(type_name, rows, columns)


@dataclass(frozen=True, slots=True)
class PartShape:
    """Some rows of a matrix that are stored in one way."""

    type_name: str  # one of KERNEL_TYPES
    rows: int


class Part(PackedRows):
    """Packed rows, as native/include/neo_desktop/quantised_kernels.h draws them.

    Args:
        shape: what they are.
        columns: of the matrix.
        room: where they lie.
    """

    def __init__(self, shape: PartShape, columns: int, room: Room = huge_pages) -> None:
        packed = room(packed_bytes(shape.type_name, shape.rows, columns))
        super().__init__(KERNEL_TYPES.index(shape.type_name), shape.rows, columns, packed)
        self.type: StoredType = _TYPES[shape.type_name]

    def load(self, row: int, raw: Tensor) -> None:
        """Take rows as they are stored, `[rows, bytes of a row]`; each once.

        Raises ValueError for scales that are not finite.
        """
        if not native.pack_quantised(self.type.name, raw.contiguous(), row, self.packed):
            raise ValueError("scales that are not finite")

    def rows_of(self, rows: Tensor) -> Tensor:
        """Return some rows `[n]` as float32 `[n, columns]`."""
        floats = torch.empty(len(rows), self.columns)
        native.unpack_quantised(self.type.name, self.packed, rows.tolist(), floats)
        return floats


class Quantised(PackedMatrix):
    """See `protocol.Linear`.

    Args:
        parts: of the rows, one after the other.
        columns: a multiple of the blocks of all parts.
        bias: [out]
        dtype: of the model.
        room: where it lies.
    """

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
        """See `Linear`, likewise the others."""
        return "+".join(sorted({part.type.name for part in self.parts}))

    def load(self, row: int, weight: Tensor) -> None:
        """Floats are not taken: see `load_stored`."""
        raise TypeError("this matrix takes its rows as they are stored")

    def load_stored(self, row: int, raw: Tensor) -> None:
        """Take rows of a part as they are stored, `[rows, bytes of a row]`; each once.

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
        """Put some rows `[n]` into `out` `[n, columns]`; of matrices of one part."""
        (part,) = self.parts
        out.copy_(part.rows_of(rows))
