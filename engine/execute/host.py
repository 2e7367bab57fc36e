"""The CPU's part in an iteration: attention over KV in host memory, matmuls with weights in host memory, and
copies of KV rows to and from pages.

With a GPU, relays do this work: native threads that wait for flags, so that neither Python nor the launching
thread stands between the GPU and the CPU. Flags also start a worker's part, through the thread that talks to
the worker (`worker_relay`).
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.execute.lane import HostTask, Lane
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.execute.worker_relay import WorkerRelay
from neo_desktop.engine.int_array import IntView
from neo_desktop.engine.kv.layer import DecodeRows
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.remote.pool import RemoteLayer
from neo_desktop.engine.watchdog import Watchdog
from neo_desktop.models.attention import heads_of
from neo_desktop.native.relay import Relay, RelayStalledError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OffloadBuffers:
    """Host buffers between a sub-batch and the CPU for a layer's q, k, v and attention output.

    The buffers of async decodes have a leading dimension of layers.
    """

    qkv: Tensor  # [decodes, heads + kv_parts * kv_heads, head_dim]
    out: Tensor  # [decodes, heads, head_dim]
    flags: Tensor  # see `native.relay.empty_flags`


class HostAttention:
    """Attention of a tier's decodes in a sub-batch, in every layer, on the CPU or a worker.

    It is kept for iterations of equal sizes, because a native task is slow to make. Async decodes are at
    different layers, so their tensors have a leading dimension of layers.

    Args:
        buffers: For at least as many decodes.
    """

    task: HostTask  # of the last `fill`

    def __init__(self, buffers: OffloadBuffers, pool: KVPool, index: int) -> None:
        self._buffers, self._pool, self._index = buffers, pool, index
        self._layers = tuple(buffers.qkv.shape[:-3])  # of async decodes; empty: one layer at a time
        self._block_tables = self._context_lens = np.zeros(0, np.int32)

    def fill(self, block_tables: Sequence[IntView], context_lens: Sequence[int]) -> None:
        """Take the decodes of an iteration; a context of 0 tokens marks an empty slot.

        Args:
            block_tables: Per decode; of async decodes per layer and slot, layer 0 first.
            context_lens: In the same order.

        Raises:
            ValueError: A context does not fit its block table, or a block is not in the pool.
        """
        width, count = max(map(len, block_tables), default=0), len(block_tables) // math.prod(self._layers)
        shape = *self._layers, count, width
        # A worker recognises the tables that it has by their tensor.
        is_new = self._pool.worker is not None or self._block_tables.shape != shape
        if is_new:
            self._block_tables, self._context_lens = np.zeros(shape, np.int32), np.zeros(shape[:-1], np.int32)
        for row, table in zip(self._block_tables.reshape(-1, max(width, 1)), block_tables, strict=False):
            row[: len(table)] = table
        self._context_lens.reshape(-1)[:] = context_lens
        if is_new:
            self.task = self._task(torch.from_numpy(self._block_tables), torch.from_numpy(self._context_lens))
        elif self.task.native is not None:
            self.task.native.check()
            self.task.busy_ns = 0

    def _task(self, block_tables: Tensor, context_lens: Tensor) -> HostTask:
        pool, index, flags = self._pool, self._index, self._buffers.flags
        count, is_async = context_lens.shape[-1], bool(self._layers)
        out = self._buffers.out[..., :count, :, :]
        q, k, v = heads_of(self._buffers.qkv[..., :count, :, :], out.shape[-2], pool.config.num_kv_heads)
        prefix = "async " if is_async else ""
        if pool.worker is None:
            task = pool.host_caches.decode_task(q, k, v, out, block_tables, context_lens, flags, index)
            return HostTask.of(task, Lane.CPU, f"{prefix}CPU attention", index, count, is_awaited=True)
        rows = DecodeRows(q, block_tables, context_lens, out, k, v)
        stage = partial(Stage, f"{prefix}worker's attention", sub_batch=index, tokens=count)
        ask, take = (_ask_async, _take_async) if is_async else (_ask, _take)
        return HostTask(
            pool.worker,
            stage,
            partial(take, pool, rows),
            flags,
            partial(ask, pool, rows),
            is_awaited=not is_async,
        )


def _remote(pool: KVPool, layer: int) -> RemoteLayer:
    there = pool.layer(layer)
    assert isinstance(there, RemoteLayer)
    return there


def _ask(pool: KVPool, rows: DecodeRows, layer: int) -> None:
    """Send a worker its rows."""
    _remote(pool, layer).ask(rows)


def _take(pool: KVPool, rows: DecodeRows, layer: int) -> None:
    """Receive a worker's answer."""
    _remote(pool, layer).answer(rows.out)


