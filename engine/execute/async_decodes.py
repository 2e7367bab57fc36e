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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.batch import MAX_ASYNC_DECODES, IterationPlan
from neo_desktop.engine.cuda.copies import host_empty, host_flags
from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.host import HostAttention, OffloadBuffers
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.layout import BatchMembers
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.workspace import Memory
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.stages import Stages

NO_BLOCKS = IntArray().view()


@dataclass
class AsyncDecodes(Attender):
    """The async decodes of an iteration, as rows of a sub-batch."""

    memory: Memory
    buffers: "AsyncBuffers"
    stages: Stages
    attention: Mapping[KVTier, HostAttention]  # each covers all slots; slots of other tiers have no context
    old: int  # index of the set of buffers to read

    def __post_init__(self) -> None:
        self.key = self.old

    def fill(self, members: BatchMembers) -> None:
        *groups, _ = members.async_decodes
        sequences = [sequence for group in groups for sequence in group]
        tables = [NO_BLOCKS if s is None else s.block_table for s in sequences]
        for tier, attention in self.attention.items():
            lens = [s.context_len if s is not None and s.tier == tier else 0 for s in sequences]
            attention.fill(tables, lens)
        self.tasks = [each.task for each in self.attention.values()]

    @property
    def _count(self) -> int:
        return self.memory.rows.async_decodes

    def attend(self, launcher: Launcher, layer: int, linear: Signal) -> Sequence[Signal]:
        """Save the decodes that passed a stage, and load the decodes of the next stage."""
        stage = Stage("async q, k, v", layer, self.memory.index, self._count)
        sent = launcher.run(Lane.TO_HOST, stage, partial(self._send, layer), (linear,))
        for task in self.tasks:
            launcher.host(task, layer, (sent,))
        stage = Stage("async o", layer, self.memory.index, self._count)
        return sent, launcher.run(Lane.TO_DEVICE, stage, partial(self._exchange, layer), (linear,))

    def commit(self) -> None:
        self.buffers.newest = 1 - self.old

    def _send(self, layer: int) -> None:
        target = self.buffers.qkv[layer, : self._count]
        rows = self.memory.state.qkv[self.memory.rows.async_slice]
        target.copy_(rows.view(target.shape), non_blocking=True)

    def _exchange(self, layer: int) -> None:
        state, rows, count = self.memory.state, self.memory.rows.async_slice, self._count
        buffers, positions = self.buffers, self.memory.inputs.async_positions
        buffers.waiting[1 - self.old, layer, :count].copy_(state.residual[rows])
        state.residual[rows].copy_(buffers.waiting[self.old, layer, :count])
        state.attention[rows].copy_(buffers.out[self.old, layer, :count], non_blocking=True)
        if layer == 0:  # rotations for every layer at once
            tokens = positions.numel()
            self.stages.rotate(positions.flatten(), buffers.cos[:tokens], buffers.sin[:tokens])
        if layer + 1 < len(positions):
            next_one = slice((layer + 1) * count, (layer + 2) * count)
            state.cos[rows].copy_(buffers.cos[next_one])
            state.sin[rows].copy_(buffers.sin[next_one])
        inputs = self.memory.inputs
        if len(inputs.spans):  # recurrent layers of the next stage: the states of its decodes
            inputs.spans[rows].copy_(inputs.async_spans[layer])


class AsyncBuffers:
    """Makes `AsyncDecodes`, and owns their state between async steps and their offload buffers."""

    def __init__(self, stages: Stages, storage: KVStorage) -> None:
        self._stages, self._storage = stages, storage
        self._tiers = [tier for tier in storage.tiers if tier.host_attends]
        config, dtype, device = stages.config, stages.decoder.dtype, stages.decoder.device
        layers, heads, head_dim = config.num_layers, config.num_heads, config.head_dim
        slots = layers, MAX_ASYNC_DECODES if self._tiers else 0
        qkv, out = (*slots, config.qkv_heads, head_dim), (2, *slots, heads, head_dim)
        # [set, layer of the next attention, slot]: the hidden states before that attention.
        self.waiting = torch.zeros(2, *slots, config.carried_width, dtype=dtype, device=device)
        self.qkv = host_empty(qkv, dtype, device).zero_()
        self.out = host_empty(out, dtype, device).zero_()
        self.flags = {tier: host_flags(layers, device) for tier in self._tiers}
        rotations = layers * slots[1], 1, config.rotation_width
        self.cos = torch.zeros(rotations, dtype=torch.float32, device=device)
        self.sin = torch.zeros(rotations, dtype=torch.float32, device=device)
        self.newest = 0  # index of the set that the last successful async step wrote

    @property
    def on_host(self) -> tuple[Tensor, ...]:
        """The host tensors that graphs copy from and to."""
        return (self.qkv, self.out, *self.flags.values()) if self._tiers else ()

    def check(self, plan: IterationPlan) -> None:
        """Raise ValueError if a plan's async decodes are invalid."""
        if not plan.async_decodes:
            return
        num_stages, slots = self._stages.config.num_layers + 1, len(plan.async_decodes[0])
        if len(plan.async_decodes) != num_stages or not 1 <= slots <= MAX_ASYNC_DECODES:
            raise ValueError(
                f"async decodes stand at {len(plan.async_decodes)} stages in {slots} slots; expected "
                f"{num_stages} stages and at most {MAX_ASYNC_DECODES} slots"
            )
        for sequence in plan.async_sequences:
            if not sequence.is_decode or sequence.tier not in self._tiers:
                raise ValueError(
                    f"{sequence.request_id} is in the async decodes, but is no decode with attention on the "
                    "CPU or a worker"
                )

    def attenders(self, memory: Memory) -> Iterator[Attender]:
        """Yield the async decodes of sub-batch 0, if any."""
        count = memory.rows.async_decodes
        if not count:
            return
        attention = {}
        # Every tier gets a batch, since equal graphs raise the same flags. An empty CPU-cache stays empty.
        for tier, flags in self.flags.items():
            pool = self._storage[tier]
            if pool.num_blocks or not tier.cpu_attends:
                buffers = OffloadBuffers(self.qkv[:, :count], self.out[1 - self.newest, :, :count], flags)
                attention[tier] = HostAttention(buffers, pool, memory.index)
        yield AsyncDecodes(memory, self, self._stages, attention, self.newest)
