"""The CPU's part in an iteration: attention over KV in host memory, matmuls with weights in host memory, and
copies of KV rows to and from pages.

With a GPU, relays do this work: native threads that wait for flags, so that neither Python nor the launching
thread stands between the GPU and the CPU. Flags also start a worker's part, through the thread that talks to
the worker (`worker_relay`).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.execute.host_work import HostWork
from neo_desktop.engine.execute.lane import HostStep, Lane
from neo_desktop.engine.execute.timeline import Stage, Timeline
from neo_desktop.engine.execute.transfers import HostTransfer
from neo_desktop.engine.execute.worker_relay import WorkerRelay
from neo_desktop.engine.int_array import IntView
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.remote.pool import RemoteLayer
from neo_desktop.engine.watchdog import Watchdog
from neo_desktop.models.config import ModelConfig
from neo_desktop.native.relay import Relay, RelayBatch, RelayItem, RelayStalledError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OffloadBuffers:
    """Host buffers between a sub-batch and the CPU for a layer's q, k, v and attention output.

    The buffers of async decodes have a leading dimension of layers.
    """

    qkv: Tensor  # [decodes, heads + 2 * kv_heads, head_dim]
    out: Tensor  # [decodes, heads, head_dim]
    flags: Tensor  # see `native.relay.empty_flags`


@dataclass
class HostBatch(HostWork):
    """Decodes of one tier in one sub-batch with attention on the CPU or a worker.

    Async decodes are at different layers, so all their tensors but the flags have a leading dimension of
    layers. A context length of 0 marks a slot that is empty or belongs to another tier.
    """

    tier: KVTier
    pool: KVPool
    config: ModelConfig
    index: int  # index of the sub-batch
    offload_buffers: OffloadBuffers  # padding included
    block_tables: Tensor  # [decodes, max_blocks] int32
    context_lens: Tensor  # [decodes] int32
    busy_ns: int = 0  # CPU attention time, summed over layers

    @property
    def arguments(self) -> RelayBatch:
        """Description of the work for relays."""
        config, count = self.config, self.context_lens.shape[-1]
        first_k, first_v = config.num_heads, config.num_heads + config.num_kv_heads
        qkv = self.offload_buffers.qkv[..., :count, :, :]
        return RelayBatch(
            q=qkv[..., :first_k, :],
            k=qkv[..., first_k:first_v, :],
            v=qkv[..., first_v:, :],
            out=self.offload_buffers.out[..., :count, :, :],
            block_tables=self.block_tables,
            context_lens=self.context_lens,
            flags=self.offload_buffers.flags,
            index=self.index,
        )

    @property
    def is_async(self) -> bool:
        """True if the decodes are async decodes."""
        return self.context_lens.dim() > 1

    @property
    def is_waited_for(self) -> bool:
        """True if waiting for this batch counts as attention time; async decodes of workers do not."""
        return self.pool.worker is None or not self.is_async

    @property
    def flags(self) -> Tensor:
        return self.offload_buffers.flags

    @property
    def lane(self) -> str:
        """The CPU's lane, or the worker's own lane."""
        return self.pool.worker or Lane.CPU

    def stage(self, layer: int) -> Stage:
        name = "async CPU attention" if self.is_async else "CPU attention"
        if self.pool.worker is not None:
            name = "async worker's attention" if self.is_async else "worker's attention"
        return Stage(name, layer, self.index, self.context_lens.shape[-1])

    def step(self, layer: int) -> HostStep:
        """Return the step of a layer; a worker's step sends the request first and takes the answer later."""
        step, there = super().step(layer), self.pool.layer(layer)
        if not isinstance(there, RemoteLayer):
            return step
        if self.is_async:
            return replace(step, ask=partial(self._ask_async, there, layer))
        batch = self.arguments
        tensors = batch.q, batch.k, batch.v, batch.block_tables, batch.context_lens
        return replace(step, ask=partial(there.ask, *tensors))

    def carry_out(self, layer: int) -> None:
        """Attend, or receive a worker's answer."""
        batch, there = self.arguments, self.pool.layer(layer)
        if isinstance(there, RemoteLayer):
            if self.is_async:
                self._take_async(there, layer)
            else:
                there.answer(batch.out)
            return
        tensors = (batch.q, batch.k, batch.v, batch.block_tables, batch.context_lens, batch.out)
        q, k, v, block_tables, context_lens, out = (
            (tensor[layer] for tensor in tensors) if self.is_async else tensors
        )
        there.decode(q, k, v, None, block_tables, context_lens, out)

    def _slots(self, layer: int) -> Tensor:
        """Return the slots of async decodes at a layer."""
        return self.context_lens[layer].nonzero().flatten()

    def _ask_async(self, there: RemoteLayer, layer: int) -> None:
        """Send a worker the rows of its own decodes, if any."""
        slots = self._slots(layer)
        if len(slots):
            batch = self.arguments
            tensors = batch.q, batch.k, batch.v, batch.block_tables, batch.context_lens
            there.ask(*(tensor[layer].index_select(0, slots) for tensor in tensors))

    def _take_async(self, there: RemoteLayer, layer: int) -> None:
        slots, out = self._slots(layer), self.arguments.out[layer]
        if len(slots):
            answer = torch.empty(len(slots), *out.shape[1:], dtype=out.dtype)
            there.answer(answer)
            out.index_copy_(0, slots, answer)


