"""Attention over the paged KV cache, computed next to the KV.

One layer's attention of one sub-batch. Rows are the tokens of the sub-batch; those of one place are
adjacent, prompts first:

    place 0                              place 1
    | prompt a | prompt b | decodes .... | prompt c | decodes ......... |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from neo_desktop.engine.batch import ScheduledSequence, SubBatch
from neo_desktop.engine.execute.prefill import Prefill, PrefillGroup, groups_of
from neo_desktop.engine.kv.layer import slots_of
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
    ends = list(accumulate((len(sequence.token_ids) for sequence in sequences), initial=first_row))
    slots = [
        sequence.block_table[position // block_size] * block_size + position % block_size
        for sequence in sequences
        for position in range(sequence.start, sequence.context_len)
    ]
    prefills = []
    for sequence, begin, end in zip(sequences, ends, ends[1:], strict=False):
        if not sequence.is_decode:
            blocks = torch.tensor(sequence.block_table, dtype=torch.int64, device=device)
            context_slots = slots_of(blocks, block_size)[: sequence.context_len]
            prefills.append(Prefill(slice(begin, end), sequence.start, context_slots))

    decodes = sequences[len(prefills) :]
    if any(not sequence.is_decode for sequence in decodes):
        raise ValueError("a plan must order the prompts of a place before its decodes")
    width = max((len(sequence.block_table) for sequence in decodes), default=0)
    padded = [sequence.block_table + (0,) * (width - len(sequence.block_table)) for sequence in decodes]
    first_decode_row = ends[len(prefills)]
    return PlaceBatch(
        pool=pool,
        prefills=tuple(groups_of(prefills)),
        prefill_rows=slice(first_row, first_decode_row),
        decode_rows=slice(first_decode_row, ends[-1]),
        num_prefill_tokens=first_decode_row - first_row,
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        block_tables=torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(decodes), width),
        context_lens=torch.tensor([s.context_len for s in decodes], dtype=torch.int32, device=device),
    )
