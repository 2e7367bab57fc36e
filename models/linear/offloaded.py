"""Offloaded matrices: some rows on a device, the others in host memory (HeteGen, section 4).

A matmul combines three parts. Each covers rows of the matrix, which are columns of the result:

    | resident on the device | streamed to it for each matmul | computed by the CPU |
    0                        resident_rows                    + streamed rows       rows

Host memory holds its rows once, in tiles of 16 as the native kernels read them. Streamed rows are unpacked on
the device. The number of streamed rows is chosen per matmul.

Experts that move (see `expert_slots`) are all in host memory; resident rows are slots with copies of some.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.gguf.types import BY_NAME
from neo_desktop.models.linear import unpack
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.linear.packed import TILE_ROWS, Room
from neo_desktop.models.linear.protocol import Linear, WeightFormat
from neo_desktop.models.linear.quantised import Part, PartShape, Quantised
from neo_desktop.models.linear.quantised_gpu import QuantisedOnGPU
from neo_desktop.models.linear.shares import UNMEASURED
from neo_desktop.models.linear.tiles import Tiles, unpack_tiles

CPU = torch.device("cpu")
PIECE_BYTES = 32 * 1024**2  # size of an unpacked piece
RESIDENT_STEP = 64  # rows in a tile of `grouped`


class MoveBudget(NamedTuple):
    """Bytes of experts per iteration that can be copied to the device."""

    most: float
    free: float  # bytes that neither the bus nor host memory misses
    price: float = 0.0  # bytes that the CPU reads while the GPU stores a received byte


class Kernels(Protocol):
    """Operators that unpack streamed rows: `models.linear.unpack` or a faster implementation."""

    def unpack_quantised(self, type_name: str, packed: Tensor, out: Tensor, /) -> None:
        """Write the first rows of some tiles to `out`, see `unpack.unpack_quantised`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one part that are streamed together."""

    rows: slice  # of the matrix
    packed: Tensor  # [bytes] uint8: whole tiles, a view of host memory
    columns: int
    part: int  # index of the part of host memory

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """Host memory to copy to the device, in order."""
        return (self.packed,)

    @property
    def nbytes(self) -> int:
        return len(self.packed)

    @property
    def elements(self) -> int:
        rows: int = self.rows.stop - self.rows.start
        return rows * self.columns


class OffloadedLinear:
    """A `protocol.Linear` divided between device and host memory.

    Args:
        resident: the first rows, on the device; it shares their part of the bias. None: no rows.
        host: the other rows or all, in host memory; it gets their part of the bias.
        parts: of the whole matrix, if rows are quantised in host memory.
        has_slots: all rows are in host memory, and the resident ones have a bias of their own.
    """

    form = "split"

    def __init__(
        self,
        resident: Linear | None,
        resident_rows: int,
        host: Tiles | Quantised,
        parts: Sequence[PartShape],
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        *,
        has_slots: bool = False,
    ) -> None:
        self.resident, self.resident_rows = resident, resident_rows
        self.host, self.host_rows = host, host.rows
        self.has_slots, self.first_on_host = has_slots, 0 if has_slots else resident_rows
        self.rows, self.columns = self.first_on_host + host.rows, host.packed_parts[0].columns
        self.bias = bias
        self._parts, self._dtype, self._device, self._kernels = parts, dtype, device, kernels
        if device.type == "cuda":
            self.launch_all()
        if bias is not None:
            host_bias = bias[self.first_on_host :]
            host.bias = host_bias if device.type == "cpu" else torch.empty_like(host_bias, device=CPU)
            if resident is not None:
                resident.bias = bias[:resident_rows].clone() if has_slots else bias[:resident_rows]

    def memory(self) -> dict[torch.device, int]:
        memory = Counter(self.host.memory())
        if self.resident is not None:
            memory.update(self.resident.memory())
        if self.bias is not None and self._device.type != "cpu":
            memory[self._device] += self.bias[self.first_on_host :].nbytes
        return dict(memory)

    @property
    def takes_stored(self) -> bool:
        """True if rows load in the file's format: by `load_stored`, not by `load`."""
        return isinstance(self.host, Quantised)

    def load(self, row: int, weight: Tensor) -> None:
        count = max(self.resident_rows - row, 0)
        if self.resident is not None and count:
            self.resident.load(row, weight[:count])
        count = max(self.first_on_host - row, 0)
        if count < len(weight):
            self.host.load(max(row - self.first_on_host, 0), weight[count:])

    def load_stored(self, row: int, raw: Tensor) -> None:
        """Load rows of a part in the file's format, `[rows, bytes of a row]`; each row once.

        Raises ValueError for scales that are not finite.
        """
        assert isinstance(self.host, Quantised)
        count = max(self.resident_rows - row, 0)
        if count and isinstance(self.resident, QuantisedOnGPU | Quantised):
            self.resident.load_stored(row, raw[:count])
        elif count and self.resident is not None:
            ends = accumulate(part.rows for part in self._parts)
            part = next(part for part, end in zip(self._parts, ends, strict=True) if row < end)
            self.resident.load(row, BY_NAME[part.type_name].dequantised(raw[:count]))
        count = max(self.first_on_host - row, 0)
        if count < len(raw):
            self.host.load_stored(max(row - self.first_on_host, 0), raw[count:])

    def launch_all(self) -> None:
        """Launch the unpacking kernels once, so that no iteration waits for a compiler."""
        room = torch.empty(TILE_ROWS, self.columns, dtype=self._dtype, device=self._device)
        for index, part in enumerate(self.host.packed_parts):
            self.unpack(index, torch.zeros(part.tile_bytes, dtype=torch.uint8, device=self._device), room)

    def load_bias(self, row: int, bias: Tensor) -> None:
        assert self.bias is not None
        self.bias[row : row + len(bias)].copy_(bias)
        before = self.first_on_host
        if self.host.bias is not None and row + len(bias) > before:
            first = max(row, before)
            self.host.bias[first - before : row + len(bias) - before].copy_(bias[first - row :])
        if self.has_slots and self.resident is not None and self.resident.bias is not None:
            self.resident.bias[row : row + len(bias)].copy_(bias[: max(self.resident_rows - row, 0)])

    def dense(self) -> Tensor:
        host = self.host.dense().to(self._device)
        if self.resident is None or self.has_slots:
            return host
        return torch.cat((self.resident.dense(), host))

    def streamed(self, share: float) -> int:
        """Return the number of rows to stream: about this share of the host's, in whole tiles per part."""
        if not 0 <= share <= 1:
            raise ValueError(f"a share of {share} cannot be streamed: give a number from 0 to 1")
        wanted, rows = share * self.host_rows, 0
        for part in self.host.packed_parts:
            if wanted - rows < part.rows:
                return rows + min(round((wanted - rows) / TILE_ROWS) * TILE_ROWS, part.rows)
            rows += part.rows
        return rows

    def pieces(self, streamed_rows: int) -> list[Piece]:
        row_bytes = self.columns * self._dtype.itemsize
        step = max(PIECE_BYTES // row_bytes // TILE_ROWS, 1) * TILE_ROWS
        return self.pieces_of(slice(0, streamed_rows), step)

    def pieces_of(self, rows: slice, step: int) -> list[Piece]:
        """Divide some of the host's rows, from a tile on, into pieces of at most `step` rows: whole tiles.

        A piece is within one part.
        """
        pieces, before = [], 0
        for index, part in enumerate(self.host.packed_parts):
            start, last = max(rows.start - before, 0), min(rows.stop - before, part.rows)
            for first in range(start, last, step):
                part_rows = slice(first, min(first + step, last))
                begin = self.first_on_host + before
                matrix_rows = slice(begin + part_rows.start, begin + part_rows.stop)
                pieces.append(Piece(matrix_rows, part.tiles_of(part_rows), self.columns, index))
            before += part.rows
        return pieces

    def host_matrix(self, streamed_rows: int) -> native.Matrix | None:
        """Return the CPU's rows, with bias, for the native kernels; None: no rows."""
        parts, before = [], 0
        for part in self.host.packed_parts:
            first = max(streamed_rows - before, 0)
            if first < part.rows:
                parts.append(part.native_from(first))
            before += part.rows
        bias = self.host.bias
        return (parts, None if bias is None else bias[streamed_rows:]) if parts else None

    def multiply_resident(self, x: Tensor, out: Tensor) -> None:
        """Compute the columns of the resident rows in `out` [n, rows] on the device."""
        if self.resident is not None:
            self.resident.multiply(x, out[:, : self.resident_rows])

    def multiply_piece(self, piece: Piece, staged: Tensor, room: Tensor, x: Tensor, out: Tensor) -> None:
        """Compute the columns of a piece.

        Args:
            staged: its bytes on the device, `[bytes]` uint8.
            room: `[at least piece.elements]` on the device, in the model's dtype: scratch.
            out: [n, rows] on the device; only these columns are written.
        """
        weight = room[: piece.elements].view(-1, self.columns)
        self.unpack(piece.part, staged, weight)
        if self.bias is None:
            torch.mm(x, weight.t(), out=out[:, piece.rows])
        else:
            torch.addmm(self.bias[piece.rows], x, weight.t(), out=out[:, piece.rows])

    def unpack(self, part: int, staged: Tensor, weight: Tensor) -> None:
        packed = self.host.packed_parts[part]
        if isinstance(packed, Part):
            self._kernels.unpack_quantised(packed.type_name, staged, weight)
        else:
            unpack_tiles(staged, weight)

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute all columns sequentially; few rows use the CPU, more rows stream the weights."""
        streamed_rows = self.streamed(UNMEASURED.of(len(x)))
        self.multiply_resident(x, out)
        pieces = self.pieces(streamed_rows)
        room = x.new_empty(max((piece.elements for piece in pieces), default=0))
        for piece in pieces:
            self.multiply_piece(piece, piece.packed.to(self._device), room, x, out)
        matrix = self.host_matrix(streamed_rows)
        if matrix is not None:
            host_columns = out[:, self.resident_rows + streamed_rows :]
            product = (
                host_columns if self._device.type == "cpu" else torch.empty_like(host_columns, device=CPU)
            )
            native.packed_linear(x.contiguous().cpu(), *matrix, product)
            if product is not host_columns:
                host_columns.copy_(product)
        return out


@dataclass(frozen=True, slots=True)
class OffloadedFormat:
    """A `protocol.WeightFormat` that offloads rows of some matrices.

    Args:
        device_form: format of rows on the device.
        host_form: format of rows in host memory, with their allocator.
        resident_rows: matrix name (see `WeightFormat.named`) -> rows that stay on the device, a multiple of
            64 or all. Matrices without an entry stay on the device, as do embeddings and head.
        moves: experts move, see `expert_slots`; None: they stay.
    """

    device_form: WeightFormat
    host_form: Dense
    resident_rows: Mapping[str, int]
    kernels: Kernels = unpack
    moves: MoveBudget | None = None
    name: str = ""

    def named(self, name: str) -> "OffloadedFormat":
        forms = self.device_form.named(name), self.host_form.named(name)
        return replace(self, device_form=forms[0], host_form=forms[1], name=name)

    @property
    def tables(self) -> Room | None:
        return self.device_form.tables

    def table(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Linear:
        return self.device_form.table(rows, columns, dtype, device)

    def of_rows(self, rows: slice) -> WeightFormat:
        """Return the device's format: a part of a matrix is not offloaded again."""
        return self.device_form.of_rows(rows)

    def empty(
        self, rows: int, columns: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        """Return a layer to load. Raise ValueError for invalid resident rows or an unsuitable width."""
        resident, device_form, host_form = self._split(rows)
        if resident == rows:
            return self.device_form.empty(rows, columns, has_bias=has_bias, dtype=dtype, device=device)
        has_slots = self.moves is not None and "experts_" in self.name and resident > 0
        host_rows = rows if has_slots else rows - resident
        host_form = self.host_form if has_slots else host_form
        host = host_form.empty(host_rows, columns, has_bias=False, dtype=dtype, device=CPU)
        if not isinstance(host, Tiles | Quantised):
            raise ValueError(f"{self.name} cannot be offloaded: its {columns} columns do not fit tiles")
        on_device = (
            device_form.empty(resident, columns, has_bias=False, dtype=dtype, device=device)
            if resident
            else None
        )
        bias = torch.empty(rows, dtype=dtype, device=device) if has_bias else None
        parts = self.host_form.parts
        sizes = on_device, resident, host, parts, bias, dtype, device, self.kernels
        return OffloadedLinear(*sizes, has_slots=has_slots)

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Return the bytes on the device."""
        resident, device_form, _ = self._split(rows)
        return device_form.nbytes(resident, columns, dtype) if resident else 0

    def loading_bytes(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
        return self.device_form.loading_bytes(rows, columns, dtype, device)

    def _split(self, rows: int) -> tuple[int, WeightFormat, Dense]:
        resident = self.resident_rows.get(self.name, rows)
        if not 0 <= resident <= rows or (resident % RESIDENT_STEP and resident < rows):
            raise ValueError(
                f"{resident} of the {rows} rows of {self.name} cannot stay on the device: give "
                f"a multiple of {RESIDENT_STEP}, or all of them"
            )
        device_form = self.device_form.of_rows(slice(0, resident))
        return resident, device_form, self.host_form.of_rows(slice(resident, rows))
