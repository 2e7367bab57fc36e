"""A CPU's quantised tiles in a GPU's layout, and as floats on any device.

native/include/neo_desktop/quantised_kernels.h draws the layout. These operators use torch; `engine.kernels`
has a faster one.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.gguf.types import PIECE_ELEMENTS
from neo_desktop.models.linear.grouped import CODINGS, Grouped, dequantise
from neo_desktop.models.linear.grouped import TILE_ROWS as LAYOUT_ROWS
from neo_desktop.models.linear.packed import TILE_ROWS
from neo_desktop.models.linear.quantised import WIDENED

BLOCK = 32  # columns
AT_ONCE = 2**22  # numbers; intermediate results take about 20 bytes for each


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a type's rows on a CPU; numbers are `(code - offset) * scale + minimum`."""

    bits: int  # per code; 8-bit codes are signed
    offset: int = 0
    has_minima: bool = False
    scales: int = 0  # 8-bit scales per block: 0, 1 or 2; with scales, a unit has 8 blocks
    is_fp4: bool = False  # codes are FP4 numbers, and scales are bfloat16

    @property
    def unit_blocks(self) -> int:
        """Blocks that share a 16-bit scale."""
        return 8 if self.scales else 1

    @property
    def groups(self) -> int:
        """Groups of 4 bytes per row and block with the low 4 bits of codes, or with 8-bit codes."""
        return 8 if self.bits == 8 else 4

    @property
    def high_groups(self) -> int:
        """Groups of 4 bytes per row and block with the remaining high bits."""
        return 0 if self.bits == 8 else self.bits - 4

    @property
    def header_bytes(self) -> int:
        return 2 * TILE_ROWS * (1 + self.has_minima)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's 8-bit scales and minima."""
        return TILE_ROWS * self.scales * (1 + self.has_minima)

    @property
    def block_bytes(self) -> int:
        return self.scale_bytes + 4 * TILE_ROWS * (self.groups + self.high_groups)

    @property
    def unit_bytes(self) -> int:
        return self.header_bytes + self.unit_blocks * self.block_bytes

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_fp4 else torch.float16


def _layout(type_name: str) -> Layout:
    coding = CODINGS[type_name]
    bits = WIDENED.get(type_name, coding.bits)
    return Layout(
        bits,
        2 ** (bits - 1) if coding.centre and bits < 8 else 0,
        coding.has_minima,
        BLOCK // coding.group if coding.has_units else 0,
        coding.scale_dtype is torch.bfloat16,
    )


LAYOUTS = {type_name: _layout(type_name) for type_name in CODINGS}
"""Keys are the names of `native.STORED_TYPES`."""


def unpack_quantised(type_name: str, packed: Tensor, out: Tensor) -> None:
    """Dequantise the first rows of some tiles to `out`: rounded once, from float32.

    Args:
        packed: [bytes] uint8, of whole tiles.
        out: [rows, columns], contiguous, of any floating-point dtype.
    """
    layout, columns = LAYOUTS[type_name], out.shape[1]
    tile_bytes = columns // BLOCK // layout.unit_blocks * layout.unit_bytes
    tiles = packed.view(-1, tile_bytes)
    step = max(AT_ONCE // (columns * TILE_ROWS), 1)
    for first in range(0, len(tiles), step):
        rows = out[first * TILE_ROWS : (first + step) * TILE_ROWS]
        regrouped = Grouped(type_name, len(rows), columns, out.device)
        regroup(tiles[first : first + step].flatten(), regrouped, slice(0, len(rows)))
        dequantise(regrouped, 0, rows)


def load_stored(target: Grouped, row: int, raw: Tensor) -> None:
    """Load rows in the file's format, `[rows, bytes of a row]` uint8, from `row` on, piece by piece.

    Raises ValueError for scales that are not finite.
    """
    step = max(PIECE_ELEMENTS // target.columns // LAYOUT_ROWS, 1) * LAYOUT_ROWS
    for piece in torch.split(raw, step):
        nbytes = native.packed_bytes(target.type_name, len(piece), target.columns)
        packed = torch.zeros(nbytes, dtype=torch.uint8)
        if not native.pack_quantised(target.type_name, piece.contiguous(), 0, packed):
            raise ValueError("scales that are not finite")
        regroup(packed.to(target.words.device), target, slice(row, row + len(piece)))
        row += len(piece)


def regroup(packed: Tensor, target: Grouped, rows: slice) -> None:
    """Write tiles of the target's type to some of its rows.

    Args:
        packed: [bytes] uint8, on the target's device: whole tiles, with these rows first.
    """
    layout, first = LAYOUTS[target.type_name], rows.start
    units = packed.view(-1, target.columns // BLOCK // layout.unit_blocks, layout.unit_bytes)
    for piece in torch.split(units, max(AT_ONCE // (TILE_ROWS * target.columns), 1)):
        _regroup(piece, target, slice(first, min(first + len(piece) * TILE_ROWS, rows.stop)))
        first += len(piece) * TILE_ROWS


@cache
def _table(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers on a device; a copy per call would block the launching thread."""
    return torch.tensor(values, dtype=torch.int8, device=device)


def _regroup(units: Tensor, target: Grouped, rows: slice) -> None:
    layout, coding = LAYOUTS[target.type_name], target.coding
    header = units[..., : layout.header_bytes].contiguous().view(layout.scale_dtype)
    blocks = torch.unflatten(units[..., layout.header_bytes :], 2, (layout.unit_blocks, layout.block_bytes))
    codes = _stored_codes(layout, blocks[..., layout.scale_bytes :])
    if coding.table and layout.bits == 8:
        codes = torch.searchsorted(_table(coding.table, units.device), codes.contiguous())
    elif layout.bits == 8 or layout.offset != coding.centre:
        codes = codes.to(torch.int16) + (coding.centre - layout.offset)
    others = list(torch.split(header, TILE_ROWS, 2))  # [tiles, units, rows]
    if layout.scales:
        small = torch.unflatten(blocks[..., : layout.scale_bytes], 3, (-1, layout.scales, TILE_ROWS))
        # [tiles, units, blocks, scales and minima, scales per block, rows]
        others = [each.flatten(1, 3) for each in small.unbind(3)] + others
    count = rows.stop - rows.start
    target.store(
        rows.start,
        codes.to(torch.uint8).permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)[:count],
        [each.mT.flatten(0, 1)[:count] for each in others],
    )


def _stored_codes(layout: Layout, blocks: Tensor) -> Tensor:
    """Return the codes of blocks as `[tiles, units, blocks, rows, 32]`: uint8, or int8 for 8 bits."""
    bytes_of_four = torch.unflatten(blocks, 3, (-1, TILE_ROWS, 4))
    low, high = bytes_of_four[:, :, :, : layout.groups], bytes_of_four[:, :, :, layout.groups :]
    if layout.bits == 8:
        return low.view(torch.int8).transpose(3, 4).flatten(4)
    codes = torch.stack((low & 15, low >> 4), 3)
    if layout.high_groups:
        half, group = torch.arange(2, device=blocks.device)[:, None], torch.arange(4, device=blocks.device)
        if layout.high_groups == 1:
            above, shifts = high, 4 * half + group
        else:
            above, shifts = high.repeat_interleave(2, 3), 4 * (group % 2) + 2 * half
        above = above[:, :, :, None] >> shifts.to(torch.uint8)[:, :, None, None]
        codes |= (above & (2**layout.high_groups - 1)) << 4
    return codes.movedim(5, 3).flatten(4)
