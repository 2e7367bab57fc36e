"""MoE layers with some experts in host memory.

Some of these experts are streamed to the device for each MoE layer, whether or not the rows need them. The
CPU computes the others for the rows routed to them. A prompt needs nearly all experts, which suits the bus
and the device. A decode needs few, which suits the CPU, because it reads only the chosen experts:

    device     |router|resident experts|piece 0|piece 1|     |sum|..
    weights    |piece 0|piece 1|piece 2|..
    to-host           |rows, routing|
    cpu                             |CPU's experts      |
    to-device                                           |output|
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_empty
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Signal
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.weight_stream import WeightStream
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.expert_operators import Choice, ExpertScratch
from neo_desktop.models.expert_pieces import ExpertPiece
from neo_desktop.models.moe import MoE
from neo_desktop.models.ops import DividedExperts
from neo_desktop.native.relay import experts_task


class ExpertRoom:
    """Host buffers between a sub-batch and the CPU's experts: inputs, routing and outputs.

    Args:
        flags: The sub-batch's flags, by name in a turn.
    """

    def __init__(self, rows: int, decoder: Decoder, flags: Mapping[str, Tensor]) -> None:
        config, device = decoder.config, decoder.device
        assert config.experts is not None
        hidden, per_token = config.hidden_size, config.experts.per_token

        def room(columns: int, dtype: torch.dtype) -> Tensor:
            return host_empty((rows, columns), dtype, device).zero_()

        self.rows = rows
        self.flags = flags
        self.x, self.out = room(hidden, decoder.dtype), room(hidden, decoder.dtype)
        self.ids, self.weights = room(per_token, torch.int32), room(per_token, torch.float32)
        cpu = torch.device("cpu")
        self.scratch = ExpertScratch.empty(rows, config.experts, hidden, decoder.dtype, cpu)

    @property
    def on_host(self) -> Iterator[Tensor]:
        """The tensors that graphs copy from and to."""
        yield from (self.x, self.out, self.ids, self.weights, *self.flags.values())


class HostExperts:
    """The CPU's experts of one name, in every turn of a sub-batch; see `offloaded_matmuls.HostProduct`.

    Args:
        moe_layers: turn -> MoE layer
    """

    def __init__(
        self,
        name: str,
        index: int,
        rows: int,
        moe_layers: Mapping[int, MoE],
        num_turns: int,
        room: ExpertRoom,
    ) -> None:
        self._name, self._index, self._rows, self._room = name, index, rows, room
        experts = [moe_layers[turn].on_host if turn in moe_layers else None for turn in range(num_turns)]
        scratch = room.scratch.first(rows)
        given = room.x[:rows], room.ids[:rows], room.weights[:rows]
        tensors = *given, scratch.gate_up, scratch.gated, scratch.products, room.out[:rows]
        task = experts_task(experts, tensors, room.flags[name], owners=moe_layers, index=index)
        self.task = HostTask.of(task, Lane.CPU, f"{name} on the CPU", index, rows)

    def what(self, turn: int) -> Stage:
        """Return the stage for the transfers of a turn."""
        return Stage(self._name, turn, self._index, self._rows)

    def take(self, x: Tensor, choice: Choice) -> None:
        """Copy rows `[rows, hidden]` and their routing to host memory."""
        room, rows = self._room, slice(self._rows)
        room.x[rows].copy_(x, non_blocking=True)
        room.ids[rows].copy_(choice.host_ids, non_blocking=True)
        room.weights[rows].copy_(choice.weights, non_blocking=True)

    @property
    def out(self) -> Tensor:
        """Output of the CPU's experts, [rows, hidden]."""
        return self._room.out[: self._rows]


@dataclass(frozen=True, slots=True)
class DividedMoE:
    """An MoE layer whose experts in host memory are divided between bus and CPU."""

    moe: MoE
    streamed: int  # the number of streamed experts, which are the first ones in host memory
    pieces: Sequence[ExpertPiece]

    @classmethod
    def of(cls, moe: MoE, share: float, dtype: torch.dtype) -> "DividedMoE":
        """Divide a layer so that about this share of its experts in host memory is streamed."""
        streamed = round(share * moe.num_on_host)
        return cls(moe, streamed, moe.pieces(streamed, dtype))

    @property
    def has_host_part(self) -> bool:
        """True if the CPU computes some of the experts."""
        return self.streamed < self.moe.num_on_host


@dataclass
class ExpertPass:
    """The MoE layers of a range of turns, for rows of a sub-batch."""

    divided: Mapping[tuple[int, str], DividedMoE]  # (turn, name) -> divided MoE layer
    hosts: Mapping[str, HostExperts]  # names of layers with experts of the CPU in these turns
    numbers: Tensor  # device scratch for the largest piece
    log: Mapping[tuple[int, str], Tensor]  # room for the ids of chosen experts; see `ExpertMoves.log_of`

    def submit(
        self, launcher: Launcher, stream: WeightStream, stage: Stage, experts: DividedExperts, made: Signal
    ) -> list[Signal]:
        """Submit a turn's experts; return the signals to wait for besides the device's lane.

        Args:
            made: The signal that the input is ready.
        """
        turn, x, room, out = stage.layer, experts.x, experts.room, experts.out
        divided, moe = self.divided[turn, experts.name], experts.moe
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
        if computed is None:
            return []
        host = self.hosts[experts.name]
        what, host_out = host.what(turn), host.out
        if not adds:
            bring = partial(out.copy_, host_out, non_blocking=True)
            return [launcher.run(Lane.TO_DEVICE, what, bring, (computed,))]
        # The input rows are not read any more, so their memory receives the CPU's output.
        bring = partial(x.copy_, host_out, non_blocking=True)
        brought = launcher.run(Lane.TO_DEVICE, what, bring, (last, computed))
        launcher.run(Lane.DEVICE, stage, partial(out.add_, x), (brought,))
        return []

    def _compute(self, launcher: Launcher, stage: Stage, experts: DividedExperts) -> Signal:
        """Submit the CPU's experts; return the signal of their end."""
        host, turn = self.hosts[experts.name], stage.layer
        find = partial(self._find_host_ids, experts, turn)
        routed = launcher.run(Lane.DEVICE, stage, find)
        send = partial(host.take, experts.x, experts.room.choice)
        sent = launcher.run(Lane.TO_HOST, host.what(turn), send, (routed,))
        return launcher.host(host.task, turn, (sent,))

    def _find_host_ids(self, experts: DividedExperts, turn: int) -> None:
        key = turn, experts.name
        if key in self.log:
            self.log[key].copy_(experts.room.choice.ids)
        experts.moe.find_host_ids(experts.room, self.divided[key].streamed)
