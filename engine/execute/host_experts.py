"""The CPU's part in MoE layers: experts in host memory that are not streamed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_empty
from neo_desktop.engine.execute.lane import HostTask, Lane
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.expert_operators import Choice, ExpertScratch
from neo_desktop.models.moe import MoE
from neo_desktop.native.relay import experts_task


class ExpertRoom:
    """Host buffers between a sub-batch and the CPU's experts: inputs, routing and outputs.

    Args:
        rows: Number of rows of a sub-batch.
        decoder: The decoder of a model with experts.
        flags: The sub-batch's flags, by name in a turn.
    """

    def __init__(self, rows: int, decoder: Decoder, flags: Mapping[str, Tensor]) -> None:
        config, device = decoder.config, decoder.device
        assert config.experts is not None
        hidden, per_token, count = config.hidden_size, config.experts.per_token, config.experts.count

        def room(columns: int, dtype: torch.dtype) -> Tensor:
            return host_empty((rows, columns), dtype, device).zero_()

        sizes = count, per_token, config.experts.intermediate_size, hidden
        self.rows = rows
        self.flags = flags
        self.x, self.out = room(hidden, decoder.dtype), room(hidden, decoder.dtype)
        self.ids, self.weights = room(per_token, torch.int32), room(per_token, torch.float32)
        self.scratch = ExpertScratch.empty(rows, *sizes, decoder.dtype, torch.device("cpu"))

    @property
    def on_host(self) -> Iterator[Tensor]:
        """The tensors that graphs copy from and to."""
        yield from (self.x, self.out, self.ids, self.weights, *self.flags.values())


@dataclass(frozen=True, slots=True)
class HostExperts:
    """The CPU's experts of one name, in every turn of a sub-batch; see `offloaded_matmuls.HostProduct`."""

    name: str
    index: int  # index of the sub-batch
    rows: int
    room: ExpertRoom
    task: HostTask

    @classmethod
    def of(
        cls,
        name: str,
        index: int,
        rows: int,
        moe_layers: Mapping[int, MoE],
        num_turns: int,
        room: ExpertRoom,
    ) -> Self:
        """Make the experts of the CPU in these MoE layers, by turn."""
        experts = [moe_layers[turn].on_host if turn in moe_layers else None for turn in range(num_turns)]
        scratch = room.scratch.first(rows)
        given = room.x[:rows], room.ids[:rows], room.weights[:rows]
        tensors = *given, scratch.gate_up, scratch.gated, scratch.products, room.out[:rows]
        task = experts_task(experts, tensors, room.flags[name], owners=moe_layers, index=index)
        return cls(name, index, rows, room, HostTask.of(task, Lane.CPU, f"{name} on the CPU", index, rows))

    def what(self, turn: int) -> Stage:
        """Return the stage for the transfers of a turn."""
        return Stage(self.name, turn, self.index, self.rows)

    def take(self, x: Tensor, choice: Choice) -> None:
        """Copy rows `[rows, hidden]` and their routing to host memory."""
        room, rows = self.room, slice(self.rows)
        room.x[rows].copy_(x, non_blocking=True)
        room.ids[rows].copy_(choice.host_ids, non_blocking=True)
        room.weights[rows].copy_(choice.weights, non_blocking=True)

    @property
    def out(self) -> Tensor:
        """Output of the CPU's experts, [rows, hidden]."""
        return self.room.out[: self.rows]
