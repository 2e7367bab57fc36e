"""async decodes, of the CPU and of workers: one layer in each turn, and nothing waits for them.

A turn is an iteration that takes them along. Their rows are among those of sub-batch 0, and are of others at
each linear stage (see `IterationPlan`). Behind a stage the hidden states of those who have passed it are kept
for the next turn, and q, k and v go to host memory: the CPU and each worker find the rows there whose KV they
have. Then come those who stand at the next stage: their hidden states, as the last turn left them, and the
output of their attention. Both happen beside the device's own attention, which has nothing to do with these
rows.

    device      |linear 0,l|attention 0,l              |linear 0,l+1|..
    to-host                |q, k, v of stage l|
    cpu, workers                              .. |attention of stage l| needed in the next turn
    to-device              |those at stage l+1|

There are two sets of what is kept: a turn reads the one that the last turn wrote, and writes the other. So a
turn that fails can be done again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from neo_desktop.engine.execute.async_buffers import AsyncBuffers
from neo_desktop.engine.execute.host import HostBatch
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.models.stages import Stages, State


@dataclass(frozen=True)
class AsyncDecodes:
    """The async decodes of an iteration, as rows of a sub-batch.

    Args:
        rows: where they are, padding included.
        memory: what the turn before has left, and what this one leaves.
        stages: the model's.
        state: the sub-batch's.
        positions: [layers, rows] int32, on the device: of those that stand at each stage but the last.
        index: of the sub-batch.
        batches: what each tier attends to, all with the same slots.
        old: which set is read.
    """

    rows: slice
    memory: AsyncBuffers
    stages: Stages
    state: State
    positions: Tensor
    index: int
    batches: Sequence[HostBatch]
    old: int

    @property
    def _count(self) -> int:
        return self.positions.shape[1]

    def exchange(self, launcher: Launcher, layer: int, linear: Signal) -> tuple[Signal, Signal]:
        """Let those who have passed a stage go, and those come who stand at the next one.

        Args:
            linear: the end of the stage.

        Returns:
            What the next stage waits for.
        """
        stage = Stage("staggered q, k, v", layer, self.index, self._count)
        sent = launcher.run(Lane.TO_HOST, stage, partial(self._send, layer), (linear,))
        for batch in self.batches:
            launcher.host(batch.lane, batch.stage(layer), batch.step(layer), (sent,))
        stage = Stage("staggered o", layer, self.index, self._count)
        return sent, launcher.run(Lane.TO_DEVICE, stage, partial(self._exchange, layer), (linear,))

    # What the lanes run.

    def _send(self, layer: int) -> None:
        target = self.memory.qkv[layer, : self._count]
        target.copy_(self.state.qkv[self.rows].view(target.shape), non_blocking=True)

    def _exchange(self, layer: int) -> None:
        state, memory, rows, count = self.state, self.memory, self.rows, self._count
        memory.waiting[1 - self.old, layer, :count].copy_(state.residual[rows])
        state.residual[rows].copy_(memory.waiting[self.old, layer, :count])
        state.attention[rows].copy_(memory.out[self.old, layer, :count], non_blocking=True)
        if layer == 0:  # of all layers at once
            positions = self.positions.flatten()
            self.stages.rotate(positions, memory.cos[: len(positions)], memory.sin[: len(positions)])
        if layer + 1 < len(self.positions):
            next_one = slice((layer + 1) * count, (layer + 2) * count)
            state.cos[rows].copy_(memory.cos[next_one])
            state.sin[rows].copy_(memory.sin[next_one])
