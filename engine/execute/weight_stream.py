"""Streaming of weight pieces to the device, directly from pinned memory or through pinned buffers.

Copies from pageable memory are slow, and block the launching thread. So pageable pieces go through two pinned
buffers, which a CPU thread fills ahead (HeteGen, section 4.3):

    host-weights |piece 0 to buffer 0|piece 1 to buffer 1|piece 2 to buffer 0|..
    weights                          |buffer 0           |buffer 1           |..
    device                                               |piece 0|           |piece 1|..
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_empty, host_flags
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Signal
from neo_desktop.engine.execute.ring import Ring
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.predict.offloaded_matmul import Sizes
from neo_desktop.models.expert_pieces import ExpertPiece
from neo_desktop.models.linear.offloaded import PIECE_BYTES, Piece
from neo_desktop.native.relay import copy_task

logger = logging.getLogger(__name__)

NUM_BUFFERS = 3  # device buffers for pieces
NUM_STAGING = 2  # pinned buffers: the CPU fills one while the device reads the other


def streaming_bytes(matrices: Mapping[str, Sizes]) -> int:
    """Return the most bytes of device memory for the buffers, and for unpacking a piece.

    Args:
        matrices: See `weight_plan.layer_matrices`.
    """
    packed = unpacked = PIECE_BYTES
    for sizes in matrices.values():
        if sizes.is_experts:  # pieces contain whole experts
            expert_bytes = -(-sizes.unpacked_bytes // sizes.rows)
            count = max(PIECE_BYTES // expert_bytes, 1)
            packed = max(packed, count * -(-sizes.host_bytes // sizes.rows))
            unpacked = max(unpacked, count * expert_bytes)
    return NUM_BUFFERS * packed + unpacked


class Staging:
    """Permanent pinned buffers for pageable weights.

    Args:
        sources: All pageable sources of copies.
        passes: Most copies per source and iteration.
    """

    def __init__(self, sources: Sequence[Tensor], passes: int, device: torch.device) -> None:
        largest = max(map(len, sources))
        self._memory = {_memory_of(source) for source in sources}
        self.buffers = [host_empty(largest, torch.uint8, device) for _ in range(NUM_STAGING)]
        self.flags = host_flags(passes * len(sources), device)

    @classmethod
    def of(cls, sources: Iterable[Tensor], passes: int, device: torch.device) -> "Staging | None":
        """Return buffers for the sources that need staging; None if no source does."""
        needed = [source for source in sources if needs_staging(source, device)]
        if not needed:
            return None
        _warn_about_staging()
        return cls(needed, passes, device)

    @property
    def on_host(self) -> list[Tensor]:
        """The host tensors that graphs use."""
        return [*self.buffers, self.flags]

    def takes(self, source: Tensor) -> bool:
        """Return True if a source goes through the buffers."""
        return _memory_of(source) in self._memory

    def task(self, sources: Sequence[tuple[Stage, Tensor]]) -> HostTask | None:
        """Make the CPU's copies of sources, with their stages, to the buffers; None: there are none."""
        if not sources:
            return None
        copies = copy_task("weights", [source for _, source in sources], self.buffers, self.flags)
        stages = [stage for stage, _ in sources]
        return HostTask(Lane.HOST_WEIGHTS, stages.__getitem__, copies.run, copies.flags, native=copies)


def _memory_of(source: Tensor) -> int:
    return source.untyped_storage().data_ptr()


def needs_staging(source: Tensor, device: torch.device) -> bool:
    """Return True if weights in host memory are pageable, and pinned buffers are available for the copy."""
    return device.type == "cuda" and fallbacks.level("host_memory") == "pinned" and not source.is_pinned()


@cache  # once in a process
def _warn_about_staging() -> None:
    logger.warning(
        "the system does not pin all weights in host memory: a CPU thread copies them through pinned buffers "
        "to the GPU"
    )


class WeightStream:
    """The stream of an iteration's weight pieces to the device.

    Args:
        pieces: Stages and pieces, in the order of their use.
        staging: Pinned buffers for pageable sources; None: all sources are pinned.
    """

    def __init__(
        self,
        pieces: Iterable[tuple[Stage, Piece | ExpertPiece]],
        buffers: Sequence[Tensor],
        staging: Staging | None,
    ) -> None:
        self._waiting = deque(pieces)
        self._buffers = buffers
        self._ring = Ring(len(buffers))
        self._arrived: deque[tuple[Tensor, Signal]] = deque()
        self._staging = staging
        self.task: HostTask | None = None  # the CPU's part; None: no staging
        self._num_staged = 0  # sources that go through the buffers
        if staging is not None:
            through = [(stage, source) for stage, piece in self._waiting for source in piece.sources]
            through = [each for each in through if staging.takes(each[1])]
            self.task, self._num_staged = staging.task(through), len(through)
        self._filled: list[Signal] = []  # per turn: end of the CPU's copy
        self._sent: list[Signal] = []  # per turn: end of the copy to the device

    def bring(self, launcher: Launcher) -> None:
        """Submit copies of pieces while buffers are free."""
        while self._waiting and self._ring.has_room:
            stage, piece = self._waiting.popleft()
            slot, is_free = self._ring.fill()
            target = self._buffers[slot][: piece.nbytes]
            if self._staging is None:
                arrived = launcher.run(Lane.WEIGHTS, stage, partial(_copy, piece.sources, target), is_free)
            else:
                targets = torch.split(target, [len(source) for source in piece.sources])
                for part, source in zip(targets, piece.sources, strict=True):
                    arrived = self._bring_source(launcher, stage, source, part, is_free)
            self._arrived.append((target, arrived))

    def _bring_source(
        self, launcher: Launcher, stage: Stage, source: Tensor, target: Tensor, is_free: Sequence[Signal]
    ) -> Signal:
        """Submit the copy of a part of a piece, through the pinned buffers if it is pageable."""
        task, turn = self.task, len(self._sent)
        if task is None or self._staging is None or not self._staging.takes(source):
            return launcher.run(
                Lane.WEIGHTS, stage, partial(target.copy_, source, non_blocking=True), is_free
            )
        # Submit the CPU's next copy before the wait for this one: the lane works in order.
        while len(self._filled) < min(turn + NUM_STAGING, self._num_staged):
            ahead = len(self._filled)
            taken = () if ahead < NUM_STAGING else (self._sent[ahead - NUM_STAGING],)
            self._filled.append(launcher.host(task, ahead, taken))
        buffer = self._staging.buffers[turn % NUM_STAGING]
        copy = partial(target.copy_, buffer[: len(source)], non_blocking=True)
        self._sent.append(launcher.run(Lane.WEIGHTS, stage, copy, (*is_free, self._filled[turn])))
        return self._sent[turn]

    def take(self) -> tuple[Tensor, Signal]:
        """Return the device buffer of the next piece, and the signal of its copy."""
        return self._arrived.popleft()

    def give_back(self, launcher: Launcher, used: Signal) -> None:
        """Release the oldest taken piece; `used` signals the end of its use."""
        self._ring.give_back(used)
        self.bring(launcher)


def _copy(sources: Sequence[Tensor], staged: Tensor) -> None:
    targets = torch.split(staged, [len(source) for source in sources])
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
