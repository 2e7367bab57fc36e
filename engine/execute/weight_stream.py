"""Weights that come to the device from host memory ahead of their use, piece by piece."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.execute.lane import Lane, Recorder, Signal
from neo_desktop.engine.execute.ring import Ring
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.predict.split_product import Sizes
from neo_desktop.models.expert_pieces import ExpertPiece
from neo_desktop.models.linear.split import PIECE_BYTES, Piece

NUM_BUFFERS = 3  # of pieces on their way


def streaming_bytes(matrices: Mapping[str, Sizes]) -> int:
    """Return the bytes of the device that the buffers take at most, and the room to unpack a piece.

    Args:
        matrices: see `weight_plan.layer_matrices`.
    """
    packed = unpacked = PIECE_BYTES
    for sizes in matrices.values():
        if sizes.is_experts:  # pieces have whole ones
            of_each = -(-sizes.unpacked_bytes // sizes.rows)
            count = max(PIECE_BYTES // of_each, 1)
            packed = max(packed, count * -(-sizes.host_bytes // sizes.rows))
            unpacked = max(unpacked, count * of_each)
    return NUM_BUFFERS * packed + unpacked


class WeightStream:
    """The pieces of an iteration's matrices on their way to the device.

    Args:
        pieces: in the order in which they are taken, with what each belongs to.
        buffers: where they come.
    """

    def __init__(
        self, pieces: Iterable[tuple[Stage, Piece | ExpertPiece]], buffers: Sequence[Tensor]
    ) -> None:
        self._waiting = deque(pieces)
        self._buffers = buffers
        self._ring = Ring(len(buffers))
        self._arrived: deque[tuple[Tensor, Signal]] = deque()

    def bring(self, recorder: Recorder) -> None:
        """Have pieces brought, as far as there is room."""
        while self._waiting and self._ring.has_room:
            stage, piece = self._waiting.popleft()
            slot, is_free = self._ring.fill()
            staged = self._buffers[slot][: piece.nbytes]
            copy = partial(_copy, piece.sources, staged)
            self._arrived.append((staged, recorder.run(Lane.WEIGHTS, stage, copy, is_free)))

    def take(self) -> tuple[Tensor, Signal]:
        """Return where the next piece lies on the device, and what ends with its copy."""
        return self._arrived.popleft()

    def give_back(self, recorder: Recorder, used: Signal) -> None:
        """Take in what ends with the use of the oldest piece that was taken."""
        self._ring.give_back(used)
        self.bring(recorder)


def _copy(sources: Sequence[Tensor], staged: Tensor) -> None:
    targets = torch.split(staged, [len(source) for source in sources])
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