class Relays:
    """Threads for the part of the CPU and of workers in iterations: native relays, and a thread per worker.

    Args:
        storage: The KV pools.
    """

    def __init__(self, config: ModelConfig, storage: KVStorage) -> None:
        self._transfers: dict[KVPool, Relay] = {}
        self._workers: dict[str, WorkerRelay] = {}
        computing: Relay | None = None  # relay for attention and matmuls
        for tier in storage.tiers:
            pool = storage[tier]
            if pool.worker is not None:
                self._workers[pool.worker] = WorkerRelay(pool.worker)
            if not tier.cpu_attends:
                continue
            layers = []
            for index in range(config.num_layers):
                layer = pool.layer(index)
                assert isinstance(layer, HostLayer)
                layers.append(layer.for_relay())
            make = partial(
                Relay,
                layers,
                block_size=pool.block_size,
                scale=config.attention_scale,
                softcap=config.attention_softcap or 0.0,
            )
            self._transfers[pool], computing = make(), make()
        self._computing = computing or Relay((), num_layers=config.num_layers)
        self._copying: Relay | None = None  # copies weights to pinned memory, created on first use
        self._under_way: list[_UnderWay] = []

    def start(
        self,
        computed: Sequence[HostWork],
        transfers: Sequence[HostTransfer],
        watch: Watchdog,
    ) -> None:
        """Begin an iteration, before the device begins.

        Args:
            computed: Attention of the CPU and workers, and the CPU's matmuls and weight copies, in the
                device's order within a turn.
            transfers: Transfers in the device's order within a layer.
            watch: Watchdog that follows the flags.
        """
        self._under_way = []
        works_by_lane: dict[str, list[HostWork]] = {}
        for each in computed:
            works_by_lane.setdefault(each.lane, []).append(each)
        for lane, works in works_by_lane.items():
            if lane in self._workers:
                self._workers[lane].start(works, watch)
                self._under_way.append(_UnderWay(self._workers[lane], lane, works))
                continue
            relay = self._computing if lane == Lane.CPU else self._copying_relay(works)
            self._begin(_UnderWay(relay, lane, works), relay, [x.arguments for x in works], watch)
        for pool, swap in self._transfers.items():
            pool_transfers = [each for each in transfers if each.pool is pool]
            if pool_transfers:
                begun = _UnderWay(swap, Lane.HOST_SWAP, pool_transfers)
                self._begin(begun, swap, [x.transfer for x in pool_transfers], watch)
        flags = [each.flags for each in computed]
        flags += [each.transfer.flags for each in transfers]
        if flags:
            watch.follow(partial(_num_raised, flags))

    def _copying_relay(self, works: Sequence[HostWork]) -> Relay:
        if self._copying is None:
            self._copying = Relay((), num_layers=works[0].flags.shape[1], num_threads=1)
        return self._copying

    def _begin(self, begun: "_UnderWay", relay: Relay, items: Sequence[RelayItem], watch: Watchdog) -> None:
        relay.start(items, watch.timeout_s)
        self._under_way.append(begun)

    def finish(self, timeline: Timeline | None) -> None:
        """Wait for all work of the iteration, and add its times to `busy_ns` and the timeline.

        Raises:
            RelayStalledError: A relay timed out.
            WorkerLostError: A worker does not answer.
            RuntimeError: A relay was cancelled, or a step failed.
        """
        launcher = timeline if timeline is not None and timeline.is_recording else None
        for relay, lane, works in self._under_way:
            for step in relay.finish():
                each = works[step.item]
                if isinstance(each, HostWork) and isinstance(relay, Relay):  # workers count their own
                    each.busy_ns += step.end_ns - step.start_ns
                if launcher is not None:
                    launcher.add(lane, each.stage(step.layer), step.start_ns, step.end_ns)
        self._under_way = []

    def break_off(self) -> RelayStalledError | None:
        """Abort an iteration; return the error if a stalled step may still run and store KV."""
        stalled: RelayStalledError | None = None
        self.cancel()  # relays may wait for flags that nothing raises any more, and the device for relays
        for begun in self._under_way:
            try:
                begun.relay.finish()
            except RelayStalledError as error:
                stalled = stalled or error
            except Exception:
                logger.debug("a relay's step failed as well", exc_info=True)
        self._under_way = []
        return stalled

    @property
    def _all(self) -> list[Relay | WorkerRelay]:
        copying = [] if self._copying is None else [self._copying]
        return [self._computing, *copying, *self._transfers.values(), *self._workers.values()]

    def cancel(self) -> None:
        """Cancel all waits for the CPU and workers."""
        for relay in self._all:
            relay.cancel()

    def close(self) -> bool:
        """End the threads; return True if all have ended."""
        has_ended = [relay.close() for relay in self._all]
        return all(has_ended)


class _UnderWay(NamedTuple):
    """A relay's work in an iteration."""

    relay: Relay | WorkerRelay
    lane: str
    works: Sequence[HostWork | HostTransfer]


def _num_raised(flags: Sequence[Tensor]) -> int:
    """Return the number of flags raised by the GPU and the CPU."""
    return sum(int(each.sum()) for each in flags)


def padded_block_tables(tables: Sequence[IntView]) -> Tensor:
    """Combine block tables into one, [sequences, blocks of the longest] int32."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return torch.from_numpy(padded)
