"""Construction of a program from a plan: row layout, inputs, and the CPU's work."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop.engine.batch import MAX_ASYNC_DECODES, UNKNOWN_TOKEN, IterationPlan, ScheduledSequence
from neo_desktop.engine.cuda.copies import suits_graphs
from neo_desktop.engine.execute.async_decodes import AsyncBuffers
from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.decodes import DecodeOffload, DeviceDecodes
from neo_desktop.engine.execute.images import ImageInputs, reads_images
from neo_desktop.engine.execute.layout import BatchMembers, GraphKey, streamed_blocks
from neo_desktop.engine.execute.linears import Linears
from neo_desktop.engine.execute.moves import Moves
from neo_desktop.engine.execute.offloaded_matmuls import OffloadedMatmuls
from neo_desktop.engine.execute.output_head import OutputHead
from neo_desktop.engine.execute.outputs import Asked, Outputs
from neo_desktop.engine.execute.prefill import Prefill
from neo_desktop.engine.execute.program import Program
from neo_desktop.engine.execute.prompts import (
    DevicePrompts,
    HostPrompts,
    PromptAttention,
    Prompts,
    prompts_of,
    slots_of,
)
from neo_desktop.engine.execute.recurrent import fill_spans, has_new_spans, recurrent_batch
from neo_desktop.engine.execute.streamed import (
    NewRows,
    PrefetchBuffers,
    PrefetchStream,
    StreamedDecodes,
    StreamedPrompts,
    streamed_pool,
)
from neo_desktop.engine.execute.sub_batch import SubBatchPass
from neo_desktop.engine.execute.transfers import TransferMemory
from neo_desktop.engine.execute.workspace import BatchMemory, Memory, Workspace
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv.streamed import BlockRun, StreamedPool
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.operators import Store
from neo_desktop.models.stages import Stages

NOWHERE: Mapping[str, int] = {}


class ProgramBuilder:
    """The builder of programs.

    Args:
        storage: The KV pools.
        workspace: Working memory of programs.
        decodes: Most decodes of a tier in a sub-batch that memory is reserved for.
    """

    def __init__(self, stages: Stages, storage: KVStorage, workspace: Workspace, decodes: int) -> None:
        self._stages = stages
        self._model = stages.decoder
        self._storage = storage
        self._workspace = workspace
        config = self._model.config
        self._row_shape = (config.num_kv_heads, config.head_dim)
        self._transfers = TransferMemory(
            config.num_layers, self._row_shape, self._model.dtype, self._model.device
        )
        # The pool of streamed KV; None: no tier is streamed.
        self._streamed = streamed_pool(storage)
        self._swaps: PrefetchBuffers | None = None
        if self._streamed is not None:
            self._swaps = PrefetchBuffers(self._streamed, decodes, self._model.dtype, self._model.device)
        self._offload = DecodeOffload(stages, storage, decodes)
        self._async = AsyncBuffers(stages, storage)
        # Offloaded matrices and their buffers; None: the model has none.
        self.products: OffloadedMatmuls | None = None
        if self._model.has_splits:
            self.products = OffloadedMatmuls(stages, (decodes + MAX_ASYNC_DECODES, decodes))
        owners = (self._swaps, self._offload, self._async, self.products)
        on_host = [tensor for owner in owners if owner is not None for tensor in owner.on_host]
        # True if graphs can use the builder's host buffers; see `Workspace`.
        self.fits_graphs = suits_graphs(on_host, self._model.device)

    def build(
        self, plan: IterationPlan, rows_of_tokens: Mapping[str, int] = NOWHERE, *, for_graphs: bool
    ) -> Program:
        """Return a plan's program with its inputs filled in.

        Args:
            rows_of_tokens: request ID -> row in `Workspace.latest`, for tokens that the plan does not know.
            for_graphs: Round sizes up, so that the parts can be graphs if the memory allows it.

        Raises:
            ValueError: A chunk is in a tier without a pool, or the plan's async decodes are invalid.
            KeyError: The row of an unknown token is missing.
        """
        tiers = self._storage.tiers
        self._async.check(plan)
        members = BatchMembers.of_all(plan, tiers)
        graph_key = GraphKey.of(plan, members, tiers, self._storage.block_size)
        blocks = np.unique(streamed_blocks(plan, self._storage.block_size))
        memory = self._workspace.memory(graph_key.rounded() if for_graphs else graph_key)
        if for_graphs and not memory.is_fixed:
            memory = self._workspace.memory(graph_key)
        chooses = memory.is_fixed and for_graphs and graph_key.is_whole and not _pools(plan)
        chooses = chooses and not reads_images(plan)
        if self._model.config.state_shapes:
            chooses = chooses and not any(map(has_new_spans, members))
        self._transfers.begin()
        moves = Moves(self._storage.copy_groups(plan.copies), self._transfers)
        stream = self._prefetch_stream(plan, blocks, memory if chooses else None, moves)
        passes, asked, first_row = [], [], 0
        for part, each in zip(memory.parts, members, strict=True):
            wanted = [
                (sequence, row + len(sequence.token_ids) - count, count)
                for sequence, row in each.placed(part.rows)
                if (count := num_last_rows(sequence))
            ]
            last_rows = [row for _, first, count in wanted for row in range(first, first + count)]
            passes.append(self._pass(part, each, last_rows, rows_of_tokens, stream))
            if chooses:
                asked += [Asked(sequence, first_row + first, count) for sequence, first, count in wanted]
                first_row += part.rows.count
            else:
                for sequence, _, count in wanted:
                    asked.append(Asked(sequence, first_row, count))
                    first_row += count
        if not self._stages.has_head:
            asked = []  # the rank with the output head chooses tokens
        outputs = Outputs(asked, self._stages, self._workspace, first_row if chooses else None)
        shared = [moves] if stream is None else [moves, stream]
        return self._program(memory, passes, shared, outputs, chooses=chooses)

    def padding(self, graph_key: GraphKey) -> Program:
        """Return a program of padding only, to warm up kernels."""
        memory = self._workspace.memory(graph_key)
        no_members = BatchMembers(((),) * len(self._storage.tiers), ())
        moves, outputs = Moves((), self._transfers), Outputs((), self._stages, self._workspace, 0)
        stream = None if self._swaps is None else self._swaps.stream((), moves)
        passes = [self._pass(part, no_members, (), stream=stream) for part in memory.parts]
        return self._program(memory, passes, [moves], outputs, chooses=True)

    def _program(
        self,
        memory: BatchMemory,
        passes: Sequence[SubBatchPass],
        shared: Sequence[Attender],
        outputs: Outputs,
        *,
        chooses: bool,
    ) -> Program:
        ending = OutputHead(self._stages, self._workspace, passes, self.products, outputs, chooses=chooses)
        used = [each.products for each in passes if each.products is not None] + ending.products
        can = memory.is_fixed and all(each.is_capturable for each in passes)
        linears = Linears(self._stages, self.products, used, are_capturable=can)
        return Program(self._workspace, memory, passes, shared, linears, ending, outputs, chooses=chooses)

    def _prefetch_stream(
        self, plan: IterationPlan, blocks: NDArray[np.int32], graph: BatchMemory | None, moves: Moves
    ) -> PrefetchStream | None:
        """Return the prefetch of streamed KV to the device; None: no sequence attends to streamed KV.

        Args:
            blocks: The blocks to prefetch.
            graph: Memory of the iteration's graph; None: the iteration is launched stage by stage.
        """
        swaps, pool = self._swaps, self._streamed
        if swaps is None or pool is None or not any(s.tier.is_streamed for s in plan.sequences):
            return None
        if graph is None:
            return swaps.stream(pool.runs_of(blocks), moves)
        count = min(graph.graph_key.streamed_blocks, pool.num_blocks)
        return swaps.stream([BlockRun(0, count)] if count else [], moves)

    def _pass(
        self,
        memory: Memory,
        members: BatchMembers,
        last_rows: Sequence[int],
        rows_of_tokens: Mapping[str, int] = NOWHERE,
        stream: PrefetchStream | None = None,
    ) -> SubBatchPass:
        self._fill(memory, members)
        memory.state.recurrent = recurrent_batch(self._storage.states, memory, members)
        if memory.table is not None:
            self._find_tokens(memory, members, rows_of_tokens)
        products, layers = self.products, range(self._model.config.num_layers)
        images = ImageInputs.of(members.placed(memory.rows), self._stages)
        attenders = [
            *self._offload.attenders(memory, members),
            *self._async.attenders(memory, members),
            *self._device_decodes(memory, members, stream),
        ]
        if members.prompts:
            prompts = self._prompts(memory, members, stream)
            attenders.append(PromptAttention(self._stages, memory, prompts))
        return SubBatchPass(
            memory,
            attenders,
            self._stages.embed if images is None else images.embed,
            partial(self._store, memory),
            last_rows,
            None if products is None else products.of_rows(memory.index, memory.rows.count, layers),
            images is None and not (self._model.config.state_shapes and has_new_spans(members)),
        )

    def _device_decodes(
        self, memory: Memory, members: BatchMembers, stream: PrefetchStream | None
    ) -> Iterator[Attender]:
        """Yield the decodes with attention on the device, by tier."""
        inputs, first = memory.inputs, 0
        for index, tier in enumerate(self._storage.tiers):
            count = memory.rows.decodes[index]
            if tier.host_attends or not count:
                continue
            rows = slice(first, first + count)
            first += count
            given = (
                self._stages,
                memory,
                memory.rows.decodes_of(index),
                self._storage[tier],
                inputs.block_tables[rows],
                inputs.context_lens[rows],
                inputs.decode_slots[rows],
                partial(self._workspace.partials, count),
            )
            if tier.is_streamed:
                assert stream is not None
                yield StreamedDecodes(*given, stream, self._new_rows(memory, index, members))
            else:
                yield DeviceDecodes(*given)

    def _new_rows(self, memory: Memory, tier: int, members: BatchMembers) -> NewRows:
        """Return the buffer for new rows of a sub-batch's streamed decodes."""
        assert self._swaps is not None  # the tier is streamed
        slots = [decode_slot(sequence, self._storage.block_size) for sequence in members.decodes[tier]]
        return self._swaps.rows_of(memory.index, slots, memory.rows.decodes[tier])

    def _prompts(self, memory: Memory, members: BatchMembers, stream: PrefetchStream | None) -> list[Prompts]:
        device, dtype = self._model.device, self._model.dtype

        def make(tier: KVTier, pool: KVPool, chunks: Sequence[Prefill], slots: Tensor) -> Prompts:
            if tier.host_attends:
                index = memory.index
                return HostPrompts(self._transfers, pool, index, chunks, device, self._row_shape, dtype)
            if stream is not None and isinstance(pool, StreamedPool):
                return StreamedPrompts(pool, chunks, slots, stream, memory.index)
            return DevicePrompts(pool, chunks)

        return prompts_of(members.prompts, memory.rows.first_prompt, self._storage, make)

    def _store(self, memory: Memory, layer: int) -> Store | None:
        """Return the target of rows that the rotation kernel stores; at most one tier has it."""
        for tier in self._storage.tiers:
            pool = self._storage[tier]
            if pool.fused_kv_append:
                return pool.layer(layer).store(memory.inputs.slots)
        return None

    def _fill(self, memory: Memory, members: BatchMembers) -> None:
        """Fill in the iteration's inputs, and mark all other rows as padding."""
        staged, rows = memory.staged, memory.rows
        token_ids, positions, slots = (x.numpy() for x in (staged.token_ids, staged.positions, staged.slots))
        context_lens, block_tables = staged.context_lens.numpy(), staged.block_tables.numpy()
        decode_slots = staged.decode_slots.numpy()
        token_ids[:], positions[:], slots[:], context_lens[:], block_tables[:] = 0, 0, -1, 0, 0
        decode_slots[:] = -1
        block_size, first_table = self._storage.block_size, 0
        for index, (tier, sequences) in enumerate(zip(self._storage.tiers, members.decodes, strict=True)):
            start, count = rows.starts[index], len(sequences)
            token_ids[start : start + count] = [s.token_ids[0] for s in sequences]
            positions[start : start + count] = [s.position for s in sequences]
            if tier.host_attends:
                continue
            context_lens[first_table : first_table + count] = [s.context_len for s in sequences]
            stored = [decode_slot(sequence, block_size) for sequence in sequences]
            if self._storage[tier].fused_kv_append:
                slots[start : start + count] = stored
            else:
                decode_slots[first_table : first_table + count] = stored
            for row, sequence in zip(block_tables[first_table:], sequences, strict=False):
                row[: len(sequence.block_table)] = sequence.block_table
            first_table += rows.decodes[index]
        if len(staged.spans):
            fill_spans(staged.spans.numpy(), rows.starts, members.decodes)
        staged.async_positions.numpy()[:] = 0
        for row, beginning in enumerate(
            members.async_decodes[0] if members.async_decodes else (), rows.starts[-1]
        ):
            if beginning is not None:
                token_ids[row], positions[row] = beginning.token_ids[0], beginning.position
        for where, group in zip(staged.async_positions.numpy(), members.async_decodes, strict=False):
            where[: len(group)] = [0 if s is None else s.position for s in group]
        row = rows.first_prompt
        for sequence in members.prompts:
            end = row + len(sequence.token_ids)
            token_ids[row:end] = sequence.token_ids
            where = np.arange(sequence.start, sequence.context_len)
            positions[row:end] = where if sequence.images is None else sequence.images.rotation(where)
            if self._storage[sequence.tier].fused_kv_append:
                slots[row:end] = slots_of(sequence.block_table, where, block_size)
            row = end

    def _find_tokens(self, memory: Memory, members: BatchMembers, rows_of_tokens: Mapping[str, int]) -> None:
        """Fill in the source of every row's token: the inputs, or the last iteration's output."""
        sources = memory.staged.sources.numpy()
        sources[:] = np.arange(memory.first_source, memory.first_source + len(sources))
        for sequence, row in members.placed(memory.rows) if rows_of_tokens else ():
            if sequence.token_ids[-1] == UNKNOWN_TOKEN:
                sources[row + len(sequence.token_ids) - 1] = rows_of_tokens[sequence.request_id]


def decode_slot(sequence: ScheduledSequence, block_size: int) -> int:
    """Return the slot for the KV of a decode's token."""
    return int(sequence.block_table[sequence.start // block_size]) * block_size + sequence.start % block_size


def num_last_rows(sequence: ScheduledSequence) -> int:
    """Return the number of a sequence's tokens that need a hidden state after the last layer."""
    return max(sequence.num_pooled, sequence.num_hidden, int(sequence.sampling is not None))


def _pools(plan: IterationPlan) -> bool:
    return any(sequence.num_pooled for sequence in plan.sequences)
