"""Weights of a CPU in the model's dtype, in tiles of 16 rows, multiplied by the native kernels.

A row's result does not depend on the number of rows.
"""

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.linear.packed import TILE_ROWS, PackedMatrix, PackedRows, Room, huge_pages


def fits_tiles(columns: int) -> bool:
    """Return True if the kernels support matrices of this width."""
    return columns > 0 and columns % 2 == 0


def tiles_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the bytes of a packed matrix, padded to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * columns * dtype.itemsize


def rows_of_tiles(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return packed bytes as numbers `[tiles, 16, columns / width, width]`: a view.

    width is 2 for bfloat16, because its dot products take two columns at a time, and 1 for other dtypes.
    """
    width = 2 if dtype is torch.bfloat16 else 1
    return packed.view(dtype).view(-1, columns // width, TILE_ROWS, width).transpose(1, 2)


def unpack_tiles(packed: Tensor, out: Tensor) -> None:
    """Copy the first rows of some tiles to `out` `[rows, columns]`, contiguous and in their dtype."""
    tiles = rows_of_tiles(packed, out.shape[1], out.dtype)
    whole, rest = divmod(len(out), TILE_ROWS)
    torch.unflatten(out[: whole * TILE_ROWS], 0, (whole, TILE_ROWS)).view(whole, *tiles.shape[1:]).copy_(
        tiles[:whole]
    )
    if rest:
        out[-rest:].view(rest, *tiles.shape[2:]).copy_(tiles[whole, :rest])


class Tiles(PackedMatrix):
    """A dense `protocol.Embedding` in tiles."""

    form = "tiles"

    def __init__(
        self, rows: int, columns: int, bias: Tensor | None, dtype: torch.dtype, room: Room = huge_pages
    ) -> None:
        packed = room(tiles_bytes(rows, columns, dtype))
        kind = native.DENSE_TYPES.index(dtype) + len(native.STORED_TYPES)
        super().__init__([PackedRows(kind, rows, columns, packed)], bias)
        self._rows = rows_of_tiles(packed, columns, dtype)
        self._columns = columns

    def load(self, row: int, weight: Tensor) -> None:
        shape = self._rows.shape[2:]
        while len(weight):  # the end of a tile, whole tiles, the start of a tile
            tile, first = divmod(row, TILE_ROWS)
            whole = len(weight) // TILE_ROWS if first == 0 else 0
            if whole:
                count = whole * TILE_ROWS
                self._rows[tile : tile + whole].copy_(weight[:count].reshape(whole, TILE_ROWS, *shape))
            else:
                count = min(TILE_ROWS - first, len(weight))
                self._rows[tile, first : first + count].copy_(weight[:count].reshape(count, *shape))
            row, weight = row + count, weight[count:]

    def dense(self) -> Tensor:
        return self._rows.reshape(-1, self._columns)[: self.rows]

    def look_up(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(self._rows[rows // TILE_ROWS, rows % TILE_ROWS].flatten(1))