def _ask_async(pool: KVPool, rows: DecodeRows, layer: int) -> None:
    """Send a worker the rows of its own async decodes at a layer, if any."""
    slots = rows.context_lens[layer].nonzero().flatten()
    if len(slots):
        assert rows.k is not None
        assert rows.v is not None
        tensors = rows.q, rows.block_tables, rows.context_lens, rows.out, rows.k, rows.v
        q, tables, lens, out, k, v = (each[layer].index_select(0, slots) for each in tensors)
        _remote(pool, layer).ask(DecodeRows(q, tables, lens, out, k, v))


def _take_async(pool: KVPool, rows: DecodeRows, layer: int) -> None:
    slots, out = rows.context_lens[layer].nonzero().flatten(), rows.out[layer]
    if len(slots):
        answer = torch.empty(len(slots), *out.shape[1:], dtype=out.dtype)
        _remote(pool, layer).answer(answer)
        out.index_copy_(0, slots, answer)


class Relays:
    """Threads for the part of the CPU and of workers in iterations: a native relay per lane of the CPU, and
    threads per worker.
    """

    def __init__(self) -> None:
        self._relays: dict[str, Relay | WorkerRelay] = {}  # by lane, created on first use
        self._under_way: list[tuple[Relay | WorkerRelay, Sequence[HostTask]]] = []

    def start(self, tasks: Sequence[HostTask], watch: Watchdog) -> None:
        """Begin an iteration, before the device begins.

        Args:
            tasks: The iteration's tasks, each lane's in the device's order within a turn; those without flags
                are left to threads.
            watch: Watchdog that follows the flags.
        """
        self._under_way = []
        by_lane: dict[str, list[HostTask]] = {}
        for each in tasks:
            if each.flags is not None:
                by_lane.setdefault(each.lane, []).append(each)
        for lane, those in by_lane.items():
            natives = [task.native for task in those if task.native is not None]
            relay = self._relays.get(lane)
            if relay is None:
                relay = self._relays[lane] = Relay() if natives else WorkerRelay(lane)
            if isinstance(relay, Relay):
                relay.start(natives, watch.timeout_s)
            else:
                relay.start(those, watch)
            self._under_way.append((relay, those))
        if by_lane:  # progress is a flag more that the GPU or the CPU has raised
            flags = [each.flags for each in tasks if each.flags is not None]
            watch.follow(lambda: sum(int(each.sum()) for each in flags))

    def finish(self, timeline: Timeline | None) -> None:
        """Wait for all work of the iteration, and add its times to `busy_ns` and the timeline.

        Raises:
            RelayStalledError: A relay timed out.
            WorkerLostError: A worker does not answer.
            RuntimeError: A relay was cancelled, or a step failed.
        """
        recorder = timeline if timeline is not None and timeline.is_recording else None
        for relay, tasks in self._under_way:
            for step in relay.finish():
                task = tasks[step.task]
                task.busy_ns += step.end_ns - step.start_ns
                if recorder is not None:
                    recorder.add(task.lane, task.stage(step.turn), step.start_ns, step.end_ns)
        self._under_way = []

    def break_off(self) -> RelayStalledError | None:
        """Abort an iteration; return the error if a stalled step may still run and store KV."""
        stalled: RelayStalledError | None = None
        self.cancel()  # relays may wait for flags that nothing raises any more, and the device for relays
        for relay, _ in self._under_way:
            try:
                relay.finish()
            except RelayStalledError as error:
                stalled = stalled or error
            except Exception:
                logger.debug("a relay's step failed as well", exc_info=True)
        self._under_way = []
        return stalled

    def cancel(self) -> None:
        """Cancel all waits for the CPU and workers; any thread may call this."""
        for relay in tuple(self._relays.values()):
            relay.cancel()

    def close(self) -> bool:
        """End the threads; return True if all have ended."""
        has_ended = [relay.close() for relay in self._relays.values()]
        return all(has_ended)
