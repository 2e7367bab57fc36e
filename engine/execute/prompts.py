"""The prompt chunks of a sub-batch, tier by tier: the device attends, independent of the tier."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop.engine.batch import ScheduledSequence
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.image_attention import ImageSpans
from neo_desktop.engine.execute.lane import HostTask, Lane, Launcher, Signal
from neo_desktop.engine.execute.prefill import Prefill, groups_of
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.transfers import NUM_BUFFERS, Transfer, TransferMemory
from neo_desktop.engine.execute.workspace import Memory
from neo_desktop.engine.int_array import IntView
from neo_desktop.engine.kv.layer import Rows
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.attention import AttentionSpec
from neo_desktop.models.stages import Stages

STORE, FETCH = "store prompts' KV", "fetch earlier KV"  # names of stages


class Prompts(ABC):
    """Prompt chunks of one tier.

    q [tokens, heads, head_dim], kv [2, tokens, kv_heads, head_dim] and out (as q) are those of the sub-batch.
    """

    fetches = False  # True if earlier KV has to be fetched one layer ahead
    tasks: Sequence[HostTask] = ()  # the CPU's or a worker's transfers

    def fetch(self, launcher: Launcher, layer: int) -> None:  # noqa: B027  the device has earlier KV
        """Start to copy the chunks' earlier KV to the device, if it is elsewhere."""

    def store(self, launcher: Launcher, layer: int, kv: Rows) -> Sequence[Signal]:
        """Start to store K and V in the tier; return the signals that attention has to wait for."""
        return ()

    @abstractmethod
    def attend(self, layer: int, q: Tensor, kv: Rows, out: Tensor, spec: AttentionSpec) -> None:
        """Attend from the chunks to their contexts, as work on the device's lane."""

    def attended(self, launcher: Launcher) -> None:  # noqa: B027  the device has stored the rows
        """Finish a layer after its attention was submitted to the device."""


class DevicePrompts(Prompts):
    """Chunks with KV in the device's memory. `attend` or the rotation kernel stores rows."""

    def __init__(self, pool: KVPool, chunks: Sequence[Prefill]) -> None:
        self._pool = pool
        self._groups = tuple(groups_of(chunks))
        self._rows = slice(chunks[0].rows.start, chunks[-1].rows.stop)
        self._slots = torch.cat([chunk.slots[chunk.start :] for chunk in chunks])

    def attend(self, layer: int, q: Tensor, kv: Rows, out: Tensor, spec: AttentionSpec) -> None:
        cache = self._pool.layer(layer)
        if not self._pool.fused_kv_append:
            cache.write(kv[0, self._rows], kv[1, self._rows], self._slots)
        for group in self._groups:
            contexts = kv[:, group.rows]
            if group.has_earlier:
                contexts = kv.new_empty(2, len(group.slots), *kv.shape[2:])
                cache.read(group.slots, contexts)
            group.attend(q, contexts, out, spec)


