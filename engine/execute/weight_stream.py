"""Pieces of weights on their way to the device: from pinned memory at once, or through buffers that are.

Copies from memory that is not pinned are slow, and block the thread that launches them. So such pieces go
through two pinned buffers, which a thread of the CPU fills ahead (HeteGen, section 4.3):

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

from neo_desktop.engine.cuda.copies import host_memory
from neo_desktop.engine.execute.host_work import HostWork
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.ring import Ring
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.predict.offloaded_matmul import Sizes
from neo_desktop.models.expert_pieces import ExpertPiece
from neo_desktop.models.linear.offloaded import PIECE_BYTES, Piece
from neo_desktop.native.relay import RelayCopies, empty_flags

logger = logging.getLogger(__name__)

NUM_BUFFERS = 3  # of pieces on their way
NUM_STAGING = 2  # pinned buffers: one is filled while the device takes the other


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


class Staging:
    """Pinned buffers for weights that are not: kept for all iterations.

    Args:
        sources: all of them, as they are copied.
        passes: how often an iteration may bring them.
        device: the model's.
    """

    def __init__(self, sources: Sequence[Tensor], passes: int, device: torch.device) -> None:
        largest = max(map(len, sources))
        self._memory = {_memory_of(source) for source in sources}
        self.buffers = [
            host_memory(lambda pin: torch.empty(largest, dtype=torch.uint8, pin_memory=pin), device)
            for _ in range(NUM_STAGING)
        ]
        self.flags = host_memory(lambda pin: empty_flags(passes * len(sources), pinned=pin), device)

    @classmethod
    def of(cls, sources: Iterable[Tensor], passes: int, device: torch.device) -> "Staging | None":
        """Return what those need that are not pinned; None: nothing."""
        needed = [source for source in sources if needs_staging(source, device)]
        if not needed:
            return None
        _tell_of_staging()
        return cls(needed, passes, device)

    @property
    def on_host(self) -> list[Tensor]:
        """What graphs copy from, and their flags."""
        return [*self.buffers, self.flags]

    def takes(self, source: Tensor) -> bool:
        """Whether it goes through them."""
        return _memory_of(source) in self._memory


def _memory_of(source: Tensor) -> int:
    return source.untyped_storage().data_ptr()


def needs_staging(source: Tensor, device: torch.device) -> bool:
    """Return whether weights in host memory had better be copied to pinned memory first, which can be had."""
    return device.type == "cuda" and fallbacks.level("host_memory") == "pinned" and not source.is_pinned()


@cache  # once in a process
def _tell_of_staging() -> None:
    logger.warning(
        "the system does not pin all weights in host memory: on their way to the GPU a thread of the CPU "
        "copies them to buffers that are pinned"
    )


class StagedWeights(HostWork):
    """The CPU's part: what it copies to the buffers, a source in each turn.

    Args:
        staging: the buffers.
        sources: in the order in which they are taken, with what each belongs to.
    """

    def __init__(self, staging: Staging, sources: Sequence[tuple[Stage, Tensor]]) -> None:
        self._staging = staging
        self._stages = [stage for stage, _ in sources]
        self.sources = [source for _, source in sources]
        self.busy_ns = 0

    @property
    def lane(self) -> str:
        """See `HostWork`: there is a thread for it."""
        return Lane.HOST_WEIGHTS

    @property
    def flags(self) -> Tensor:
        return self._staging.flags

    @property
    def arguments(self) -> RelayCopies:
        """What relays are told."""
        return RelayCopies("weights", self.sources, self._staging.buffers, self.flags)

    def buffer(self, turn: int) -> Tensor:
        """Return where a source comes, [bytes]."""
        return self._staging.buffers[turn % NUM_STAGING][: len(self.sources[turn])]

    def stage(self, turn: int) -> Stage:
        """See `HostWork`; so much for each turn."""
        return self._stages[turn]

    def carry_out(self, turn: int) -> None:
        """Copy a source."""
        self.buffer(turn).copy_(self.sources[turn])


class WeightStream:
    """The pieces of an iteration's matrices on their way to the device.

    Args:
        pieces: in the order in which they are taken, with what each belongs to.
        buffers: where they come.
        staging: what their sources go through that are not pinned; None: all are.
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
        self.staged: StagedWeights | None = None  # the CPU's part; None: it has none
        if staging is not None:
            through = [(stage, source) for stage, piece in self._waiting for source in piece.sources]
            through = [each for each in through if staging.takes(each[1])]
            self.staged = StagedWeights(staging, through) if through else None
        self._filled: list[Signal] = []  # by turn: the end of the CPU's part
        self._sent: list[Signal] = []  # likewise: when the device has it

    def bring(self, launcher: Launcher) -> None:
        """Have pieces brought, as far as there is room."""
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
        """Have a part of a piece brought, be it by way of the pinned buffers, which are filled ahead."""
        staged, turn = self.staged, len(self._sent)
        if staged is None or self._staging is None or not self._staging.takes(source):
            return launcher.run(
                Lane.WEIGHTS, stage, partial(target.copy_, source, non_blocking=True), is_free
            )
        # The next one is asked for before this one is waited for: the lane asks and takes in order.
        while len(self._filled) < min(turn + NUM_STAGING, len(staged.sources)):
            ahead = len(self._filled)
            taken = () if ahead < NUM_STAGING else (self._sent[ahead - NUM_STAGING],)
            filled = launcher.host(Lane.HOST_WEIGHTS, staged.stage(ahead), staged.step(ahead), taken)
            self._filled.append(filled)
        copy = partial(target.copy_, staged.buffer(turn), non_blocking=True)
        self._sent.append(launcher.run(Lane.WEIGHTS, stage, copy, (*is_free, self._filled[turn])))
        return self._sent[turn]

    def take(self) -> tuple[Tensor, Signal]:
        """Return where the next piece lies on the device, and what ends with its copy."""
        return self._arrived.popleft()

    def give_back(self, launcher: Launcher, used: Signal) -> None:
        """Take in what ends with the use of the oldest piece that was taken."""
        self._ring.give_back(used)
        self.bring(launcher)


def _copy(sources: Sequence[Tensor], staged: Tensor) -> None:
    targets = torch.split(staged, [len(source) for source in sources])
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
