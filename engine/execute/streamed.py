"""Transfers of streamed KV: to the device for attention there, and back to host memory (Pie, section 3.2).

A layer's earlier KV is copied to the prefetch buffer, see `kv.streamed`, as soon as a slot is free. New rows
are copied to host memory. Both directions run at once, behind the computation:

    device      |linear l|attention l|linear l+1|attention l+1|linear l+2|attention l+2|..
    swap-in     |layer l+1           |layer l+2               |layer l+3                |..
    swap-out             |new rows of l         |new rows of l+1          |..

New rows of decodes go to separate buffers, and are stored after the iteration has succeeded. Prompts have
many new rows, which go to their final slots at once; no attention reads these slots before that. So a failed
iteration can be repeated.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from neo_desktop.engine.cuda.copies import host_empty
from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.decodes import DeviceDecodes
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal, Work
from neo_desktop.engine.execute.layout import BatchMembers
from neo_desktop.engine.execute.prefill import Prefill
from neo_desktop.engine.execute.prompts import DevicePrompts
from neo_desktop.engine.execute.ring import Ring
from neo_desktop.engine.execute.timeline import NO_SUB_BATCH, Stage, timed_event
from neo_desktop.engine.execute.workspace import Memory
from neo_desktop.engine.kv.layer import Rows
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv.streamed import WINDOW, BlockRun, StreamedPool
from neo_desktop.models.stages import Stages

NAME = "swap in"


def streamed_pool(storage: KVStorage) -> StreamedPool | None:
    """Return the pool of streamed KV, if any; at most one tier is streamed."""
    pools = (storage[tier] for tier in storage.tiers)
    return next((pool for pool in pools if isinstance(pool, StreamedPool)), None)


class Mark(Protocol):
    """A timestamp on a GPU's stream; without a GPU, on the recording thread."""

    def record(self) -> None:
        """Record the current time."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds until `end`; negative if `end` is earlier."""


class _Moment:
    def __init__(self) -> None:
        self._ns = 0

    def record(self) -> None:
        self._ns = time.perf_counter_ns()

    def elapsed_time(self, end: "_Moment") -> float:
        return (end._ns - self._ns) / 1e6


class CopyTimes:
    """Marks around the copies of layers, kept for all iterations because graphs record them."""

    def __init__(self, layers: Iterable[int], device: torch.device) -> None:
        def mark() -> Mark:
            return timed_event(in_graph=True) if device.type == "cuda" else _Moment()

        # layer -> start of its copy, end of its copy, and start of the device's wait for the copy.
        self._marks = {layer: (mark(), mark(), mark()) for layer in layers}

    def around(self, layer: int, copy: Work) -> None:
        """Carry out and time a copy."""
        begins, ends, _ = self._marks[layer]
        begins.record()
        copy()
        ends.record()

    def wanted(self, launcher: Launcher, layer: int) -> None:
        """Mark the point where the device starts to wait for a layer's copy."""
        launcher.run(
            Lane.DEVICE, Stage("wait for a copy", layer, NO_SUB_BATCH, 0), self._marks[layer][2].record
        )

    def read(self) -> tuple[float, float]:
        """Return the ms of the last finished iteration's copies, and of the waits for them."""
        copies_ms = waits_ms = 0.0
        for begins, ends, wanted in self._marks.values():
            copies_ms += begins.elapsed_time(ends)
            waits_ms += max(wanted.elapsed_time(ends), 0.0)
        return copies_ms, waits_ms


class PrefetchStream(Attender):
    """The prefetch of an iteration's streamed layers through the prefetch buffer.

    Args:
        moves: Moves of blocks, which precede the copies.
        bring: Starts the copy of a layer's blocks.
        num_tokens: Number of tokens whose KV is copied.
    """

    def __init__(
        self,
        layers: Sequence[int],
        moves: Attender,
        bring: Callable[[int], None],
        num_tokens: int,
        times: CopyTimes,
    ) -> None:
        self._layers = layers if num_tokens else ()
        self.spans_layers = num_tokens > 0
        self._moves = moves
        self._start = bring
        self._num_tokens = num_tokens
        self._times = times
        self._begin()

    def _begin(self) -> None:
        self._waiting = deque(self._layers)
        self._ready: dict[int, Sequence[Signal]] = {}  # layer -> signals that precede its copy
        self._arrived: dict[int, Signal] = {}
        self._wanted: set[int] = set()  # layers with a submitted wait
        self._ring = Ring(WINDOW)

    def fetch(self, launcher: Launcher, layer: int) -> None:
        self._ready[layer] = self._moves.fetched(layer)
        self._bring(launcher)

    def fetch_all(self, launcher: Launcher) -> None:
        self._begin()
        self._ready = dict.fromkeys(self._waiting, ())
        self._bring(launcher)

    def wait(self, launcher: Launcher, layer: int) -> None:
        """Make later device work, which attends to a layer or writes to it, wait for its copy."""
        if layer not in self._arrived:
            return
        if layer not in self._wanted:
            self._wanted.add(layer)
            self._times.wanted(launcher, layer)
        launcher.wait((self._arrived[layer],))

    def copied(self) -> tuple[float, float, int]:
        if not self._num_tokens:
            return 0.0, 0.0, 0
        return *self._times.read(), self._num_tokens

    def release(self, launcher: Launcher, layer: int) -> None:
        if layer not in self._arrived:
            return
        self._ring.give_back(launcher.mark())
        self._bring(launcher)

    def _bring(self, launcher: Launcher) -> None:
        """Submit copies of layers while slots are free."""
        while self._waiting and self._waiting[0] in self._ready and self._ring.has_room:
            layer = self._waiting.popleft()
            _, is_free = self._ring.fill()  # the pool computes a layer's slot itself
            stage = Stage(NAME, layer, NO_SUB_BATCH, self._num_tokens)
            copy = partial(self._times.around, layer, partial(self._start, layer))
            self._arrived[layer] = launcher.run(Lane.SWAP_IN, stage, copy, (*is_free, *self._ready[layer]))


