"""Matrices of which a device keeps some rows, while the others lie in host memory: HeteGen, section 4.

A product takes three ways at once, divided by the rows of the matrix, which are columns of the result:

    | resident on the device | streamed to it for each product | computed by the CPU |
    0                        resident_rows                     + streamed rows       rows

Host memory holds its rows once, in tiles of 16 as the native kernels read them; what is streamed becomes rows
of numbers on the device. How much is streamed is chosen for each product.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.linear import unpack
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.linear.packed import TILE_ROWS
from neo_desktop.models.linear.protocol import Embedding, Linear, WeightFormat
from neo_desktop.models.linear.quantised import Part, PartShape, Quantised, dequantised
from neo_desktop.models.linear.quantised_gpu import QuantisedOnGPU
from neo_desktop.models.linear.shares import UNMEASURED
from neo_desktop.models.linear.tiles import Tiles, unpack_tiles

CPU = torch.device("cpu")
PIECE_BYTES = 32 * 1024**2  # of a piece, once it is unpacked
RESIDENT_STEP = 64  # rows of a tile of `grouped`


class Kernels(Protocol):
    """What unpacks: `models.linear.unpack`, or something that is faster."""

    def unpack_quantised(self, type_name: str, packed: Tensor, out: Tensor, /) -> None:
        """See `unpack.unpack_quantised`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows that are streamed at once, of one part of the matrix."""

    rows: slice  # of the matrix
    packed: Tensor  # [bytes] uint8: whole tiles, a view of host memory
    columns: int
    part: int  # of the host's rows

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """What comes to the device, one after the other."""
        return (self.packed,)

    @property
    def nbytes(self) -> int:
        """How much that is."""
        return len(self.packed)

    @property
    def elements(self) -> int:
        """How many numbers it unpacks to."""
        rows: int = self.rows.stop - self.rows.start
        return rows * self.columns


class OffloadedLinear:
    """See `protocol.Linear`.

    Args:
        resident: the first rows, on the device, with their part of the bias; None: no rows.
        resident_rows: how many these are.
        host: the other rows, in host memory; its bias becomes a part of the other.
        parts: of all rows, where they are quantised in host memory.
        bias: [rows] on the device
        dtype: of the model.
        device: of x and of products.
        kernels: what unpacks quantised rows.
    """

    form = "split"
    writes_in_place = True

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
    ) -> None:
        self.resident, self.resident_rows = resident, resident_rows
        self.host, self.host_rows = host, host.rows
        self.rows, self.columns = resident_rows + host.rows, host.packed_parts[0].columns
        self.bias = bias
        self._parts, self._dtype, self._device, self._kernels = parts, dtype, device, kernels
        if device.type == "cuda":
            self.launch_all()
        if bias is not None:
            of_host = bias[resident_rows:]
            host.bias = of_host if device.type == "cpu" else torch.empty_like(of_host, device=CPU)
            if resident is not None:
                resident.bias = bias[:resident_rows]

    def memory(self) -> dict[torch.device, int]:
        """See `Linear`, likewise the others."""
        memory = Counter(self.host.memory())
        if self.resident is not None:
            memory.update(self.resident.memory())
        if self.bias is not None and self._device.type != "cpu":
            memory[self._device] += self.bias[self.resident_rows :].nbytes
        return dict(memory)

    @property
    def takes_stored(self) -> bool:
        """Whether rows are taken as they are stored: by `load_stored`, not by `load`."""
        return isinstance(self.host, Quantised)

    def load(self, row: int, weight: Tensor) -> None:
        count = max(self.resident_rows - row, 0)
        if self.resident is not None and count:
            self.resident.load(row, weight[:count])
        if count < len(weight):
            self.host.load(max(row - self.resident_rows, 0), weight[count:])

    def load_stored(self, row: int, raw: Tensor) -> None:
        """Take rows of a part as they are stored, `[rows, bytes of a row]`; each once.

        Raises ValueError for scales that are not finite.
        """
        assert isinstance(self.host, Quantised)
        count = max(self.resident_rows - row, 0)
        if count and isinstance(self.resident, QuantisedOnGPU | Quantised):
            self.resident.load_stored(row, raw[:count])
        elif count and self.resident is not None:
            ends = accumulate(part.rows for part in self._parts)
            part = next(part for part, end in zip(self._parts, ends, strict=True) if row < end)
            self.resident.load(row, dequantised(part.type_name, raw[:count]))
        if count < len(raw):
            self.host.load_stored(max(row - self.resident_rows, 0), raw[count:])

    def launch_all(self) -> None:
        """Launch what unpacks pieces, so that no iteration waits for a compiler."""
        room = torch.empty(TILE_ROWS, self.columns, dtype=self._dtype, device=self._device)
        for index, part in enumerate(self.host.packed_parts):
            self.unpack(index, torch.zeros(part.tile_bytes, dtype=torch.uint8, device=self._device), room)

    def load_bias(self, row: int, bias: Tensor) -> None:
        """Take some numbers of the bias from a checkpoint.

        Args:
            row: the first of them.
            bias: [rows], of any floating-point dtype and on any device.
        """
        assert self.bias is not None
        self.bias[row : row + len(bias)].copy_(bias)
        if self.host.bias is not None and row + len(bias) > self.resident_rows:
            first = max(row, self.resident_rows)
            of_host = slice(first - self.resident_rows, row + len(bias) - self.resident_rows)
            self.host.bias[of_host].copy_(bias[first - row :])

    def dense(self) -> Tensor:
        of_host = self.host.dense().to(self._device)
        return of_host if self.resident is None else torch.cat((self.resident.dense(), of_host))

    def streamed(self, share: float) -> int:
        """Return how many rows to stream, about a share of the host's: whole tiles of each part."""
        if not 0 <= share <= 1:
            raise ValueError(f"a share of {share} cannot be streamed: give a number from 0 to 1")
        wanted, rows = share * self.host_rows, 0
        for part in self.host.packed_parts:
            if wanted - rows < part.rows:
                return rows + min(round((wanted - rows) / TILE_ROWS) * TILE_ROWS, part.rows)
            rows += part.rows
        return rows

    def pieces(self, streamed_rows: int) -> list[Piece]:
        """Return what is streamed, in order.

        Args:
            streamed_rows: of the host's, see `streamed`.
        """
        row_bytes = self.columns * self._dtype.itemsize
        step = max(PIECE_BYTES // row_bytes // TILE_ROWS, 1) * TILE_ROWS
        return self.pieces_of(slice(0, streamed_rows), step)

    def pieces_of(self, rows: slice, step: int) -> list[Piece]:
        """Return some of the host's rows as pieces, none of which belongs to two parts.

        Args:
            rows: the first of them begins a tile.
            step: how many a piece has at most: whole tiles.
        """
        pieces, before = [], 0
        for index, part in enumerate(self.host.packed_parts):
            start, last = max(rows.start - before, 0), min(rows.stop - before, part.rows)
            for first in range(start, last, step):
                of_part = slice(first, min(first + step, last))
                begin = self.resident_rows + before
                of_all = slice(begin + of_part.start, begin + of_part.stop)
                pieces.append(Piece(of_all, part.tiles_of(of_part), self.columns, index))
            before += part.rows
        return pieces

    def host_matrix(self, streamed_rows: int) -> native.Matrix | None:
        """Return what the CPU computes, and its bias; None: nothing."""
        parts, before = [], 0
        for part in self.host.packed_parts:
            first = max(streamed_rows - before, 0)
            if first < part.rows:
                parts.append(part.native_from(first))
            before += part.rows
        bias = self.host.bias
        return (parts, None if bias is None else bias[streamed_rows:]) if parts else None

    def multiply_resident(self, x: Tensor, out: Tensor) -> None:
        """Compute the columns of the resident rows.

        Args:
            x: [n, columns] on the device
            out: [n, rows] likewise, of which these columns are filled.
        """
        if self.resident is not None:
            self.resident.multiply(x, out[:, : self.resident_rows])

    def multiply_piece(self, piece: Piece, staged: Tensor, room: Tensor, x: Tensor, out: Tensor) -> None:
        """Compute the columns of a piece.

        Args:
            piece: one of `pieces`.
            staged: its bytes on the device, `[bytes]` uint8.
            room: `[at least piece.elements]` on the device, of the model's dtype: scratch.
            x: [n, columns] on the device
            out: [n, rows] likewise, of which these columns are filled.
        """
        weight = room[: piece.elements].view(-1, self.columns)
        self.unpack(piece.part, staged, weight)
        if self.bias is None:
            torch.mm(x, weight.t(), out=out[:, piece.rows])
        else:
            torch.addmm(self.bias[piece.rows], x, weight.t(), out=out[:, piece.rows])

    def unpack(self, part: int, staged: Tensor, weight: Tensor) -> None:
        """Turn tiles of a part into numbers, on the device.

        Args:
            part: of the host's rows.
            staged: [bytes] uint8
            weight: [rows, columns], filled.
        """
        packed = self.host.packed_parts[part]
        if isinstance(packed, Part):
            self._kernels.unpack_quantised(packed.type.name, staged, weight)
        else:
            unpack_tiles(staged, weight)

    def multiply_host(self, x: Tensor, out: Tensor, streamed_rows: int) -> None:
        """Compute the CPU's part.

        Args:
            x: [n, columns] in host memory, rows are contiguous.
            out: [n, host_rows - streamed_rows] likewise.
            streamed_rows: see `streamed`.
        """
        matrix = self.host_matrix(streamed_rows)
        if matrix is not None:
            native.packed_linear(x, *matrix, out)

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        """Do all of it, one after the other: the CPU computes for few rows, others are streamed."""
        streamed_rows = self.streamed(UNMEASURED.of(len(x)))
        self.multiply_resident(x, out)
        pieces = self.pieces(streamed_rows)
        room = x.new_empty(max((piece.elements for piece in pieces), default=0))
        for piece in pieces:
            self.multiply_piece(piece, piece.packed.to(self._device), room, x, out)
        if streamed_rows < self.host_rows:
            of_host = out[:, self.resident_rows + streamed_rows :]
            product = of_host if self._device.type == "cpu" else torch.empty_like(of_host, device=CPU)
            self.multiply_host(x.contiguous().cpu(), product, streamed_rows)
            if product is not of_host:
                of_host.copy_(product)
        return out


@dataclass(frozen=True, slots=True)
class OffloadedFormat:
    """See `protocol.WeightFormat`: some matrices of a model are split.

    Args:
        device_form: how rows lie on the device.
        host_form: how they lie in host memory, and where.
        resident_rows: by the names of `WeightFormat.named`: how many rows of a matrix stay on the device, a
            multiple of 64 or all. All rows of others do, and of embeddings and head.
        kernels: what unpacks quantised rows on the device.
        name: of the one that is meant.
    """

    device_form: WeightFormat
    host_form: Dense
    resident_rows: Mapping[str, int]
    kernels: Kernels = unpack
    name: str = ""

    def named(self, name: str) -> "OffloadedFormat":
        """See `WeightFormat`, likewise the others."""
        forms = self.device_form.named(name), self.host_form.named(name)
        return replace(self, device_form=forms[0], host_form=forms[1], name=name)

    def of_rows(self, rows: slice) -> WeightFormat:
        """A part of a matrix is not split any more."""
        return self.device_form.of_rows(rows)

    def embedding(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | Embedding:
        return self.device_form.embedding(rows, columns, dtype, device)

    def embedding_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return self.device_form.embedding_bytes(rows, columns, dtype)

    def tied(self, weight: Tensor) -> Linear:
        return self.device_form.tied(weight)

    def empty(
        self, rows: int, columns: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        """See `WeightFormat`. Raises ValueError for rows that cannot be resident, or cannot be split."""
        resident, device_form, host_form = self._split(rows)
        if resident == rows:
            return self.device_form.empty(rows, columns, has_bias=has_bias, dtype=dtype, device=device)
        host = host_form.empty(rows - resident, columns, has_bias=False, dtype=dtype, device=CPU)
        if not isinstance(host, Tiles | Quantised):
            raise ValueError(f"{self.name} cannot be split: its {columns} columns cannot lie in tiles")
        on_device = (
            device_form.empty(resident, columns, has_bias=False, dtype=dtype, device=device)
            if resident
            else None
        )
        bias = torch.empty(rows, dtype=dtype, device=device) if has_bias else None
        parts = self.host_form.parts
        return OffloadedLinear(on_device, resident, host, parts, bias, dtype, device, self.kernels)

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Of the device."""
        resident, device_form, _ = self._split(rows)
        return device_form.nbytes(resident, columns, dtype) if resident else 0

    def loading_bytes(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
        return self.device_form.loading_bytes(rows, columns, dtype, device)

    def _split(self, rows: int) -> tuple[int, WeightFormat, Dense]:
        resident = self.resident_rows.get(self.name, rows)
        if not 0 <= resident <= rows or (resident % RESIDENT_STEP and resident < rows):
            raise ValueError(
                f"{resident} of the {rows} rows of {self.name} cannot stay on the device: it has to be "
                f"a multiple of {RESIDENT_STEP}, or all of them"
            )
        of_device = self.device_form.of_rows(slice(0, resident))
        return resident, of_device, self.host_form.of_rows(slice(resident, rows))
