"""KV transfers over the bus within an iteration, layer by layer, parallel to the computation.

KV in host memory is stored in pages, which only the CPU can read and write. So rows go through host buffers:
the device copies to or from a buffer, and the CPU copies between the buffer and pages. Each transfer has two
buffers, for even and odd layers: one is in transfer while the CPU fills or empties the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import HostBuffer, host_memory
from neo_desktop.engine.execute.lane import HostStep, Lane, Launcher, Signal
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.kv.layer import Rows
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.native.relay import RelayTransfer, empty_flags

NUM_BUFFERS = 2


@dataclass
class HostTransfer:
    """The CPU's part in a transfer: copies between a host buffer and a pool in host memory."""

    name: str  # name of its stages
    index: int  # index of the sub-batch, or NO_SUB_BATCH
    pool: KVPool
    transfer: RelayTransfer
    done: list[Signal | None] = field(default_factory=lambda: [None] * NUM_BUFFERS)  # per buffer

    @property
    def lane(self) -> str:
        """The lane that carries it out: the CPU's, or the worker's own lane."""
        return Lane.HOST_SWAP if self.pool.worker is None else f"{self.pool.worker} rows"

    def buffer(self, layer: int) -> Rows:
        """Return the buffer of a layer."""
        return self.transfer.buffers[layer % NUM_BUFFERS]

    def stage(self, layer: int) -> Stage:
        """Return the stage of a layer."""
        return Stage(self.name, layer, self.index, len(self.transfer.slots))

    def step(self, layer: int) -> HostStep:
        """Return the step of a layer."""
        # A worker's transfers are never part of a graph, so they need no flags.
        flags = self.transfer.flags[:, layer] if self.pool.worker is None else None
        return HostStep(partial(self._carry_out, layer), flags)

    def _carry_out(self, layer: int) -> None:
        rows, slots = self.buffer(layer), self.transfer.slots
        if self.transfer.to_host:
            self.pool.layer(layer).write(rows[0], rows[1], slots)
        else:
            self.pool.layer(layer).read(slots, rows)


class ToHost:
    """A transfer of rows from the device to pages in host memory."""

    def __init__(self, host: HostTransfer, lane: Lane) -> None:
        self.host = host
        self._lane = lane

    @property
    def transfers(self) -> Sequence[HostTransfer]:
        """The CPU's part."""
        return (self.host,)

    def send(self, launcher: Launcher, layer: int, rows: Rows, after: Sequence[Signal]) -> Signal:
        """Submit the transfer of a layer's rows; return the signal that they have left the device."""
        read = partial(_copy, rows)  # one copy for K and V: a GPU gathers them first
        return self.submit(launcher, layer, read, after)[0]

    def submit(
        self, launcher: Launcher, layer: int, read: Callable[[Rows], object], after: Sequence[Signal]
    ) -> tuple[Signal, Signal]:
        """Submit the transfer of a layer; return the signals of the copy to the buffer and of the write.

        Args:
            read: Starts the copy of the rows to a host buffer.
            after: Signals to wait for.
        """
        buffer, emptied = self.host.buffer(layer), self.host.done[layer % NUM_BUFFERS]
        free = () if emptied is None else (emptied,)
        stage = self.host.stage(layer)
        arrived = launcher.run(self._lane, stage, partial(read, buffer), (*after, *free))
        written = launcher.host(self.host.lane, stage, self.host.step(layer), (arrived,))
        self.host.done[layer % NUM_BUFFERS] = written
        return arrived, written


class FromHost:
    """A transfer of rows from pages in host memory to the device."""

    def __init__(self, host: HostTransfer) -> None:
        self.host = host

    @property
    def transfers(self) -> Sequence[HostTransfer]:
        """The CPU's part."""
        return (self.host,)

    def bring(self, launcher: Launcher, layer: int, target: Rows, after: Sequence[Signal]) -> Signal:
        """Submit the transfer of a layer; return the signal that the rows are in `target` on the device."""
        return self.submit(launcher, layer, partial(target.copy_, non_blocking=True), after)

    def submit(
        self, launcher: Launcher, layer: int, write: Callable[[Rows], object], after: Sequence[Signal]
    ) -> Signal:
        """Submit the transfer of a layer; return the signal of its end.

        Args:
            write: Starts the copy of the rows from a host buffer.
            after: Signals to wait for before writing on the device.
        """
        buffer, brought = self.host.buffer(layer), self.host.done[layer % NUM_BUFFERS]
        free = () if brought is None else (brought,)
        stage = self.host.stage(layer)
        gathered = launcher.host(self.host.lane, stage, self.host.step(layer), free)
        arrived = launcher.run(Lane.SWAP, stage, partial(write, buffer), (gathered, *after))
        self.host.done[layer % NUM_BUFFERS] = arrived
        return arrived


def _copy(rows: Rows, buffer: Rows) -> None:
    buffer.copy_(rows, non_blocking=True)


class TransferMemory:
    """Host buffers for the transfers of an iteration, one each; they grow and never shrink.

    Args:
        num_layers: Number of the model's layers.
        row_shape: (kv_heads, head_dim)
        dtype: The model's type.
        device: The model's device.
    """

    def __init__(
        self, num_layers: int, row_shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_layers, self._row_shape = num_layers, row_shape
        self._dtype, self._device = dtype, device
        self._memory: list[tuple[HostBuffer, Tensor]] = []
        self._num_taken = 0

    def begin(self) -> None:
        """Begin an iteration, which may reuse the buffers."""
        self._num_taken = 0

    def transfer(
        self,
        name: str,
        pool: KVPool,
        slots: Tensor,
        *,
        to_host: bool,
        is_behind: bool = False,
        index: int = NO_SUB_BATCH,
    ) -> HostTransfer:
        """Make a transfer.

        Args:
            name: Name of its stages.
            pool: A pool in host memory.
            slots: Slots of the pool, [n] int64.
            to_host: True: write rows to the pool. False: read rows.
            is_behind: True: run after the computation of the layer. False: run one layer ahead.
            index: Index of the sub-batch, or NO_SUB_BATCH.
        """
        if self._num_taken == len(self._memory):
            flags = host_memory(lambda pin: empty_flags(self._num_layers, pinned=pin), self._device)
            self._memory.append((HostBuffer(self._device), flags))
        memory, flags = self._memory[self._num_taken]
        self._num_taken += 1
        both = memory.view((NUM_BUFFERS, 2, len(slots), *self._row_shape), self._dtype)
        suffix = "" if index == NO_SUB_BATCH else f" of sub-batch {index}"
        relay = RelayTransfer(f"{name!r}{suffix}", to_host, is_behind, slots, (both[0], both[1]), flags)
        return HostTransfer(name, index, pool, relay)
