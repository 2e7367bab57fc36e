"""Async decodes of the CPU and of workers: they advance one layer per async step and block no other work.

An async step is an iteration that advances async decodes (APEX: asynchronous overlap). Their rows belong to
sub-batch 0, and hold different decodes at each linear stage (see `IterationPlan`). After a stage, the hidden
states of the decodes that passed it are kept for the next async step. Their q, k and v go to host memory,
where the CPU and each worker find the rows of their tier. Then the decodes at the next stage take over the
rows: their hidden states from the last async step, and the output of their attention. Both exchanges run
beside the device's own attention, which does not touch these rows.

    device      |linear 0,l|attention 0,l              |linear 0,l+1|..
    to-host                |q, k, v of stage l|
    cpu, workers                              .. |attention of stage l| needed in the next async step
    to-device              |rows of stage l+1|

There are two sets of buffers: an async step reads the set that the last one wrote, and writes the other. So
the model runner can repeat a failed async step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from neo_desktop.engine.execute.async_buffers import AsyncBuffers
from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.host import HostBatch
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import State


@dataclass
class AsyncDecodes(Attender):
    """The async decodes of an iteration, as rows of a sub-batch.

    Args:
        rows: Rows in the sub-batch, padding included.
        memory: The buffers that persist between async steps.
        state: The sub-batch's state.
        positions: [layers, rows] int32, on the device: token positions at each stage but the last.
        batches: One batch per tier, all with the same slots.
        old: Index of the set to read.
    """

    rows: slice
    memory: AsyncBuffers
    stages: Stages
    state: State
    positions: Tensor
    index: int
    batches: Sequence[HostBatch]
    old: int

    def __post_init__(self) -> None:
        self.on_host = self.batches
        self.key = self.old

    @property
    def _count(self) -> int:
        return self.positions.shape[1]

    def attend(self, launcher: Launcher, layer: int, linear: Signal) -> Sequence[Signal]:
        """Save the decodes that passed a stage, and load the decodes of the next stage."""
        stage = Stage("async q, k, v", layer, self.index, self._count)
        sent = launcher.run(Lane.TO_HOST, stage, partial(self._send, layer), (linear,))
        for batch in self.batches:
            launcher.host(batch.lane, batch.stage(layer), batch.step(layer), (sent,))
        stage = Stage("async o", layer, self.index, self._count)
        return sent, launcher.run(Lane.TO_DEVICE, stage, partial(self._exchange, layer), (linear,))

    def commit(self) -> None:
        self.memory.end_turn()

    def _send(self, layer: int) -> None:
        target = self.memory.qkv[layer, : self._count]
        target.copy_(self.state.qkv[self.rows].view(target.shape), non_blocking=True)

    def _exchange(self, layer: int) -> None:
        state, memory, rows, count = self.state, self.memory, self.rows, self._count
        memory.waiting[1 - self.old, layer, :count].copy_(state.residual[rows])
        state.residual[rows].copy_(memory.waiting[self.old, layer, :count])
        state.attention[rows].copy_(memory.out[self.old, layer, :count], non_blocking=True)
        if layer == 0:  # rotations for every layer at once
            positions = self.positions.flatten()
            self.stages.rotate(positions, memory.cos[: len(positions)], memory.sin[: len(positions)])
        if layer + 1 < len(self.positions):
            next_one = slice((layer + 1) * count, (layer + 2) * count)
            state.cos[rows].copy_(memory.cos[next_one])
            state.sin[rows].copy_(memory.sin[next_one])
