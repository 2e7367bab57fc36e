"""Attention of decodes: on the device, or on the CPU and workers in parallel."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from neo_desktop.engine.cuda.copies import host_empty, host_flags
from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.host import HostAttention, OffloadBuffers
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.layout import BatchMembers
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.workspace import Memory
from neo_desktop.engine.kv.layer import DecodeRows, Partials
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.models.stages import Stages


@dataclass
class OffloadedDecodes(Attender):
    """Decodes of a sub-batch with attention on the CPU or a worker."""

    memory: Memory
    tier: int  # index of the tier
    buffers: OffloadBuffers
    attention: HostAttention
    attended: Sequence[Signal] = ()  # end of the attention in the current layer

    def __post_init__(self) -> None:
        self.rows = self.memory.rows.decodes_of(self.tier)

    def fill(self, members: BatchMembers) -> None:
        decodes = members.decodes[self.tier]
        self.attention.fill([s.block_table for s in decodes], [s.context_len for s in decodes])
        self.tasks = (self.attention.task,)

    def attend(self, launcher: Launcher, layer: int, linear: Signal) -> Sequence[Signal]:
        target = self.buffers.qkv
        rows = self.memory.state.qkv[self.rows].view(target.shape)
        stage = Stage("q, k, v", layer, self.memory.index, len(target))
        send = partial(target.copy_, rows, non_blocking=True)
        sent = launcher.run(Lane.TO_HOST, stage, send, (linear,))
        self.attended = (launcher.host(self.attention.task, layer, (sent,)),)
        return ()

    def collect(self, launcher: Launcher, layer: int) -> Sequence[Signal]:
        if layer < 0:
            return ()
        out, rows = self.buffers.out, self.memory.state.attention[self.rows]
        stage = Stage("o", layer, self.memory.index, len(out))
        bring = partial(rows.copy_, out, non_blocking=True)
        return (launcher.run(Lane.TO_DEVICE, stage, bring, self.attended),)


class DecodeOffload:
    """Makes `OffloadedDecodes`, and owns their permanent buffers.

    Args:
        decodes: Most decodes of a tier in a sub-batch that graphs contain; more get their own buffers.
    """

    def __init__(self, stages: Stages, storage: KVStorage, decodes: int) -> None:
        self._model, self._storage = stages.decoder, storage
        self._kept = {
            tier: [self._buffers(decodes) for _ in range(2)] for tier in storage.tiers if tier.host_attends
        }

    @property
    def on_host(self) -> list[Tensor]:
        """The host tensors that graphs copy from and to."""
        kept = [each for both in self._kept.values() for each in both]
        return [tensor for each in kept for tensor in (each.qkv, each.out, each.flags)]

    def attenders(self, memory: Memory) -> Iterator[Attender]:
        """Yield the decodes of a sub-batch with attention on the CPU or workers, by tier."""
        for index, (tier, count) in enumerate(zip(self._storage.tiers, memory.rows.decodes, strict=True)):
            if not count or not tier.host_attends:
                continue
            kept = self._kept[tier][memory.index]
            buffers = kept if count <= len(kept.qkv) else self._buffers(count)
            buffers = OffloadBuffers(buffers.qkv[:count], buffers.out[:count], buffers.flags)
            attention = HostAttention(buffers, self._storage[tier], memory.index)
            yield OffloadedDecodes(memory, index, buffers, attention)

    def _buffers(self, rows: int) -> OffloadBuffers:
        config, dtype, device = self._model.config, self._model.dtype, self._model.device
        qkv, out = ((rows, heads, config.head_dim) for heads in (config.qkv_heads, config.num_heads))
        return OffloadBuffers(
            host_empty(qkv, dtype, device).zero_(),
            host_empty(out, dtype, device).zero_(),
            host_flags(config.num_layers, device),
        )


@dataclass
class DeviceDecodes(Attender):
    """Decodes of a sub-batch with attention on the device."""

    stages: Stages
    memory: Memory
    rows: slice
    pool: KVPool
    block_tables: Tensor
    context_lens: Tensor
    slots: Tensor  # target of k and v if attention stores them, not the rotation kernel
    partials: Callable[[int], Partials]  # most tokens of a decode → memory of partial results

    def attend(self, launcher: Launcher, layer: int, linear: Signal) -> Sequence[Signal]:
        self._submit(launcher, layer)
        return ()

    def _submit(self, launcher: Launcher, layer: int) -> Signal:
        stage = Stage("attention", layer, self.memory.index, len(self.context_lens))
        return launcher.run(Lane.DEVICE, stage, partial(self._compute, layer))

    def _compute(self, layer: int) -> None:
        state, rows = self.memory.state, self.rows
        q, k, v = self.stages.heads(state)
        fused_kv_append = self.pool.fused_kv_append
        self.pool.layer(layer).decode(
            DecodeRows(
                q[rows],
                self.block_tables,
                self.context_lens,
                state.attention[rows],
                None if fused_kv_append else k[rows],
                None if fused_kv_append else v[rows],
                self.slots,
                self.partials,
            )
        )
