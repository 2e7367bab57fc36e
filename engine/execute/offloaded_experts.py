"""Mixtures of experts of which some lie in host memory.

Some of those come to the device for each product, whichever of them the rows need, and the CPU computes what
the others make of the rows that are given to them. So a prompt, which needs nearly all, is for the bus and
the device, and a decode for the CPU, which reads what was chosen:

    device     |router|resident experts|piece 0|piece 1|     |sum|..
    weights    |piece 0|piece 1|piece 2|..
    to-host           |rows, choice|
    cpu                            |its experts        |
    to-device                                          |what they make|
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.execute.host_experts import HostExperts
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.weight_stream import WeightStream
from neo_desktop.models.expert_pieces import ExpertPiece
from neo_desktop.models.moe import MoE
from neo_desktop.models.stages import DividedExperts


@dataclass(frozen=True, slots=True)
class DividedMoE:
    """A layer's experts, of which those in host memory are divided between bus and CPU."""

    moe: MoE
    streamed: int  # of those in host memory, the first ones
    pieces: Sequence[ExpertPiece]

    @classmethod
    def of(cls, moe: MoE, share: float, dtype: torch.dtype) -> "DividedMoE":
        """Return it with about this share of the experts in host memory streamed."""
        streamed = round(share * moe.num_on_host)
        return cls(moe, streamed, moe.pieces(streamed, dtype))

    @property
    def has_host_part(self) -> bool:
        """Whether the CPU has some of the experts."""
        return self.streamed < self.moe.num_on_host


@dataclass
class ExpertPass:
    """The experts of rows of a sub-batch, in some turns."""

    divided: Mapping[int, DividedMoE]  # by turn
    host: HostExperts | None  # None: the CPU has none in any turn
    numbers: Tensor  # scratch of the device, for the largest piece

    def submit(
        self, launcher: Launcher, stream: WeightStream, stage: Stage, experts: DividedExperts, made: Signal
    ) -> list[Signal]:
        """Give a turn's experts to the lanes; return what ends with them beside the device's.

        Args:
            stream: what brings the pieces.
            stage: of the device.
            experts: what is asked for.
            made: the end of what they read.
        """
        turn, x, room, out = stage.layer, experts.x, experts.room, experts.out
        divided, moe = self.divided[turn], experts.moe
        computed = self._compute(launcher, stage, experts) if divided.has_host_part else None
        last, adds = made, moe.has_device_part
        if moe.has_device_part:
            last = launcher.run(Lane.DEVICE, stage, partial(moe.multiply_on_device, x, room, out))
        for piece in divided.pieces:
            staged, arrived = stream.take()
            where = staged, self.numbers, x, room, out
            multiply = partial(moe.multiply_piece, piece, *where, adds=adds)
            last, adds = launcher.run(Lane.DEVICE, stage, multiply, (arrived,)), True
            stream.give_back(launcher, last)
        if self.host is None or computed is None:
            return []
        what, of_host = self.host.what(turn), self.host.out
        if not adds:
            bring = partial(out.copy_, of_host, non_blocking=True)
            return [launcher.run(Lane.TO_DEVICE, what, bring, (computed,))]
        # Nobody reads the rows any more.
        bring = partial(x.copy_, of_host, non_blocking=True)
        brought = launcher.run(Lane.TO_DEVICE, what, bring, (last, computed))
        launcher.run(Lane.DEVICE, stage, partial(out.add_, x), (brought,))
        return []

    def _compute(self, launcher: Launcher, stage: Stage, experts: DividedExperts) -> Signal:
        """Have the CPU compute its part; return the end of that."""
        host, turn = self.host, stage.layer
        assert host is not None
        find = partial(experts.moe.find_host_ids, experts.room, self.divided[turn].streamed)
        found = launcher.run(Lane.DEVICE, stage, find)
        send = partial(host.take, experts.x, experts.room.choice)
        sent = launcher.run(Lane.TO_HOST, host.what(turn), send, (found,))
        return launcher.host(Lane.CPU, host.stage(turn), host.step(turn), (sent,))
