"""Working memory of iterations, allocated once, so that graphs can contain its addresses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop.engine.batch import MAX_ASYNC_DECODES
from neo_desktop.engine.cuda.copies import host_empty, suits_graphs
from neo_desktop.engine.execute.layout import Capacity, GraphKey, Rows
from neo_desktop.engine.kernels.occupancy import num_splits
from neo_desktop.engine.kv.layer import Partials
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import Scratch, State

Ints = TypeVar("Ints", Tensor, NDArray[np.int32])


@dataclass(frozen=True, slots=True)
class InputBuffers(Generic[Ints]):
    """The inputs of a sub-batch, all int32. A device decode is a decode with attention on the device.

    Padding is token 0 at position 0, with slot -1 and a context of 0 tokens.
    """

    token_ids: Ints  # [rows]
    sources: Ints  # [rows]: index of a row's token in `Memory.table`, if a table exists
    positions: Ints  # [rows]
    slots: Ints  # [rows]: slot where the rotation kernel stores KV, or -1
    context_lens: Ints  # [device decodes]
    decode_slots: Ints  # [device decodes]: slot where attention stores KV, or -1
    block_tables: Ints  # [device decodes, max_blocks]
    async_positions: Ints  # [layers, async decodes]: positions at each stage but the last
    # See `recurrent.scan_state`; without rows if the model has no recurrent layers.
    spans: Ints  # [decodes + async decodes, 4]: async decodes at the stage that is computed
    async_spans: Ints  # [layers, async decodes, 4]: async decodes at each stage but the first


@dataclass(frozen=True, slots=True)
class Memory:
    """Working memory of one sub-batch."""

    index: int  # index of the sub-batch
    rows: Rows
    inputs: InputBuffers[Tensor]  # on the device
    staged: InputBuffers[NDArray[np.int32]]  # in host memory, filled in per iteration
    table: Tensor | None  # int32: `Workspace.latest`, then all inputs; None: use `inputs.token_ids`
    first_source: int  # index of this sub-batch's first `token_ids` in the table
    token_ids: Tensor  # [rows] int32, the tokens to embed
    state: State


@dataclass(frozen=True, slots=True, eq=False)
class BatchMemory:
    """Working memory of an iteration's sub-batches."""

    graph_key: GraphKey
    parts: tuple[Memory, ...]
    table: Tensor  # see `Memory`
    inputs: Tensor  # all inputs as one tensor on the device: the end of the table
    staged: Tensor  # in host memory; without a GPU, the same as `inputs`
    is_fixed: bool  # True if later iterations of these sizes get the same memory


