"""Pieces of offloaded experts that are streamed to the device for one matmul: a few whole experts at once.

A buffer holds the gates of these experts in the CPU's packed format, then their ups, then their downs. After
unpacking they are ordinary resident experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from neo_desktop.models.experts_config import Gating
from neo_desktop.models.linear.offloaded import PIECE_BYTES, OffloadedLinear, Piece
from neo_desktop.models.linear.stacked import Stacked, StackedExperts


@dataclass(frozen=True, slots=True)
class ExpertPiece:
    """Experts that are streamed together."""

    first: int  # place of the first expert; the others follow
    count: int
    matrices: tuple[tuple[OffloadedLinear, tuple[Piece, ...]], ...]  # gates, ups, downs; or ups, downs

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
        """
        *gate_up, down = self._matrices(staged, room)
        return StackedExperts(self.count, gate_up[0], gate_up[-1], down, gating)

    def _matrices(self, staged: Tensor, room: Tensor) -> Iterator[Stacked]:
        byte, number = 0, 0
        for split, pieces in self.matrices:
            begin = number
            for piece in pieces:
                numbers = room[number : number + piece.elements].view(-1, split.columns)
                split.unpack(piece.part, staged[byte : byte + piece.nbytes], numbers)
                byte, number = byte + piece.nbytes, number + piece.elements
            weight = room[begin:number].view(-1, split.columns)
            yield Stacked(weight, _bias_of(split, pieces), len(weight) // self.count)


def _bias_of(split: OffloadedLinear, pieces: Sequence[Piece]) -> Tensor | None:
    bias = split.bias
    if bias is None:
        return None
    start, stop = pieces[0].rows.start, pieces[-1].rows.stop
    if stop - start == sum(piece.elements for piece in pieces) // split.columns:
        return bias[start:stop]
    return torch.cat([bias[piece.rows] for piece in pieces])


def expert_pieces(
    matrices: Sequence[OffloadedLinear],
    count: int,
    first: int,
    experts: Sequence[int],
    dtype: torch.dtype,
) -> list[ExpertPiece]:
    """Return the pieces that stream experts in host memory to the device.

    Args:
        matrices: the layer's gates, ups and downs; or ups and downs.
        first: place of the first expert.
        experts: numbers of the experts in host memory, from 0.
    """
    expert_rows = [split.rows // count for split in matrices]
    elements = sum(rows * split.columns for rows, split in zip(expert_rows, matrices, strict=True))
    step = max(PIECE_BYTES // (elements * dtype.itemsize), 1)
    pieces = []
    for start in range(0, len(experts), step):
        some = experts[start : start + step]
        parts = tuple(
            (
                split,
                tuple(
                    piece
                    for run in _runs(some)
                    for piece in split.pieces_of(slice(run.start * rows, run.stop * rows), split.rows)
                ),
            )
            for rows, split in zip(expert_rows, matrices, strict=True)
        )
        pieces.append(ExpertPiece(first + start, len(some), parts))
    return pieces


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Yield the longest runs of consecutive numbers."""
    for _, run in groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        found = [number for _, number in run]
        yield range(found[0], found[-1] + 1)
