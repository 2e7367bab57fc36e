"""The memory that iterations work in: taken once, so that graphs can refer to it by its address."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from neo_desktop.engine.batch import MAX_ASYNC_DECODES
from neo_desktop.engine.cuda.copies import host_memory, suits_graphs
from neo_desktop.engine.execute.async_buffers import AsyncBuffers
from neo_desktop.engine.execute.layout import Capacity, GraphKey, Rows
from neo_desktop.engine.execute.offloaded_matmuls import OffloadedMatmuls
from neo_desktop.engine.kernels.splits import num_splits
from neo_desktop.engine.kv.layer import Partials
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.stages import Scratch, Stages, State
from neo_desktop.native.relay import empty_flags


@dataclass(frozen=True, slots=True)
class InputBuffers:
    """What an iteration is told of a sub-batch, all int32.

    Padding is token 0 at position 0, stored nowhere, with a context of 0 tokens.
    """

    token_ids: Tensor  # [rows]
    sources: Tensor  # [rows]; where in `Memory.table` a row's token is; not used without a table
    positions: Tensor  # [rows]
    slots: Tensor  # [rows], where the rotation stores KV; -1: it does not
    context_lens: Tensor  # [decodes that the device attends for]
    decode_slots: Tensor  # [decodes that the device attends for]: where that stores KV; -1: it does not
    block_tables: Tensor  # [decodes that the device attends for, max_blocks]
    async_positions: Tensor  # [layers, async decodes], of those that stand at each stage but the last


@dataclass(frozen=True, slots=True)
class OffloadBuffers:
    """Host memory through which a sub-batch and the CPU give each other a layer's q, k, v and output.

    Of async decodes it has a dimension of layers before the others.
    """

    qkv: Tensor  # [decodes, heads + 2 * kv_heads, head_dim]
    out: Tensor  # [decodes, heads, head_dim]
    flags: Tensor  # see `native.relay.empty_flags`


@dataclass(frozen=True, slots=True)
class Memory:
    """What one sub-batch works in."""

    index: int  # of the sub-batch
    rows: Rows
    inputs: InputBuffers  # on the device
    staged: InputBuffers  # in host memory, to be filled in; without a GPU the same
    table: Tensor | None  # int32: `Workspace.latest`, and behind it all inputs; None: tokens are `inputs`'
    first_source: int  # where in the table this sub-batch's `token_ids` begin
    token_ids: Tensor  # [rows] int32, what is embedded
    state: State
    offload_buffers: tuple[OffloadBuffers | None, ...]  # of each tier; None: a GPU attends


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """What the sub-batches of an iteration work in."""

    graph_key: GraphKey
    parts: tuple[Memory, ...]
    table: Tensor  # see `Memory`
    inputs: Tensor  # all inputs in one piece, on the device: the end of the table
    staged: Tensor
    is_fixed: bool  # whether it is the same for the next iteration of these sizes


class Workspace:
    """The memory of all iterations of a model, which run one after the other.

    One more may be filled in while one runs: so there are two sets of what is filled in.

    Args:
        stages: of the model.
        tiers: whose KV decodes attend to.
        capacity: the largest iteration's sizes.
        num_programs: of decode attention, that the GPU runs at once.
        has_graphs: whether there are graphs, which choose tokens themselves.
    """

    def __init__(
        self,
        stages: Stages,
        tiers: Sequence[KVTier],
        capacity: Capacity,
        num_programs: int,
        *,
        has_graphs: bool,
    ) -> None:
        model = stages.decoder
        config, dtype, device = model.config, model.dtype, model.device
        self._config, self._dtype, self._device = config, dtype, device
        self._places, self._capacity = tuple(tiers), capacity
        self._num_programs = num_programs
        self._scratch = Scratch.empty(config, capacity.tokens, dtype, device)
        self._states = [
            State.empty(config, rows, dtype, device, self._scratch)
            for rows in (capacity.tokens, capacity.decodes if has_graphs else capacity.tokens)
        ]
        decodes, heads, head_dim = capacity.decodes, config.num_heads, config.head_dim
        num_rows = sum(len(state.residual) for state in self._states)
        num_tables = 2 * decodes * sum(not tier.host_attends for tier in tiers)
        num_ints = 4 * num_rows + num_tables * (2 + max(capacity.blocks, 1))
        num_ints += config.num_layers * MAX_ASYNC_DECODES
        self._is_staged = device.type != "cpu" or has_graphs
        self._staged = [
            host_memory(lambda pin: torch.zeros(num_ints, dtype=torch.int32, pin_memory=pin), device)
            for _ in range(2 if self._is_staged else 1)
        ]
        self._turn = 0  # which of them is next
        # The tokens that the last iteration chose, for one that starts before they are read; then all inputs.
        self._graph_rows = rows = 2 * decodes + MAX_ASYNC_DECODES if has_graphs else 0
        self._table = torch.zeros(rows + num_ints if self._is_staged else 0, dtype=torch.int32, device=device)
        self.latest = self._table[:rows]
        self._token_ids = torch.zeros(num_rows if self._is_staged else 0, dtype=torch.int32, device=device)
        self._offload_buffers = [
            [self._new_offload_buffers(decodes) if tier.host_attends else None for tier in tiers]
            for _ in range(2)
        ]
        # What async decodes have; None: neither the CPU nor a worker attends to any tier.
        self.async_decodes: AsyncBuffers | None = None
        if at_host := [tier for tier in tiers if tier.host_attends]:
            self.async_decodes = AsyncBuffers(config, dtype, device, at_host)
        # What products with offloaded matrices have; None: there are none.
        self.split: OffloadedMatmuls | None = None
        if model.has_splits:
            self.split = OffloadedMatmuls(stages, (decodes + MAX_ASYNC_DECODES, decodes))
        # Where contexts are cut at all, parts are at most as many as keep the GPU busy (see `num_splits`).
        parts = heads * max(num_programs // config.num_kv_heads, 1)
        self._partial_out = torch.empty(parts * head_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(parts, dtype=torch.float32, device=device)
        # Of all rows of a whole graph, those of sub-batch 0 first.
        self.last_hidden = torch.empty(rows, config.hidden_size, dtype=dtype, device=device)  # normalised
        self.logits = torch.empty(rows, config.vocab_size, dtype=dtype, device=device)
        # The most probable token of each row, or `sampler.NO_TOKEN`.
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        # Whether graphs can use it: what they copy from and to in host memory must be pinned.
        handed_over = [each for both in self._offload_buffers for each in both if each is not None]
        on_host = [tensor for each in handed_over for tensor in (each.qkv, each.out, each.flags)]
        on_host += self._staged
        on_host += () if self.async_decodes is None else self.async_decodes.on_host
        on_host += () if self.split is None else self.split.on_host
        self.fits_graphs = suits_graphs(on_host, device)
        self._known: dict[tuple[GraphKey, int], BatchMemory] = {}

    def memory(self, graph_key: GraphKey) -> BatchMemory:
        """Return what an iteration of these sizes works in; that of all of them overlaps.

        What is filled in is not used again by the next iteration, but by the one after that.
        """
        self._turn = (self._turn + 1) % len(self._staged)
        known = self._known.get((graph_key, self._turn))
        if known is None:
            known = self._views(graph_key)
            if self._graph_rows and known.is_fixed and graph_key.is_whole:  # there are few such sizes
                self._known[graph_key, self._turn] = known  # making views takes a while
        return known

    def keep_tokens(self, token_ids: Tensor) -> None:
        """Keep tokens, [at most len(latest)] int64, for the next iteration; what is none becomes token 0."""
        self.latest[: len(token_ids)].copy_(token_ids.clamp(min=0))

    def partials(self, rows: int, max_tokens: int) -> Partials:
        """Return what `paged_decode` works in.

        Args:
            rows: decodes of a sub-batch.
            max_tokens: that one of them may attend to.
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
            sum(n for n, tier in zip(rows.decodes, self._places, strict=True) if not tier.host_attends)
            for rows in graph_key.sub_batches
        ]
        shapes = [
            (
                *((rows.count,),) * 4,
                *((decodes,),) * 2,
                (decodes, graph_key.max_blocks),
                (self._config.num_layers, rows.async_decodes),
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
        staged, table = self._staged[self._turn][:num_ints], self._table[: self._graph_rows + num_ints]
        if not is_fixed:
            staged = torch.zeros(num_ints, dtype=torch.int32)
            table = torch.zeros(self._graph_rows + num_ints, dtype=torch.int32, device=self._device)
        ints = table[self._graph_rows :] if self._is_staged else staged
        begin, first_row, parts = 0, 0, []
        for index, (rows, each) in enumerate(zip(graph_key.sub_batches, shapes, strict=True)):
            parts.append(
                Memory(
                    index=index,
                    rows=rows,
                    inputs=_cut(ints, begin, each),
                    staged=_cut(staged, begin, each),
                    table=table if self._is_staged else None,
                    first_source=self._graph_rows + begin,
                    token_ids=self._tokens_of(first_row, rows.count, ints[begin : begin + rows.count]),
                    state=self._state(index, rows.count),
                    offload_buffers=self._offload_views(index, rows),
                )
            )
            begin += sum(map(math.prod, each))
            first_row += rows.count
        return BatchMemory(graph_key, tuple(parts), table, ints, staged, is_fixed)

    def _tokens_of(self, first_row: int, rows: int, given: Tensor) -> Tensor:
        """Return what a sub-batch embeds: without a table, the tokens that it is given."""
        if not self._is_staged:
            return given
        kept = self._token_ids[first_row : first_row + rows]
        return kept if len(kept) == rows else torch.zeros_like(given)

    def _state(self, index: int, rows: int) -> State:
        if rows <= len(self._states[index].residual):
            return self._states[index].first(rows)
        scratch = Scratch.empty(self._config, rows, self._dtype, self._device)
        return State.empty(self._config, rows, self._dtype, self._device, scratch)

    def _new_offload_buffers(self, rows: int) -> OffloadBuffers:
        config, dtype = self._config, self._dtype
        heads, head_dim = config.num_heads, config.head_dim
        qkv, out = (rows, heads + 2 * config.num_kv_heads, head_dim), (rows, heads, head_dim)
        return OffloadBuffers(
            host_memory(lambda pin: torch.zeros(qkv, dtype=dtype, pin_memory=pin), self._device),
            host_memory(lambda pin: torch.zeros(out, dtype=dtype, pin_memory=pin), self._device),
            host_memory(lambda pin: empty_flags(config.num_layers, pinned=pin), self._device),
        )

    def _offload_views(self, index: int, rows: Rows) -> tuple[OffloadBuffers | None, ...]:
        views: list[OffloadBuffers | None] = []
        for count, kept in zip(rows.decodes, self._offload_buffers[index], strict=True):
            if kept is None:
                views.append(None)
                continue
            whole = kept if count <= len(kept.qkv) else self._new_offload_buffers(count)
            views.append(OffloadBuffers(whole.qkv[:count], whole.out[:count], whole.flags))
        return tuple(views)


def device_bytes(config: ModelConfig, dtype: torch.dtype, capacity: Capacity, num_programs: int) -> int:
    """Return about what a `Workspace` takes of a GPU's memory, graphs included."""
    rows = capacity.tokens + capacity.decodes
    last_rows = 2 * capacity.decodes + MAX_ASYNC_DECODES
    head = last_rows * (config.hidden_size + config.vocab_size) * dtype.itemsize
    parts = max(num_programs // config.num_kv_heads, 1) * config.num_heads * (config.head_dim + 1)
    slots = config.num_layers * MAX_ASYNC_DECODES
    async_decodes = slots * (2 * config.hidden_size * dtype.itemsize + 8 * config.head_dim)
    ints = 5 * rows + 2 * capacity.decodes * (5 + capacity.blocks) + slots
    nowhere = torch.device("meta")
    scratch = Scratch.empty(config, capacity.tokens, dtype, nowhere)
    states = [State.empty(config, n, dtype, nowhere, scratch) for n in (capacity.tokens, capacity.decodes)]
    parts_of: tuple[Scratch | State, ...] = (scratch, *states)
    values = [getattr(part, field.name) for part in parts_of for field in fields(part)]
    values += scratch.experts or ()
    taken = sum(value.nbytes for value in values if isinstance(value, Tensor))
    return taken + head + async_decodes + 4 * (parts + ints)


def _cut(ints: Tensor, begin: int, shapes: Sequence[tuple[int, ...]]) -> InputBuffers:
    views = []
    for shape in shapes:
        end = begin + math.prod(shape)
        views.append(ints[begin:end].view(shape))
        begin = end
    return InputBuffers(*views)