class PrefetchBuffers:
    """Permanent buffers for the new rows of streamed decodes, so that graphs can use them.

    Args:
        rows: Most rows of a sub-batch.
    """

    def __init__(self, pool: StreamedPool, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pool = pool
        self._rows = rows
        self._dtype, self._device = dtype, device
        self._kept = [self._memory(rows) for _ in range(2)]
        self._times = CopyTimes(pool.streamed_layers, device)

    @property
    def on_host(self) -> list[Tensor]:
        """The host tensors that graphs copy from and to."""
        return [*self.pool.homes, *(on_host for _, on_host in self._kept)]

    def stream(self, runs: Sequence[BlockRun], moves: Attender) -> PrefetchStream:
        """Return an iteration's prefetch of these runs of blocks, in every layer."""
        pool, num_blocks = self.pool, sum(run.num_blocks for run in runs)
        bring = partial(pool.bring, runs=runs)
        return PrefetchStream(pool.streamed_layers, moves, bring, num_blocks * pool.block_size, self._times)

    def new_rows(self, index: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return buffers on the device and in host memory for new rows of a sub-batch's decodes.

        Both are [streamed layers, kv_parts, rows, kv_heads, head_dim]; `rows` includes padding.
        """
        kept = self._kept[index] if rows <= self._rows else self._memory(rows)
        shape = self.pool.rows_shape(rows)
        numbers = math.prod(shape)
        on_device, on_host = (torch.unflatten(memory[:, :numbers], 1, shape) for memory in kept)
        return on_device, on_host

    def _memory(self, rows: int) -> tuple[Tensor, Tensor]:
        shape = (len(self.pool.streamed_layers), math.prod(self.pool.rows_shape(rows)))
        on_host = host_empty(shape, self._dtype, self._device)
        return torch.empty(shape, dtype=self._dtype, device=self._device), on_host


@dataclass
class StreamedDecodes(DeviceDecodes):
    """Decodes with streamed KV; their new rows are copied to host memory layer by layer."""

    streamed: StreamedPool  # the same as `pool`
    stream: PrefetchStream
    tier: int  # index of the tier
    new_rows: tuple[Tensor, Tensor]  # see `PrefetchBuffers.new_rows`
    final_slots: Sequence[int] = ()  # of the new rows

    def fill(self, members: BatchMembers) -> None:
        size = self.streamed.block_size
        decodes = [(s.block_table, s.start) for s in members.decodes[self.tier]]
        self.final_slots = [int(blocks[at // size]) * size + at % size for blocks, at in decodes]

    def attend(self, launcher: Launcher, layer: int, linear: Signal) -> Sequence[Signal]:
        self.stream.wait(launcher, layer)
        attended, turn = self._submit(launcher, layer), self.streamed.turn(layer)
        if turn is not None:
            kept, on_host = (rows[turn] for rows in self.new_rows)
            stage = Stage("swap out", layer, self.memory.index, kept.shape[1])
            launcher.run(Lane.SWAP_OUT, stage, partial(on_host.copy_, kept, non_blocking=True), (attended,))
        return ()

    def commit(self) -> None:
        """Store the new rows, because the iteration has succeeded."""
        slots, (_, on_host) = torch.tensor(self.final_slots, dtype=torch.int64), self.new_rows
        self.streamed.store(slots, on_host[:, :, : len(slots)])

    def _compute(self, layer: int) -> None:
        super()._compute(layer)
        turn = self.streamed.turn(layer)
        if turn is not None:  # the next layer overwrites k and v
            self.new_rows[0][turn].copy_(self.stages.keys_values(self.memory.state)[:, self.rows])


class StreamedPrompts(DevicePrompts):
    """Chunks with streamed KV.

    Args:
        slots: Slots of the chunks' own tokens, [tokens] int64 in host memory.
    """

    def __init__(
        self,
        stages: Stages,
        memory: Memory,
        pool: StreamedPool,
        chunks: Sequence[Prefill],
        slots: Tensor,
        stream: PrefetchStream,
    ) -> None:
        super().__init__(stages, memory, pool, chunks)
        self._streamed = pool
        self._stream = stream
        self._home = pool.rows_at(slots)

    def _store(self, launcher: Launcher, layer: int, new: Rows, made: Signal) -> Sequence[Signal]:
        if self._streamed.turn(layer) is not None:
            stage = Stage("swap out", layer, self._memory.index, new.shape[1])
            write = partial(self._home.write, layer, new)
            self._sent = (launcher.run(Lane.SWAP_OUT, stage, write, (made,)),)
        self._stream.wait(launcher, layer)
        return ()
