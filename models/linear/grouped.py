"""Matrices of 4 or 8 bits with a scale for each group of 32 numbers, as a GPU keeps them.

A number is `(code - centre) * scale + minimum`. Codes are packed into words of 32 bits, the first in the
lowest bits, and 64 rows lie side by side, so that neighbouring threads read neighbouring words:

    words             [tiles of 64 rows, columns / numbers of a word, 64] int32
    scales, minima    [tiles, columns / 32, 64] float16

These operators are those of torch; `engine.kernels` has faster ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.models.gguf.types import TYPES, StoredType

TILE_ROWS = 64
GROUP = 32  # numbers that share a scale
MOST_ROWS = 16  # of inputs that meet a matrix as it is packed
LOADING_BYTES = 16 * 1024**2  # more than a piece of a file takes while it is packed
PIECE_BYTES = 32 * 1024**2  # of a matrix that is dequantised for one product after the other


@dataclass(frozen=True, slots=True)
class Coding:
    """How a type's numbers are coded."""

    bits: int
    centre: int
    has_minima: bool = False


CODINGS = {"Q8_0": Coding(8, 128), "Q4_0": Coding(4, 8), "Q4_1": Coding(4, 0, has_minima=True)}
"""By the names of types of GGUF files."""
WIDENED: dict[str, int] = {}
"""Types that are kept in more bits than files have them in -> those bits."""
_TYPES: dict[str, StoredType] = {stored.name: stored for stored in TYPES.values() if stored.name in CODINGS}
Dequantise = Callable[["Grouped", Tensor | int, Tensor], None]


def has_kernel(type_name: str) -> bool:
    """Whether matrices of this type are multiplied as they are stored."""
    return type_name in CODINGS


def packed_bytes(type_name: str, rows: int, columns: int) -> int:
    """Return the bytes of a packed matrix: those of the file, with rows filled up to a whole tile."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * (columns // GROUP) * _TYPES[type_name].nbytes


class Grouped:
    """One such matrix.

    Args:
        type_name: one of CODINGS.
        rows: of the matrix.
        columns: a multiple of 32.
        device: where it lies.
    """

    def __init__(self, type_name: str, rows: int, columns: int, device: torch.device) -> None:
        self.type_name, self.rows, self.columns = type_name, rows, columns
        self.coding = CODINGS[type_name]
        self.per_word = 32 // self.coding.bits
        tiles, groups = -(-rows // TILE_ROWS), columns // GROUP
        room = (tiles, groups, TILE_ROWS)
        words = (tiles, columns // self.per_word, TILE_ROWS)
        self.words = torch.zeros(words, dtype=torch.int32, device=device)
        self.scales = torch.zeros(room, dtype=torch.float16, device=device)
        self.minima = torch.zeros_like(self.scales) if self.coding.has_minima else None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.words.nbytes + self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)

    def to(self, device: torch.device) -> "Grouped":
        """Return it on a device."""
        found = Grouped(self.type_name, self.rows, self.columns, device)
        found.words.copy_(self.words)
        found.scales.copy_(self.scales)
        if found.minima is not None and self.minima is not None:
            found.minima.copy_(self.minima)
        return found

    def load(self, row: int, raw: Tensor) -> None:
        """Take rows as files have them, `[rows, bytes of a row]` uint8.

        Raises ValueError for scales that are not finite.
        """
        count = len(raw)
        blocks = raw.to(self.words.device).view(count, -1, _TYPES[self.type_name].nbytes)
        header = 4 if self.coding.has_minima else 2
        scales = blocks[:, :, :header].contiguous().view(torch.float16)
        if not scales.isfinite().all():
            raise ValueError("scales that are not finite")
        codes = blocks[:, :, header:]
        if self.coding.bits == 4:  # the low bits of 16 bytes come first, then the high ones
            codes = torch.cat((codes & 15, codes >> 4), 2).view(count, -1, 2)
            codes = codes[:, :, 0] | (codes[:, :, 1] << 4)
        else:  # signed ones
            codes = codes ^ 128
        rows = torch.arange(row, row + count, device=self.words.device)
        at = rows // TILE_ROWS, slice(None), rows % TILE_ROWS
        self.words[at] = codes.reshape(count, -1).contiguous().view(torch.int32)
        self.scales[at] = scales[:, :, 0]
        if self.minima is not None:
            self.minima[at] = scales[:, :, 1]


def dequantise(weight: Grouped, rows: Tensor | int, out: Tensor) -> None:
    """Put rows into `out` `[n, columns]`, of any floating-point dtype: rounded once, from float32.

    Args:
        weight: the matrix.
        rows: which, `[n]` int64; or the first of n, a multiple of 64.
        out: contiguous.
    """
    if isinstance(rows, int):
        rows = torch.arange(rows, rows + len(out), device=out.device)
    at = rows // TILE_ROWS, slice(None), rows % TILE_ROWS
    bits = weight.coding.bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=out.device)
    codes = (weight.words[at][:, :, None] >> shifts) & (2**bits - 1)
    numbers = (codes - weight.coding.centre).float().view(len(out), -1, GROUP)
    numbers *= weight.scales[at][:, :, None]
    if weight.minima is not None:
        numbers += weight.minima[at][:, :, None]
    out.copy_(numbers.view_as(out))


def multiply_few(x: Tensor, weight: Grouped, bias: Tensor | None, out: Tensor) -> None:
    """Put `x @ weight.T + bias` into `out`.

    Args:
        x: [n, columns], n from 1 to 16; a row is contiguous.
        weight: the matrix.
        bias: [rows]
        out: [n, rows], of the dtype of x; a row is contiguous.
    """
    multiply_many(x, weight, bias, out, dequantise)


def multiply_many(
    x: Tensor, weight: Grouped, bias: Tensor | None, out: Tensor, dequantise: Dequantise
) -> None:
    """Do the same for any n, with one piece of the matrix after the other as numbers of the dtype of x."""
    step = max(PIECE_BYTES // (weight.columns * x.element_size()) // TILE_ROWS, 1) * TILE_ROWS
    room = x.new_empty(min(step, weight.rows), weight.columns)
    for first in range(0, weight.rows, step):
        rows = slice(first, min(first + step, weight.rows))
        piece = room[: rows.stop - first]
        dequantise(weight, first, piece)
        if bias is None:
            torch.mm(x, piece.t(), out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, piece.t(), out=out[:, rows])
