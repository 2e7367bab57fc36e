"""Attention of decodes: on the device, or on the CPU and workers in parallel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.host import HostBatch
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.workspace import Memory
from neo_desktop.engine.kv.layer import Partials
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.models.stages import Stages


@dataclass
class OffloadedDecodes(Attender):
    """Decodes of a sub-batch with attention on the CPU or a worker."""

    memory: Memory
    rows: slice
    batch: HostBatch
    attended: Signal | None = None  # end of the attention in the current layer

    def __post_init__(self) -> None:
        self.on_host = (self.batch,)

    def attend(self, launcher: Launcher, layer: int, linear: Signal) -> Sequence[Signal]:
        batch, target = self.batch, self.batch.offload_buffers.qkv
        rows = self.memory.state.qkv[self.rows].view(target.shape)
        stage = Stage("q, k, v", layer, self.memory.index, len(target))
        send = partial(target.copy_, rows, non_blocking=True)
        sent = launcher.run(Lane.TO_HOST, stage, send, (linear,))
        self.attended = launcher.host(batch.lane, batch.stage(layer), batch.step(layer), (sent,))
        return ()

    def collect(self, launcher: Launcher, layer: int) -> Sequence[Signal]:
        if self.attended is None:
            return ()
        out, rows = self.batch.offload_buffers.out, self.memory.state.attention[self.rows]
        stage = Stage("o", layer, self.memory.index, len(out))
        bring = partial(rows.copy_, out, non_blocking=True)
        arrived = launcher.run(Lane.TO_DEVICE, stage, bring, (self.attended,))
        self.attended = None
        return (arrived,)


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
        config, state, rows = self.stages.config, self.memory.state, self.rows
        q, k, v = self.stages.heads(state)
        fused_kv_append = self.pool.fused_kv_append
        self.pool.layer(layer).decode(
            q[rows],
            None if fused_kv_append else k[rows],
            None if fused_kv_append else v[rows],
            self.slots,
            self.block_tables,
            self.context_lens,
            state.attention[rows],
            config.attention_scale,
            config.layer_windows[layer],
            self.partials,
        )
