"""Weights of a CPU that stay as a GGUF file has them, multiplied by the native kernels.

Each block of 32 numbers of the input is rounded to 8 bits, with a scale; weights are exact. A row's product
does not depend on how many rows there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.gguf.types import TYPES, StoredType

TILE_ROWS = 16
KERNEL_TYPES = ("Q8_0", "Q4_0", "Q4_1")  # in the order of native's WeightType
_TYPES = {stored.name: stored for stored in TYPES.values() if stored.name in KERNEL_TYPES}
_COLUMNS = 32  # of a block


def has_kernel(type_name: str, columns: int) -> bool:
    """Whether matrices of this type and width are multiplied as they are stored."""
    return type_name in _TYPES and columns % _COLUMNS == 0


def packed_bytes(type_name: str, rows: int, columns: int) -> int:
    """Return the bytes of a packed matrix: those of the file, with rows filled up to a whole tile."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * (columns // _COLUMNS) * _TYPES[type_name].nbytes


@dataclass(frozen=True, slots=True)
class PartShape:
    """Some rows of a matrix that are stored in one way."""

    type_name: str  # one of KERNEL_TYPES
    rows: int


class Part:
    """Packed rows, as native/include/neo_desktop/quantised_kernels.h draws them."""

    def __init__(self, shape: PartShape, columns: int) -> None:
        self.rows, self.columns = shape.rows, columns
        self.type: StoredType = _TYPES[shape.type_name]
        tiles, blocks = -(-shape.rows // TILE_ROWS), columns // _COLUMNS
        self.packed = torch.empty(tiles, blocks, TILE_ROWS * self.type.nbytes, dtype=torch.uint8)
        native.advise_huge_pages(self.packed)  # read faster where the system agrees
        self.packed.zero_()

    @property
    def _header_bytes(self) -> int:
        return self.type.nbytes % 4 or 4  # scales, and minima where there are two

    def _fields(self) -> tuple[Tensor, Tensor]:
        """Views `[tiles, blocks, scales and minima, rows, 2]` and `[tiles, blocks, groups, rows, 4]`."""
        end = TILE_ROWS * self._header_bytes
        header, numbers = self.packed[:, :, :end], self.packed[:, :, end:]
        return (
            torch.unflatten(header, 2, (-1, TILE_ROWS, 2)),
            torch.unflatten(numbers, 2, (-1, TILE_ROWS, 4)),
        )

    def load(self, row: int, raw: Tensor) -> None:
        """Take rows as they are stored, `[rows, bytes of a row]`; `row` is a multiple of 16.

        Raises ValueError for scales that are not finite.
        """
        count = len(raw)
        stored = raw.reshape(count, -1, self.type.nbytes)
        if not stored[:, :, : self._header_bytes].contiguous().view(torch.float16).isfinite().all():
            raise ValueError("scales that are not finite")
        whole = torch.zeros(-(-count // TILE_ROWS) * TILE_ROWS, *stored.shape[1:], dtype=torch.uint8)
        whole[:count] = stored
        tiles = torch.unflatten(whole, 0, (-1, TILE_ROWS)).transpose(1, 2)  # [tiles, blocks, rows, bytes]
        first = row // TILE_ROWS
        for target, source, size in zip(
            self._fields(), tiles.tensor_split([self._header_bytes], dim=3), (2, 4), strict=True
        ):
            target[first : first + len(tiles)] = torch.unflatten(source, 3, (-1, size)).transpose(2, 3)

    def rows_of(self, rows: Tensor) -> Tensor:
        """Return some rows `[n]` as float32 `[n, columns]`."""
        tiles, places = rows // TILE_ROWS, rows % TILE_ROWS
        fields = [field[tiles, :, :, places].flatten(2) for field in self._fields()]
        return self.type.dequantised(torch.cat(fields, 2).flatten(1))


class Quantised:
    """See `protocol.Linear`.

    Args:
        parts: of the rows, one after the other.
        columns: a multiple of 32.
        bias: [out]
        dtype: of the model.
    """

    writes_in_place = True

    def __init__(
        self, parts: Sequence[PartShape], columns: int, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.bias = bias
        self._dtype = dtype
        self.parts = [Part(part, columns) for part in parts]
        self._native = [
            (KERNEL_TYPES.index(part.type.name), part.packed.data_ptr(), part.packed.nbytes, part.rows)
            for part in self.parts
        ]

    @property
    def form(self) -> str:
        """See `Linear`, likewise the others."""
        return "+".join(sorted({part.type.name for part in self.parts}))

    def memory(self) -> dict[torch.device, int]:  # noqa: D102
        nbytes = sum(part.packed.nbytes for part in self.parts)
        return {torch.device("cpu"): nbytes + (0 if self.bias is None else self.bias.nbytes)}

    def load(self, row: int, weight: Tensor) -> None:
        """Floats are not taken: see `load_stored`."""
        raise TypeError("this matrix takes its rows as they are stored")

    def load_stored(self, row: int, raw: Tensor) -> None:
        """Take rows of a part as they are stored, `[rows, bytes of a row]`; a multiple of 16, or to its end.

        Raises ValueError for scales that are not finite.
        """
        for part in self.parts:
            if row < part.rows:
                part.load(row, raw)
                return
            row -= part.rows

    def dense(self) -> Tensor:  # noqa: D102
        return torch.cat([part.rows_of(torch.arange(part.rows)) for part in self.parts]).to(self._dtype)

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        native.quantised_linear(x if x.stride(1) == 1 else x.contiguous(), self._native, self.bias, out)
        return out

    def look_up(self, rows: Tensor, out: Tensor) -> None:
        """Put some rows `[n]` into `out` `[n, columns]`; of matrices of one part."""
        (part,) = self.parts
        out.copy_(part.rows_of(rows))
