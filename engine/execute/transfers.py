"""KV transfers over the bus within an iteration, layer by layer, parallel to the computation.

KV in host memory is stored in pages, which only the CPU can read and write. So rows go through host buffers:
the device copies to or from a buffer, and the CPU copies between the buffer and pages. Each transfer has two
buffers, for even and odd layers: one is in transfer while the CPU fills or empties the other.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import HostBuffer, host_flags
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Signal
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage
from neo_desktop.engine.kv.layer import KVShape, Rows, rows_shape
from neo_desktop.engine.kv.storage import KVPool

NUM_BUFFERS = 2


class Transfer:
    """A transfer of rows between a pool in host memory and the device, in every layer.

    Args:
        task: The CPU's part: copies between a layer's buffer and the pool.
        buffers: Host buffers, used in turn.
    """

    def __init__(self, task: HostTask, buffers: Sequence[Rows], lane: Lane) -> None:
        self.task = task
        self._buffers = buffers
        self._lane = lane
        self._done: list[tuple[Signal, ...]] = [() for _ in buffers]  # ends of the last uses

    def to_pages(
        self, launcher: Launcher, layer: int, read: Callable[[Rows], object], after: Sequence[Signal]
    ) -> tuple[Signal, Signal]:
        """Submit the transfer of a layer; return the signals of the copy to the buffer and of the write.

        Args:
            read: Starts the copy of the rows to a host buffer.
        """
        slot = layer % len(self._buffers)
        copy = partial(read, self._buffers[slot])
        arrived = launcher.run(self._lane, self.task.stage(layer), copy, (*after, *self._done[slot]))
        written = launcher.host(self.task, layer, (arrived,))
        self._done[slot] = (written,)
        return arrived, written

    def from_pages(
        self, launcher: Launcher, layer: int, write: Callable[[Rows], object], after: Sequence[Signal]
    ) -> Signal:
        """Submit the transfer of a layer; return the signal of its end.

        Args:
            write: Starts the copy of the rows from a host buffer.
            after: Signals to wait for before writing on the device.
        """
        slot = layer % len(self._buffers)
        copy = partial(write, self._buffers[slot])
        gathered = launcher.host(self.task, layer, self._done[slot])
        arrived = launcher.run(self._lane, self.task.stage(layer), copy, (gathered, *after))
        self._done[slot] = (arrived,)
        return arrived


class TransferMemory:
    """Host buffers for the transfers of an iteration, one each; they grow and never shrink."""

    def __init__(self, config: KVShape, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
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
    ) -> Transfer:
        """Make a transfer.

        Args:
            slots: Slots of the pool, [n] int64.
            to_host: True: write rows to the pool. False: read rows.
            is_behind: True: run after the computation of the layer. False: run one layer ahead.
        """
        if self._num_taken == len(self._memory):
            flags = host_flags(self._config.num_layers, self._device)
            self._memory.append((HostBuffer(self._device), flags))
        memory, flags = self._memory[self._num_taken]
        self._num_taken += 1
        shape = NUM_BUFFERS, *rows_shape(self._config, len(slots))
        buffers = memory.view(shape, self._dtype).unbind()
        if pool.worker is None:
            what = f"{name!r}" if index == NO_SUB_BATCH else f"{name!r} of sub-batch {index}"
            rows = pool.host_caches.rows_task(
                what, slots, buffers, flags, to_host=to_host, is_behind=is_behind
            )
            task = HostTask.of(rows, Lane.HOST_SWAP, name, index, len(slots))
        else:
            stage = partial(Stage, name, sub_batch=index, tokens=len(slots))
            move = partial(_move, pool, slots, buffers, to_host)
            # A worker's transfers are never part of a graph, so they need no flags.
            task = HostTask(f"{pool.worker} rows", stage, move)
        return Transfer(task, buffers, Lane.STORE if is_behind else Lane.SWAP)


def _move(pool: KVPool, slots: Tensor, buffers: Sequence[Rows], to_host: bool, layer: int) -> None:
    """Copy a layer's rows between its buffer and the pool."""
    rows, there = buffers[layer % len(buffers)], pool.layer(layer)
    if to_host:
        there.write(rows[0], rows[-1], slots)
    else:
        there.read(slots, rows)
