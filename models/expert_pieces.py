"""Pieces of offloaded experts that are streamed to the device for one matmul: a few whole experts at once.

A buffer holds the gates of these experts in the CPU's packed format, then their ups, then their downs. After
unpacking they are ordinary resident experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.models.experts_config import Gating
from neo_desktop.models.linear.offloaded import PIECE_BYTES, OffloadedLinear, Piece
from neo_desktop.models.linear.stacked import Stacked, StackedExperts


@dataclass(frozen=True, slots=True)
class ExpertPiece:
    """Consecutive experts that are streamed together."""

    first: int  # index among all experts of the layer
    count: int
    matrices: tuple[tuple[OffloadedLinear, tuple[Piece, ...]], ...]  # gates, ups, downs

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return tuple(piece.packed for _, pieces in self.matrices for piece in pieces)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.sources))

    @property
    def elements(self) -> int:
        return sum(piece.elements for _, pieces in self.matrices for piece in pieces)

    def unpacked(self, staged: Tensor, room: Tensor, gating: Gating) -> StackedExperts:
        """Unpack the experts into `room`.

        Args:
            staged: the piece's bytes on the device, `[bytes]` uint8.
            room: `[at least elements]` on the device, in the model's dtype: scratch.
            gating: see `StackedExperts`.
        """
        gate, up, down = self._matrices(staged, room)
        return StackedExperts(self.count, gate, up, down, gating)

    def _matrices(self, staged: Tensor, room: Tensor) -> Iterator[Stacked]:
        byte, number = 0, 0
        for split, pieces in self.matrices:
            begin = number
            for piece in pieces:
                numbers = room[number : number + piece.elements].view(-1, split.columns)
                split.unpack(piece.part, staged[byte : byte + piece.nbytes], numbers)
                byte, number = byte + piece.nbytes, number + piece.elements
            weight = room[begin:number].view(-1, split.columns)
            rows = slice(pieces[0].rows.start, pieces[-1].rows.stop)
            yield Stacked(weight, None if split.bias is None else split.bias[rows], len(weight) // self.count)


def expert_pieces(
    matrices: Sequence[OffloadedLinear], count: int, streamed: int, dtype: torch.dtype
) -> list[ExpertPiece]:
    """Return the pieces that stream the first experts in host memory to the device.

    Args:
        matrices: the layer's gates, ups and downs.
        count: number of experts in the layer.
        streamed: number of host experts to stream.
        dtype: of the model.
    """
    expert_rows = [split.rows // count for split in matrices]
    elements = sum(rows * split.columns for rows, split in zip(expert_rows, matrices, strict=True))
    step = max(PIECE_BYTES // (elements * dtype.itemsize), 1)
    resident = matrices[0].resident_rows // expert_rows[0]
    pieces = []
    for first in range(0, streamed, step):
        last = min(first + step, streamed)
        parts = tuple(
            (split, tuple(split.pieces_of(slice(first * rows, last * rows), split.rows)))
            for rows, split in zip(expert_rows, matrices, strict=True)
        )
        pieces.append(ExpertPiece(resident + first, last - first, parts))
    return pieces
