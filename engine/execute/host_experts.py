"""Experts that lie in host memory: the CPU computes what they make of the rows that are given to them.

device     |router|the device's experts|          |sum|..
to-host           |rows, choice|
cpu                            |its experts |
to-device                                   |what they make|
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_memory
from neo_desktop.engine.execute.host_work import HostWork
from neo_desktop.engine.execute.lane import Lane, Recorder, Signal
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.expert_operators import ExpertScratch
from neo_desktop.models.experts import Mixture
from neo_desktop.models.stages import DividedExperts
from neo_desktop.native.relay import RelayExperts


class ExpertRoom:
    """Host memory through which a sub-batch and the CPU give each other rows and what experts make of them.

    Args:
        rows: of a sub-batch.
        decoder: of a model with experts.
        flags: of the sub-batch.
    """

    def __init__(self, rows: int, decoder: Decoder, flags: Tensor) -> None:
        config, device = decoder.config, decoder.device
        assert config.experts is not None
        hidden, per_token = config.hidden_size, config.experts.per_token

        def room(columns: int, dtype: torch.dtype) -> Tensor:
            return host_memory(lambda pin: torch.zeros(rows, columns, dtype=dtype, pin_memory=pin), device)

        scratch = ExpertScratch.empty(config, rows, decoder.dtype, torch.device("cpu"))
        assert scratch is not None
        self.rows = rows
        self.flags = flags
        self.x, self.out = room(hidden, decoder.dtype), room(hidden, decoder.dtype)
        self.ids, self.weights = room(per_token, torch.int32), room(per_token, torch.float32)
        self.scratch = scratch

    @property
    def on_host(self) -> Iterator[Tensor]:
        """What a graph copies from and to."""
        yield from (self.x, self.out, self.ids, self.weights, self.flags)


@dataclass
class HostExperts(HostWork):
    """The CPU's experts in each turn of a sub-batch; see `split_products.HostProduct`."""

    index: int  # of the sub-batch
    rows: int
    mixtures: Mapping[int, Mixture]  # by turn
    num_turns: int
    room: ExpertRoom
    busy_ns: int = 0  # how long the CPU computed, in all turns

    @property
    def flags(self) -> Tensor:
        """See `native.relay.empty_flags`."""
        return self.room.flags

    @property
    def arguments(self) -> RelayExperts:
        """What relays are told."""
        room, rows = self.room, self.rows
        scratch = room.scratch.first(rows)
        mixtures = [self.mixtures.get(turn) for turn in range(self.num_turns)]
        return RelayExperts(
            [None if mixture is None else mixture.on_host for mixture in mixtures],
            room.x[:rows],
            room.ids[:rows],
            room.weights[:rows],
            scratch.gate_up,
            scratch.gated,
            scratch.products,
            room.out[:rows],
            room.flags,
            self.mixtures,
            self.index,
        )

    def stage(self, turn: int) -> Stage:
        """See `HostWork`; so much for each turn."""
        return Stage("experts on the CPU", turn, self.index, self.rows)

    def carry_out(self, turn: int) -> None:
        """Compute what the CPU's experts make."""
        room, rows = self.room, slice(self.rows)
        scratch = room.scratch.first(self.rows)
        self.mixtures[turn].multiply_on_host(
            room.x[rows], room.ids[rows], room.weights[rows], scratch, room.out[rows]
        )

    def submit(
        self, recorder: Recorder, stage: Stage, experts: DividedExperts, made: Signal
    ) -> tuple[Signal, ...]:
        """Give a turn's experts to the lanes, on both sides; return what ends with them beside the device.

        Args:
            stage: of the device.
            experts: what is asked for.
            made: the end of what they read.
        """
        turn, room, rows = stage.layer, self.room, slice(self.rows)
        what = Stage("experts", turn, self.index, self.rows)

        def send() -> None:
            choice = experts.room.choice
            room.x[rows].copy_(experts.x, non_blocking=True)
            room.ids[rows].copy_(choice.host_ids, non_blocking=True)
            room.weights[rows].copy_(choice.host_weights, non_blocking=True)

        sent = recorder.run(Lane.TO_HOST, what, send, (made,))
        computed = recorder.host(Lane.CPU, self.stage(turn), self.step(turn), (sent,))
        of_host = room.out[rows]
        if not experts.mixture.has_device_part:
            bring = partial(experts.out.copy_, of_host, non_blocking=True)
            return (recorder.run(Lane.TO_DEVICE, what, bring, (computed,)),)
        multiply = partial(experts.mixture.multiply_on_device, experts.x, experts.room, experts.out)
        multiplied = recorder.run(Lane.DEVICE, stage, multiply)
        # Nobody reads the rows any more.
        bring = partial(experts.x.copy_, of_host, non_blocking=True)
        brought = recorder.run(Lane.TO_DEVICE, what, bring, (multiplied, computed))
        recorder.run(Lane.DEVICE, stage, partial(experts.out.add_, experts.x), (brought,))
        return ()
