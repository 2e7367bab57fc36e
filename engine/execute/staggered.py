"""Decodes that the CPU attends for at their own pace: one layer in each turn, and nobody waits for them.

A turn is an iteration that takes them along. Their rows are among those of sub-batch 0, and are of others at
each linear stage (see `IterationPlan`). Before the stage come the hidden states with which the last turn left
those who stand there now, and the output of their attention. Behind it the hidden states are kept for the
next turn, and q, k and v go to the CPU.

    device      |linear 0,l|attention 0,l|linear 1,l|..              |linear 0,l+1|
    to-host                |q, k, v of stage l|
    cpu                                       .. |attention of stage l| needed in the next turn
    to-device              |o for stage l+1, of the last turn|

There are two sets of what is kept: a turn reads the one that the last turn wrote, and writes the other. So a
turn that fails can be done again.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from neo_desktop.engine.execute.host import HostBatch
from neo_desktop.engine.execute.lane import Lane, Recorder, Signal
from neo_desktop.engine.execute.staggered_memory import StaggeredMemory
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.models.stages import Stages, State


@dataclass(frozen=True)
class Staggered:
    """The staggered decodes of an iteration, as rows of a sub-batch.

    Args:
        rows: where they are, padding included.
        memory: what the turn before has left, and what this one leaves.
        state: the sub-batch's.
        positions: [layers, rows] int32, on the device: of those that stand at each stage but the last.
        batch: what the CPU attends to.
        old: which set is read.
    """

    rows: slice
    memory: StaggeredMemory
    state: State
    positions: Tensor
    batch: HostBatch
    old: int

    @property
    def _count(self) -> int:
        return self.positions.shape[1]

    def rotate(self, stages: Stages) -> None:
        """Compute the rotations of all layers: work for the device, ahead of stage 0."""
        memory, positions = self.memory, self.positions.flatten()
        stages.rotate(positions, memory.cos[: len(positions)], memory.sin[: len(positions)])

    def come(self, layer: int) -> None:
        """Bring the states of those who stand at a stage but the first: work for the device, ahead of it."""
        state, memory, rows = self.state, self.memory, self.rows
        state.residual[rows].copy_(memory.waiting[self.old, layer - 1, : self._count])
        if layer < len(self.positions):
            begin = layer * self._count
            state.cos[rows].copy_(memory.cos[begin : begin + self._count])
            state.sin[rows].copy_(memory.sin[begin : begin + self._count])

    def go(self, layer: int) -> None:
        """Keep the states of those who have passed a stage but the last: work for the device, behind it."""
        self.memory.waiting[1 - self.old, layer, : self._count].copy_(self.state.residual[self.rows])

    def hand_over(self, recorder: Recorder, layer: int, linear: Signal) -> tuple[Signal, Signal]:
        """Give those who have passed a stage to the CPU, and bring its output to those at the next one.

        Args:
            linear: the end of the stage.

        Returns:
            What the next stage waits for: their rows are somebody else's then.
        """
        index = self.batch.index
        stage = Stage("staggered q, k, v", layer, index, self._count)
        sent = recorder.run(Lane.TO_HOST, stage, partial(self._send, layer), (linear,))
        recorder.host(Lane.CPU, self.batch.stage(layer), self.batch.step(layer), (sent,))
        stage = Stage("staggered o", layer, index, self._count)
        arrived = recorder.run(Lane.TO_DEVICE, stage, partial(self._bring, layer), (linear,))
        return sent, arrived

    def end(self, recorder: Recorder) -> None:
        """Bring those who stand at the last stage."""
        last = len(self.positions)
        stage = Stage("staggered", last, self.batch.index, self._count)
        recorder.run(Lane.DEVICE, stage, partial(self.come, last))

    def _send(self, layer: int) -> None:
        target = self.batch.hand_over.qkv[layer]
        target.copy_(self.state.qkv[self.rows].view(target.shape), non_blocking=True)

    def _bring(self, layer: int) -> None:
        out = self.memory.out[self.old, layer, : self._count]
        self.state.attention[self.rows].copy_(out, non_blocking=True)
