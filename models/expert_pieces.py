"""Experts that are brought from host memory to the device for a product: a few at once, whole ones.

In a buffer lie the gates of all of them as the CPU keeps them, then their ups, then their downs. Unpacked,
they are experts like those that are resident.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.models.experts_config import ClampedGate
from neo_desktop.models.linear.offloaded import PIECE_BYTES, OffloadedLinear, Piece
from neo_desktop.models.linear.stacked import Stacked, StackedExperts


@dataclass(frozen=True, slots=True)
class ExpertPiece:
    """Some experts that are streamed at once."""

    first: int  # of all of the layer's
    count: int
    matrices: tuple[tuple[OffloadedLinear, tuple[Piece, ...]], ...]  # gates, ups, downs

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """See `Piece`, likewise the others."""
        return tuple(piece.packed for _, pieces in self.matrices for piece in pieces)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.sources))

    @property
    def elements(self) -> int:
        return sum(piece.elements for _, pieces in self.matrices for piece in pieces)

    def unpacked(self, staged: Tensor, room: Tensor, clamped: ClampedGate | None) -> StackedExperts:
        """Return the experts, whose numbers lie in `room`.

        Args:
            staged: its bytes on the device, `[bytes]` uint8.
            room: `[at least elements]` on the device, of the model's dtype: scratch.
            clamped: see `StackedExperts`.
        """
        gate, up, down = self._matrices(staged, room)
        return StackedExperts(self.count, gate, up, down, clamped)

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
    """Return what brings the first experts in host memory to the device.

    Args:
        matrices: gates, ups and downs of all experts.
        count: how many experts there are.
        streamed: how many of those in host memory come.
        dtype: of the model.
    """
    of_each = [split.rows // count for split in matrices]
    elements = sum(rows * split.columns for rows, split in zip(of_each, matrices, strict=True))
    step = max(PIECE_BYTES // (elements * dtype.itemsize), 1)
    resident = matrices[0].resident_rows // of_each[0]
    pieces = []
    for first in range(0, streamed, step):
        last = min(first + step, streamed)
        parts = tuple(
            (split, tuple(split.pieces_of(slice(first * rows, last * rows), split.rows)))
            for rows, split in zip(of_each, matrices, strict=True)
        )
        pieces.append(ExpertPiece(resident + first, last - first, parts))
    return pieces
