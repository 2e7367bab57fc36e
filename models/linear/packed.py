"""Matrices of a CPU in interleaved tiles of 16 rows, the layout of the native kernels."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neo_desktop import native

HOST = torch.device("cpu")
TILE_ROWS = 16
Room = Callable[[int], Tensor]
"""Allocates host memory: a number of bytes → uninitialised uint8 `[bytes]`."""


def huge_pages(nbytes: int) -> Tensor:
    """Allocate host memory, in huge pages if the system permits."""
    room = torch.empty(nbytes, dtype=torch.uint8)
    native.advise_huge_pages(room)
    return room


class PackedRows:
    """Rows of a matrix in one format.

    Args:
        kind: index into `native.STORED_TYPES` followed by `native.DENSE_TYPES`.
        packed: [bytes] uint8, consecutive tiles.
    """

    def __init__(self, kind: int, rows: int, columns: int, packed: Tensor) -> None:
        self.kind, self.rows, self.columns, self.packed = kind, rows, columns, packed
        self.tile_bytes = packed.nbytes // -(-rows // TILE_ROWS)
        packed[-self.tile_bytes :].zero_()  # padding rows of the last tile

    def tiles_of(self, rows: slice) -> Tensor:
        first, last = rows.start // TILE_ROWS, -(-rows.stop // TILE_ROWS)
        return self.packed[first * self.tile_bytes : last * self.tile_bytes]

    def native_from(self, row: int) -> tuple[int, int, int, int]:
        """Return the rows from `row` on, which starts a tile, in the form of `native.packed_linear`."""
        packed = self.tiles_of(slice(row, self.rows))
        return self.kind, packed.data_ptr(), packed.nbytes, self.rows - row


class PackedMatrix:
    """The base class of packed matrices; see `protocol.Linear`."""

    def __init__(self, parts: Sequence[PackedRows], bias: Tensor | None) -> None:
        self.bias = bias
        self.packed_parts = parts
        self.rows = sum(part.rows for part in parts)
        self._native = [part.native_from(0) for part in parts]

    def memory(self) -> dict[torch.device, int]:
        nbytes = sum(part.packed.nbytes for part in self.packed_parts)
        return {torch.device("cpu"): nbytes + (0 if self.bias is None else self.bias.nbytes)}

    @property
    def native(self) -> native.Matrix:
        return self._native, self.bias

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        native.packed_linear(x if x.stride(1) == 1 else x.contiguous(), self._native, self.bias, out)
        return out