class HostPrompts(Prompts):
    """Chunks with KV in host memory.

    Args:
        make: Makes transfers.
        device: The model's device.
        row_shape: (kv_heads, head_dim)
        dtype: Type of k and v.
    """

    def __init__(
        self,
        make: TransferMemory,
        pool: KVPool,
        index: int,
        chunks: Sequence[Prefill],
        device: torch.device,
        row_shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        self._groups = [group.attending_on(device) for group in groups_of(chunks)]
        self._rows = slice(chunks[0].rows.start, chunks[-1].rows.stop)
        new = torch.cat([chunk.slots[chunk.start :] for chunk in chunks])
        self._there = make.transfer(STORE, pool, new, to_host=True, is_behind=True, index=index)
        earlier = [chunk.earlier_slots for group in self._groups for chunk in group.chunks]
        num_earlier = sum(map(len, earlier))
        self._back: Transfer | None = None
        self._fetched: list[Signal | None] = [None] * NUM_BUFFERS
        self._read: tuple[Signal, ...] = ()  # end of the last read of the buffers
        self._sent: Signal | None = None  # end of the copy of the layer's k and v
        self._earlier: list[Tensor] = []
        if num_earlier:
            slots = torch.cat(earlier)
            self._back = make.transfer(FETCH, pool, slots, to_host=False, index=index)
            # A layer's attention reads one buffer while the other is filled for the next layer.
            shape = (2, num_earlier, *row_shape)
            self._earlier = [torch.empty(shape, dtype=dtype, device=device) for _ in range(NUM_BUFFERS)]
        self._ends = list(accumulate(map(len, earlier), initial=0))
        self.fetches = self._back is not None
        self.tasks = [each.task for each in (self._back, self._there) if each is not None]

    def fetch(self, launcher: Launcher, layer: int) -> None:
        if self._back is None:
            return
        self._read = self._read or (launcher.mark(),)  # earlier device work may use the buffers' memory
        bring = partial(self._earlier[layer % NUM_BUFFERS].copy_, non_blocking=True)
        self._fetched[layer % NUM_BUFFERS] = self._back.from_pages(launcher, layer, bring, self._read)

    def store(self, launcher: Launcher, layer: int, kv: Rows) -> Sequence[Signal]:
        # One copy for K and V: a GPU gathers them first.
        read = partial(_copy, kv[:, self._rows])
        self._sent, _ = self._there.to_pages(launcher, layer, read, (launcher.mark(),))
        fetched = self._fetched[layer % NUM_BUFFERS]
        return () if fetched is None else (fetched,)

    def attend(self, layer: int, q: Tensor, kv: Rows, out: Tensor, spec: AttentionSpec) -> None:
        ends = pairwise(self._ends)
        for group in self._groups:
            earlier: list[Rows | None] = []
            for _, (begin, end) in zip(group.chunks, ends, strict=False):
                earlier.append(self._earlier[layer % NUM_BUFFERS][:, begin:end] if end > begin else None)
            group.attend(q, group.pack(kv, earlier), out, spec)

    def attended(self, launcher: Launcher) -> None:
        assert self._sent is not None
        launcher.wait((self._sent,))  # the next layer overwrites k and v
        if self._back is not None:
            self._read = (launcher.mark(),)


def _copy(rows: Rows, buffer: Rows) -> None:
    buffer.copy_(rows, non_blocking=True)


@dataclass
class PromptAttention(Attender):
    """Attention of a sub-batch's prompt chunks, all tiers in one stage."""

    is_capturable = False
    stages: Stages
    memory: Memory
    prompts: Sequence[Prompts]  # by tier

    def __post_init__(self) -> None:
        self.fetches = any(each.fetches for each in self.prompts)
        self.tasks = [task for each in self.prompts for task in each.tasks]

    def fetch(self, launcher: Launcher, layer: int) -> None:
        for each in self.prompts:
            each.fetch(launcher, layer)

    def attend(self, launcher: Launcher, layer: int, linear: Signal) -> Sequence[Signal]:
        kv = self.stages.keys_values(self.memory.state)
        for each in self.prompts:
            launcher.wait(each.store(launcher, layer, kv))
        stage = Stage("attention", layer, self.memory.index, self.memory.rows.prompts)
        launcher.run(Lane.DEVICE, stage, partial(self._compute, layer, kv))
        for each in self.prompts:
            each.attended(launcher)
        return ()

    def _compute(self, layer: int, kv: Rows) -> None:
        state, spec = self.memory.state, self.stages.attention[layer]
        q, _, _ = self.stages.heads(state)
        for each in self.prompts:
            each.attend(layer, q, kv, state.attention, spec)


def prompts_of(
    sequences: Sequence[ScheduledSequence],
    first_row: int,
    storage: KVStorage,
    make: Callable[[KVTier, KVPool, Sequence[Prefill], Tensor], Prompts],
) -> list[Prompts]:
    """Return the prompts of a sub-batch by tier.

    Args:
        sequences: The chunks; chunks of a tier are adjacent.
        first_row: Their first row in the sub-batch.
        storage: The KV pools.
        make: Makes the prompts of a tier from the tier, its pool, its chunks, and the slots of their own
            tokens, [tokens] int64 in host memory.
    """
    prompts: list[Prompts] = []
    row = first_row
    for tier, group in groupby(sequences, key=lambda sequence: sequence.tier):
        pool, chunks, new = storage[tier], [], []
        for sequence in group:
            begin, row = row, row + len(sequence.token_ids)
            slots = slots_of(sequence.block_table, np.arange(sequence.context_len), pool.block_size)
            new.append(slots[sequence.start :])
            on_device = upload(slots, torch.int64, pool.device)
            images = ImageSpans.of(sequence)
            chunks.append(Prefill(slice(begin, row), sequence.start, on_device, images))
        prompts.append(make(tier, pool, chunks, torch.from_numpy(np.concatenate(new))))
    return prompts


def slots_of(blocks: IntView, positions: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Return the slots of the tokens at `positions` in these blocks."""
    return blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
