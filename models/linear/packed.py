"""Matrices of a CPU, in tiles of 16 rows that lie side by side, as the native kernels read them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neo_desktop import native

TILE_ROWS = 16
Room = Callable[[int], Tensor]
"""Gives so many bytes of host memory: uint8 `[bytes]`, with any content."""


def huge_pages(nbytes: int) -> Tensor:
    """Return bytes of host memory that are read fast, where the system agrees."""
    room = torch.empty(nbytes, dtype=torch.uint8)
    native.advise_huge_pages(room)
    return room


class PackedRows:
    """Some rows of a matrix, stored in one way.

    Args:
        kind: of `native.STORED_TYPES`, then `native.DENSE_TYPES`: which.
        rows: of them; the last tile may have rows that are none.
        columns: of the matrix.
        packed: [bytes] uint8: one tile after the other.
    """

    def __init__(self, kind: int, rows: int, columns: int, packed: Tensor) -> None:
        self.kind, self.rows, self.columns, self.packed = kind, rows, columns, packed
        self.tile_bytes = packed.nbytes // -(-rows // TILE_ROWS)
        packed[-self.tile_bytes :].zero_()  # it may have rows that are none

    def tiles_of(self, rows: slice) -> Tensor:
        """Return the bytes of some rows, the first of which begins a tile."""
        first, last = rows.start // TILE_ROWS, -(-rows.stop // TILE_ROWS)
        return self.packed[first * self.tile_bytes : last * self.tile_bytes]

    def native_from(self, row: int) -> tuple[int, int, int, int]:
        """Return the rows from one that begins a tile, as `native.packed_linear` takes them."""
        packed = self.tiles_of(slice(row, self.rows))
        return self.kind, packed.data_ptr(), packed.nbytes, self.rows - row


class PackedMatrix:
    """What all forms of such matrices have; see `protocol.Linear`.

    Args:
        parts: of the rows, one after the other.
        bias: [out]
    """

    writes_in_place = True

    def __init__(self, parts: Sequence[PackedRows], bias: Tensor | None) -> None:
        self.bias = bias
        self.packed_parts = parts
        self.rows = sum(part.rows for part in parts)
        self._native = [part.native_from(0) for part in parts]

    def memory(self) -> dict[torch.device, int]:
        """See `Linear`, likewise the others."""
        nbytes = sum(part.packed.nbytes for part in self.packed_parts)
        return {torch.device("cpu"): nbytes + (0 if self.bias is None else self.bias.nbytes)}

    @property
    def native(self) -> native.Matrix:
        """What steps of `native.RowProgram` take."""
        return self._native, self.bias

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        native.packed_linear(x if x.stride(1) == 1 else x.contiguous(), self._native, self.bias, out)
        return out
