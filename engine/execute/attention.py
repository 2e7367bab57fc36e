"""Attention over the paged KV cache, computed next to the KV.

One layer's attention of one sub-batch. Rows are the tokens of the sub-batch; those of one place are
adjacent, prompts first:

    place 0                              place 1
    | prompt a | prompt b | decodes .... | prompt c | decodes ......... |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop.engine.batch import ScheduledSequence, SubBatch
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.execute.prefill import Prefill, PrefillGroup, groups_of
from neo_desktop.engine.int_array import IntView
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.placement import Place


@dataclass(frozen=True, slots=True)
class PlaceBatch:
    """The sequences of one sub-batch that live in one place; built once, used by every layer.

    The methods take q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] of the whole sub-batch
    or of the rows they name; `scale` is the factor on q·k, and with a `window` each token sees only the last
    `window` tokens, itself included.
    """

    pool: KVPool
    prefills: tuple[PrefillGroup, ...]
    prefill_rows: slice
    decode_rows: slice
    num_prefill_tokens: int
    slots: Tensor  # [rows] int64: block * block_size + offset, where each row's K and V go
    block_tables: Tensor  # [decodes, max_blocks] int32, padded with 0
    context_lens: Tensor  # [decodes] int32

    @property
    def rows(self) -> slice:
        """All rows: prompts, then decodes."""
        return slice(self.prefill_rows.start, self.decode_rows.stop)

    @property
    def num_decodes(self) -> int:
        """Rows of decodes."""
        return len(self.context_lens)

    def store_prefills(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store K and V of the prompt chunks' rows."""
        self.pool.layer(layer).write(k, v, self.slots[: self.num_prefill_tokens])

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, window: int | None
    ) -> None:
        """Store K and V of all rows, and attend next to the KV; q, k, v and out are the sub-batch's."""
        if self.prefills:
            self.store_prefills(layer, k[self.prefill_rows], v[self.prefill_rows])
        for group in self.prefills:
            keys, values = k[group.rows], v[group.rows]
            if group.has_earlier:
                contexts = k.new_empty(2, len(group.slots), *k.shape[1:])
                self.pool.layer(layer).read(group.slots, contexts)
                keys, values = contexts[0], contexts[1]
            group.attend(q, keys, values, out, scale, window)
        if self.num_decodes:
            rows = self.decode_rows
            self.attend_decodes(layer, q[rows], k[rows], v[rows], out[rows], scale, window)

    def attend_decodes(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, window: int | None
    ) -> None:
        """Store K and V of the decodes, and attend; q, k, v and out are their rows, next to the KV."""
        self.pool.layer(layer).decode(
            q,
            k,
            v,
            self.slots[self.num_prefill_tokens :],
            self.block_tables,
            self.context_lens,
            out,
            scale,
            window,
        )


def place_batches(sub_batch: SubBatch, storage: KVStorage) -> dict[Place, PlaceBatch]:
    """Cut a sub-batch by place.

    Raises:
        ValueError: its order is not the one that plans have.
    """
    batches: dict[Place, PlaceBatch] = {}
    row = 0
    for place, group in groupby(sub_batch.sequences, key=lambda sequence: sequence.place):
        if place in batches:
            raise ValueError("a plan must keep the sequences of a place together")
        batches[place] = _place_batch(tuple(group), storage[place], row)
        row = batches[place].rows.stop
    return batches


def _place_batch(sequences: Sequence[ScheduledSequence], pool: KVPool, first_row: int) -> PlaceBatch:
    block_size, device = pool.block_size, pool.device
    num_prefills = next((i for i, sequence in enumerate(sequences) if sequence.is_decode), len(sequences))
    decodes = sequences[num_prefills:]
    if any(not sequence.is_decode for sequence in decodes):
        raise ValueError("a plan must order the prompts of a place before its decodes")
    row, slots, prefills = first_row, [], []
    for sequence in sequences[:num_prefills]:
        begin, row = row, row + len(sequence.token_ids)
        context_slots = _slots(sequence.block_table, np.arange(sequence.context_len), block_size)
        slots.append(context_slots[sequence.start :])
        prefills.append(
            Prefill(slice(begin, row), sequence.start, upload(context_slots, torch.int64, device))
        )

    # Tables are long where contexts are: each costs one copy of its memory, and nothing per block in Python.
    context_lens = np.fromiter((sequence.context_len for sequence in decodes), np.int32, len(decodes))
    block_tables = padded_block_tables(decodes)
    # The slot of each last token, in the tables as if they were one.
    first_tokens = np.arange(len(decodes)) * block_tables.shape[1] * block_size
    slots.append(_slots(block_tables.reshape(-1), first_tokens + context_lens - 1, block_size))
    return PlaceBatch(
        pool=pool,
        prefills=tuple(groups_of(prefills)),
        prefill_rows=slice(first_row, row),
        decode_rows=slice(row, row + len(decodes)),
        num_prefill_tokens=row - first_row,
        slots=upload(np.concatenate(slots), torch.int64, device),
        block_tables=upload(block_tables, torch.int32, device),
        context_lens=upload(context_lens, torch.int32, device),
    )


def padded_block_tables(sequences: Sequence[ScheduledSequence]) -> NDArray[np.int32]:
    """Return the sequences' block tables as one, [sequences, blocks of the longest]."""
    width = max((len(sequence.block_table) for sequence in sequences), default=0)
    tables = np.zeros((len(sequences), width), np.int32)
    for table, sequence in zip(tables, sequences, strict=True):
        table[: len(sequence.block_table)] = sequence.block_table
    return tables


def _slots(blocks: IntView, positions: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Return where the tokens at some positions of these blocks lie."""
    return blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
