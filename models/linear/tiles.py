"""Weights of a CPU in the model's dtype, in tiles of 16 rows, multiplied by the native kernels.

A row's product does not depend on how many rows there are.
"""

import torch
from torch import Tensor

from neo_desktop import native

TILE_ROWS = 16


def fits_tiles(columns: int) -> bool:
    """Whether matrices of this width can be multiplied."""
    return columns > 0 and columns % 2 == 0


def tiles_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the bytes of a packed matrix, whose rows are filled up to a whole tile."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * columns * dtype.itemsize


class Tiles:
    """See `protocol.Embedding`.

    Args:
        rows: of the weight.
        columns: an even number.
        bias: [out]
        dtype: of the model.
    """

    writes_in_place = True
    form = "tiles"

    def __init__(self, rows: int, columns: int, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.bias = bias
        self.rows = rows
        tiles = -(-rows // TILE_ROWS)
        # Of bfloat16, dot products take two columns at a time.
        width = 2 if dtype is torch.bfloat16 else 1
        self._packed = torch.empty(tiles, columns // width, TILE_ROWS, width, dtype=dtype)
        native.advise_huge_pages(self._packed)
        self._packed[-1] = 0  # it may have rows that are none
        # [tiles, 16, columns / width, width]
        self._rows = self._packed.transpose(1, 2)
        self._columns = columns
        code = native.DENSE_TYPES.index(dtype) + len(native.STORED_TYPES)
        self._native = [(code, self._packed.data_ptr(), self._packed.nbytes, rows)]

    def memory(self) -> dict[torch.device, int]:
        """See `Linear`, likewise the others."""
        return {torch.device("cpu"): self._packed.nbytes + (0 if self.bias is None else self.bias.nbytes)}

    def load(self, row: int, weight: Tensor) -> None:  # noqa: D102
        shape = self._rows.shape[2:]
        while len(weight):  # the rest of a tile, whole tiles, the beginning of a tile
            tile, first = divmod(row, TILE_ROWS)
            whole = len(weight) // TILE_ROWS if first == 0 else 0
            if whole:
                count = whole * TILE_ROWS
                self._rows[tile : tile + whole].copy_(weight[:count].reshape(whole, TILE_ROWS, *shape))
            else:
                count = min(TILE_ROWS - first, len(weight))
                self._rows[tile, first : first + count].copy_(weight[:count].reshape(count, *shape))
            row, weight = row + count, weight[count:]

    def dense(self) -> Tensor:  # noqa: D102
        return self._rows.reshape(-1, self._columns)[: self.rows]

    @property
    def native(self) -> native.Matrix:
        """What `native.packed_layer` takes."""
        return self._native, self.bias

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        native.packed_linear(x if x.stride(1) == 1 else x.contiguous(), self._native, self.bias, out)
        return out

    def look_up(self, rows: Tensor, out: Tensor) -> None:
        """Put some rows `[n]` into `out` `[n, columns]`."""
        out.copy_(self._rows[rows // TILE_ROWS, rows % TILE_ROWS].flatten(1))