class Workspace:
    """Working memory of a model's iterations, which run one after the other.

    On a GPU the next iteration may be prepared while one runs, so there are two sets of input buffers.

    Args:
        num_programs: Number of decode-attention programs that the GPU runs at once.
        has_graphs: True if graphs run, which choose tokens themselves.
        is_staged: True if the device's inputs are copies, so that the next ones can be prepared.
    """

    def __init__(
        self,
        stages: Stages,
        tiers: Sequence[KVTier],
        capacity: Capacity,
        num_programs: int,
        *,
        has_graphs: bool,
        is_staged: bool,
    ) -> None:
        model = stages.decoder
        config, dtype, device = model.config, model.dtype, model.device
        self._config, self._dtype, self._device = config, dtype, device
        self._tiers, self._capacity = tuple(tiers), capacity
        self._num_programs = num_programs
        self._scratch = Scratch.empty(config, capacity.tokens, dtype, device)
        self._states = [
            State.empty(config, rows, dtype, device, self._scratch)
            for rows in (capacity.tokens, capacity.decodes if is_staged and has_graphs else capacity.tokens)
        ]
        decodes, heads, head_dim = capacity.decodes, config.num_heads, config.head_dim
        num_rows = sum(len(state.residual) for state in self._states)
        num_tables = 2 * decodes * sum(not tier.host_attends for tier in tiers)
        num_ints = 4 * num_rows + num_tables * (2 + max(capacity.blocks, 1))
        num_ints += config.num_layers * MAX_ASYNC_DECODES
        self._has_states = bool(config.state_shapes)
        num_spans = 2 * decodes * len(tiers) + (1 + config.num_layers) * MAX_ASYNC_DECODES
        num_ints += 4 * num_spans * self._has_states
        self.is_staged = is_staged
        self._staged = [
            host_empty(num_ints, torch.int32, device).zero_() for _ in range(2 if self.is_staged else 1)
        ]
        self._turn = 0  # index of the next input buffer
        # The last iteration's tokens, for an iteration that starts before they are read; then all inputs.
        self._graph_rows = graph_rows = 2 * decodes + MAX_ASYNC_DECODES if has_graphs else 0
        self._latest_rows = rows = graph_rows if is_staged else 0
        self._table = torch.zeros(rows + num_ints if self.is_staged else 0, dtype=torch.int32, device=device)
        self.latest = self._table[:rows]
        self._token_ids = torch.zeros(num_rows if self.is_staged else 0, dtype=torch.int32, device=device)
        # Split contexts have at most as many splits as keep the GPU busy (see `num_splits`).
        parts = heads * max(num_programs // config.num_kv_heads, 1)
        self._partial_out = torch.empty(parts * head_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(parts, dtype=torch.float32, device=device)
        # All rows of a whole graph, sub-batch 0 first; the hidden states are normalised.
        self.last_hidden = torch.empty(graph_rows, config.hidden_size, dtype=dtype, device=device)
        self.logits = torch.empty(graph_rows, config.vocab_size, dtype=dtype, device=device)
        # Per row, the most probable token or `sampler.NO_TOKEN`.
        self.tokens = torch.zeros(graph_rows, dtype=torch.int64, device=device)
        # True if graphs can use the memory: their host tensors must be pinned.
        self.fits_graphs = suits_graphs(self._staged, device)
        self._known: dict[tuple[GraphKey, int], BatchMemory] = {}

    def memory(self, *graph_keys: GraphKey) -> BatchMemory:
        """Return the working memory of the first of these sizes that fits fixed memory, else of the last.

        All sizes share the same memory. Input buffers alternate: the iteration after the next one reuses
        them.
        """
        self._turn = (self._turn + 1) % len(self._staged)
        for graph_key in graph_keys:
            memory = self._memory(graph_key)
            if memory.is_fixed:
                break
        return memory

    def _memory(self, graph_key: GraphKey) -> BatchMemory:
        known = self._known.get((graph_key, self._turn))
        if known is None:
            known = self._views(graph_key)
            if self._graph_rows and known.is_fixed and graph_key.is_whole:  # only few sizes exist
                self._known[graph_key, self._turn] = known  # creating views is slow
        return known

    def keep_tokens(self, token_ids: Tensor) -> None:
        """Keep tokens, [at most len(latest)] int64, for the next iteration; `NO_TOKEN` becomes token 0."""
        self.latest[: len(token_ids)].copy_(token_ids.clamp(min=0))

    def partials(self, rows: int, max_tokens: int) -> Partials:
        """Return memory for the partial results of `paged_decode`.

        Args:
            max_tokens: Most tokens that a decode attends to.
        """
        config = self._config
        splits = num_splits(rows, config.num_kv_heads, max_tokens, self._num_programs)
        shape = (rows if splits > 1 else 0, config.num_heads, splits)
        parts = math.prod(shape)
        return Partials(
            self._partial_out[: parts * config.head_dim].view(*shape, config.head_dim),
            self._partial_lse[:parts].view(shape),
        )

    def _views(self, graph_key: GraphKey) -> BatchMemory:
        device_decodes = [
            sum(n for n, tier in zip(rows.decodes, self._tiers, strict=True) if not tier.host_attends)
            for rows in graph_key.sub_batches
        ]
        shapes = [
            (
                *((rows.count,),) * 4,
                *((decodes,),) * 2,
                (decodes, graph_key.max_blocks),
                (self._config.num_layers, rows.async_decodes),
                (rows.first_prompt * self._has_states, 4),
                (self._config.num_layers, rows.async_decodes * self._has_states, 4),
            )
            for rows, decodes in zip(graph_key.sub_batches, device_decodes, strict=True)
        ]
        num_ints = sum(math.prod(shape) for each in shapes for shape in each)
        is_fixed = (
            len(graph_key.sub_batches) <= len(self._states)
            and num_ints <= len(self._staged[0])
            and (
                not (self._graph_rows and graph_key.is_whole)
                or sum(rows.count for rows in graph_key.sub_batches) <= self._graph_rows
            )
            and all(
                rows.count <= len(state.residual) and max(rows.decodes) <= self._capacity.decodes
                for rows, state in zip(graph_key.sub_batches, self._states, strict=False)
            )
        )
        staged, table = self._staged[self._turn][:num_ints], self._table[: self._latest_rows + num_ints]
        if not is_fixed:
            staged = torch.zeros(num_ints, dtype=torch.int32)
            table = torch.zeros(self._latest_rows + num_ints, dtype=torch.int32, device=self._device)
        ints = table[self._latest_rows :] if self.is_staged else staged
        begin, first_row, parts = 0, 0, []
        for index, (rows, each) in enumerate(zip(graph_key.sub_batches, shapes, strict=True)):
            parts.append(
                Memory(
                    index=index,
                    rows=rows,
                    inputs=_cut(ints, begin, each),
                    staged=_cut(staged.numpy(), begin, each),
                    table=table if self.is_staged else None,
                    first_source=self._latest_rows + begin,
                    token_ids=self._tokens_of(first_row, rows.count, ints[begin : begin + rows.count]),
                    state=self._state(index, rows.count),
                )
            )
            begin += sum(map(math.prod, each))
            first_row += rows.count
        return BatchMemory(graph_key, tuple(parts), table, ints, staged, is_fixed)

    def _tokens_of(self, first_row: int, rows: int, given: Tensor) -> Tensor:
        """Return the tokens that a sub-batch embeds; without a table, these are `given`."""
        if not self.is_staged:
            return given
        kept = self._token_ids[first_row : first_row + rows]
        return kept if len(kept) == rows else torch.zeros_like(given)

    def _state(self, index: int, rows: int) -> State:
        if rows <= len(self._states[index].residual):
            return self._states[index].first(rows)
        scratch = Scratch.empty(self._config, rows, self._dtype, self._device)
        return State.empty(self._config, rows, self._dtype, self._device, scratch)


def device_bytes(config: ModelConfig, dtype: torch.dtype, capacity: Capacity, num_programs: int) -> int:
    """Estimate the GPU memory of a `Workspace`, graphs included."""
    rows = capacity.tokens + capacity.decodes
    last_rows = 2 * capacity.decodes + MAX_ASYNC_DECODES
    head = last_rows * (config.hidden_size + config.vocab_size) * dtype.itemsize
    parts = max(num_programs // config.num_kv_heads, 1) * config.num_heads * (config.head_dim + 1)
    slots = config.num_layers * MAX_ASYNC_DECODES
    async_decodes = slots * (2 * config.hidden_size * dtype.itemsize + 8 * config.head_dim)
    ints = 5 * rows + 2 * capacity.decodes * (5 + capacity.blocks) + slots
    meta = torch.device("meta")
    scratch = Scratch.empty(config, capacity.tokens, dtype, meta)
    states = [State.empty(config, n, dtype, meta, scratch) for n in (capacity.tokens, capacity.decodes)]
    parts_of: tuple[Scratch | State, ...] = (scratch, *states)
    values = [getattr(part, field.name) for part in parts_of for field in fields(part)]
    values += scratch.experts or ()
    taken = sum(value.nbytes for value in values if isinstance(value, Tensor))
    return taken + head + async_decodes + 4 * (parts + ints)


def _cut(ints: Ints, begin: int, shapes: Sequence[tuple[int, ...]]) -> InputBuffers[Ints]:
    views = []
    for shape in shapes:
        end = begin + math.prod(shape)
        views.append(ints[begin:end].reshape(shape))
        begin = end
    return InputBuffers(*views)
