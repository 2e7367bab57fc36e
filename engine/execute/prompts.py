"""The prompt chunks of a sub-batch, an attender per tier: the device attends, independent of the tier."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop.engine.batch import ScheduledSequence
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.image_attention import ImageSpans
from neo_desktop.engine.execute.lane import Lane, Launcher, Signal
from neo_desktop.engine.execute.prefill import Prefill, groups_of
from neo_desktop.engine.execute.timeline import Stage
from neo_desktop.engine.execute.transfers import NUM_BUFFERS, Transfer, TransferMemory
from neo_desktop.engine.execute.workspace import Memory
from neo_desktop.engine.int_array import IntView
from neo_desktop.engine.kv.layer import Rows
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.models.stages import Stages

STORE, FETCH = "store prompts' KV", "fetch earlier KV"  # names of stages


class Prompts(Attender):
    """Prompt chunks of one tier.

    Args:
        chunks: Adjacent in the sub-batch.
    """

    is_capturable = False

    def __init__(self, stages: Stages, memory: Memory, pool: KVPool, chunks: Sequence[Prefill]) -> None:
        self._stages, self._memory, self._pool = stages, memory, pool
        self._groups = tuple(groups_of(chunks))
        self._rows = slice(chunks[0].rows.start, chunks[-1].rows.stop)
        self._slots = torch.cat([chunk.slots[chunk.start :] for chunk in chunks])  # of the chunks' own tokens
        self._sent: Sequence[Signal] = ()  # end of the copy of the layer's k and v, if they leave the device

    def attend(self, launcher: Launcher, layer: int, linear: Signal) -> Sequence[Signal]:
        kv = self._stages.keys_values(self._memory.state)
        new = kv[:, self._rows]
        self._sent = ()
        launcher.wait(self._store(launcher, layer, new, linear))
        stage = Stage("attention", layer, self._memory.index, new.shape[1])
        launcher.run(Lane.DEVICE, stage, partial(self._compute, layer, kv))
        return self._sent  # the next layer overwrites k and v

    def _store(self, launcher: Launcher, layer: int, new: Rows, made: Signal) -> Sequence[Signal]:
        """Start to store the chunks' K and V in the tier; return the signals that attention waits for.

        Args:
            new: [kv_parts, tokens, kv_heads, head_dim] of the chunks, complete after the signal `made`.
        """
        return ()

    def _compute(self, layer: int, kv: Rows) -> None:
        state, spec = self._memory.state, self._stages.attention[layer]
        q, _, _ = self._stages.heads(state)
        for group, contexts in zip(self._groups, self._contexts(layer, kv), strict=True):
            group.attend(q, contexts, state.attention, spec)

    @abstractmethod
    def _contexts(self, layer: int, kv: Rows) -> Iterator[Rows]:
        """Yield K and V of the contexts, group by group.

        Args:
            kv: [kv_parts, tokens, kv_heads, head_dim] of the sub-batch.
        """


class DevicePrompts(Prompts):
    """Chunks with KV in the device's memory. Attention or the rotation kernel stores rows."""

    def _compute(self, layer: int, kv: Rows) -> None:
        if not self._pool.fused_kv_append:
            self._pool.layer(layer).write(kv[0, self._rows], kv[-1, self._rows], self._slots)
        super()._compute(layer, kv)

    def _contexts(self, layer: int, kv: Rows) -> Iterator[Rows]:
        for group in self._groups:
            contexts = kv[:, group.rows]
            if group.has_earlier:
                contexts = kv.new_empty(self._pool.rows_shape(len(group.slots)))
                self._pool.layer(layer).read(group.slots, contexts)
            yield contexts


class HostPrompts(Prompts):
    """Chunks with KV in host memory."""

    def __init__(
        self, stages: Stages, memory: Memory, pool: KVPool, chunks: Sequence[Prefill], make: TransferMemory
    ) -> None:
        super().__init__(stages, memory, pool, chunks)
        index, device = memory.index, stages.decoder.device
        self._groups = tuple(group.attending_on(device) for group in self._groups)
        self._there = make.transfer(STORE, pool, self._slots, to_host=True, is_behind=True, index=index)
        earlier = [chunk.earlier_slots for chunk in chunks]
        self._ends = list(accumulate(map(len, earlier), initial=0))
        self._back: Transfer | None = None
        self._fetched: list[Signal | None] = [None] * NUM_BUFFERS
        self._read: tuple[Signal, ...] = ()  # end of the last read of the buffers
        self._earlier: list[Tensor] = []
        if self._ends[-1]:
            self._back = make.transfer(FETCH, pool, torch.cat(earlier), to_host=False, index=index)
            # A layer's attention reads one buffer while the other is filled for the next layer.
            shape, of_k = pool.rows_shape(self._ends[-1]), memory.state.qkv
            self._earlier = [of_k.new_empty(shape) for _ in range(NUM_BUFFERS)]
        self.fetches = self._back is not None
        self.tasks = [each.task for each in (self._back, self._there) if each is not None]

    def fetch(self, launcher: Launcher, layer: int) -> None:
        if self._back is None:
            return
        self._read = self._read or (launcher.mark(),)  # earlier device work may use the buffers' memory
        bring = partial(self._earlier[layer % NUM_BUFFERS].copy_, non_blocking=True)
        self._fetched[layer % NUM_BUFFERS] = self._back.from_pages(launcher, layer, bring, self._read)

    def attend(self, launcher: Launcher, layer: int, linear: Signal) -> Sequence[Signal]:
        sent = super().attend(launcher, layer, linear)
        if self._back is not None:
            self._read = (launcher.mark(),)
        return sent

    def _store(self, launcher: Launcher, layer: int, new: Rows, made: Signal) -> Sequence[Signal]:
        # One copy for K and V: a GPU gathers them first.
        sent, _ = self._there.to_pages(launcher, layer, partial(_copy, new), (made,))
        self._sent = (sent,)
        fetched = self._fetched[layer % NUM_BUFFERS]
        return () if fetched is None else (fetched,)

    def _contexts(self, layer: int, kv: Rows) -> Iterator[Rows]:
        ends = pairwise(self._ends)
        for group in self._groups:
            earlier: list[Rows | None] = []
            for _, (begin, end) in zip(group.chunks, ends, strict=False):
                earlier.append(self._earlier[layer % NUM_BUFFERS][:, begin:end] if end > begin else None)
            yield group.pack(kv, earlier)


def _copy(rows: Rows, buffer: Rows) -> None:
    buffer.copy_(rows, non_blocking=True)


def chunks_of(
    sequences: Iterable[ScheduledSequence], first_row: int, pool: KVPool
) -> tuple[list[Prefill], Tensor]:
    """Return adjacent chunks of a tier, and the slots of their own tokens, [tokens] int64 in host memory."""
    chunks, new = [], []
    for sequence in sequences:
        rows = slice(first_row, first_row + len(sequence.token_ids))
        slots = slots_of(sequence.block_table, np.arange(sequence.context_len), pool.block_size)
        new.append(slots[sequence.start :])
        on_device = upload(slots, torch.int64, pool.device)
        chunks.append(Prefill(rows, sequence.start, on_device, ImageSpans.of(sequence)))
        first_row = rows.stop
    return chunks, torch.from_numpy(np.concatenate(new))


def slots_of(blocks: IntView, positions: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Return the slots of the tokens at `positions` in these blocks."""
    return blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
