"""Construction of a program from a plan: row layout, inputs, and the CPU's work."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from neo_desktop.engine.batch import (
    MAX_ASYNC_DECODES,
    UNKNOWN_TOKEN,
    IterationPlan,
    ScheduledSequence,
    SubBatch,
)
from neo_desktop.engine.cuda.copies import suits_graphs
from neo_desktop.engine.execute.async_decodes import NO_BLOCKS, AsyncBuffers
from neo_desktop.engine.execute.attender import Attender
from neo_desktop.engine.execute.decodes import DecodeOffload, DeviceDecodes
from neo_desktop.engine.execute.expert_moves import ExpertMoves
from neo_desktop.engine.execute.images import ImageInputs
from neo_desktop.engine.execute.layout import BatchMembers, GraphKey, streamed_blocks
from neo_desktop.engine.execute.linears import Linears
from neo_desktop.engine.execute.moves import Moves
from neo_desktop.engine.execute.offloaded_matmuls import OffloadedMatmuls
from neo_desktop.engine.execute.output_head import OutputHead
from neo_desktop.engine.execute.outputs import Outputs
from neo_desktop.engine.execute.program import Program
from neo_desktop.engine.execute.prompts import (
    DevicePrompts,
    HostPrompts,
    chunks_of,
    slots_of,
)
from neo_desktop.engine.execute.recurrent import fill_spans, has_new_spans, recurrent_batch
from neo_desktop.engine.execute.streamed import (
    PrefetchBuffers,
    PrefetchStream,
    StreamedDecodes,
    StreamedPrompts,
    streamed_pool,
)
from neo_desktop.engine.execute.sub_batch import SubBatchPass
from neo_desktop.engine.execute.transfers import TransferMemory
from neo_desktop.engine.execute.workspace import BatchMemory, InputBuffers, Memory, Workspace
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv.streamed import BlockRun, StreamedPool
from neo_desktop.models.operators import Store
from neo_desktop.models.stages import Stages

NOWHERE: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class _Extras:
    """The needs of a sub-batch's sequences that its sizes do not determine."""

    ends: Sequence[tuple[ScheduledSequence, int]] = ()  # sequences with the rows of their last tokens
    images: ImageInputs | None = None
    prompts: Sequence[ScheduledSequence] = ()
    is_capturable: bool = True  # False: its linear stages depend on more than the sizes


class ProgramBuilder:
    """The builder of programs.

    Args:
        decodes: Most decodes of a tier in a sub-batch that memory is reserved for.
        moves_experts: True if experts may move to the device.
    """

    def __init__(
        self,
        stages: Stages,
        storage: KVStorage,
        workspace: Workspace,
        decodes: int,
        *,
        moves_experts: bool = False,
    ) -> None:
        self._stages = stages
        self._model = stages.decoder
        self._storage = storage
        self._workspace = workspace
        config = self._model.config
        self._transfers = TransferMemory(config, self._model.dtype, self._model.device)
        streamed = streamed_pool(storage)
        self._swaps: PrefetchBuffers | None = None  # None: no tier is streamed
        if streamed is not None:
            self._swaps = PrefetchBuffers(streamed, decodes, self._model.dtype, self._model.device)
        self._offload = DecodeOffload(stages, storage, decodes)
        self._async = AsyncBuffers(stages, storage)
        # Offloaded matrices and their buffers; None: the model has none.
        self.products: OffloadedMatmuls | None = None
        if self._model.has_splits:
            rows = decodes + MAX_ASYNC_DECODES, decodes
            self.products = OffloadedMatmuls(stages, rows, moves_experts=moves_experts)
        owners = (self._swaps, self._offload, self._async, self.products)
        on_host = [tensor for owner in owners if owner is not None for tensor in owner.on_host]
        # True if graphs can use the builder's host buffers; see `Workspace`.
        self.fits_graphs = suits_graphs(on_host, self._model.device)
        # (memory, set of async buffers) -> program of a graph
        self._known: dict[tuple[BatchMemory, int], Program] = {}

    def forget(self) -> None:
        """Drop the programs of graphs."""
        self._known.clear()

    def build(
        self, plan: IterationPlan, rows_of_tokens: Mapping[str, int] = NOWHERE, *, for_graphs: bool
    ) -> Program:
        """Return a plan's program with its inputs filled in.

        A graph that holds the whole iteration has one program for all plans of its sizes.

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
        blocks = streamed_blocks(plan, self._storage.block_size) if self._swaps is not None else NO_BLOCKS
        graph_key = GraphKey.of(members, tiers, blocks, has_copies=bool(plan.copies))
        rounded = (graph_key.rounded(pads=self._workspace.is_staged),) if for_graphs else ()
        memory = self._workspace.memory(*rounded, graph_key)
        self._transfers.begin()
        parts = zip(memory.parts, members, strict=True)
        extras = [self._fill(part, each, rows_of_tokens) for part, each in parts]
        firsts = accumulate((part.rows.count for part in memory.parts), initial=0)
        ends = [(s, first + row) for first, part in zip(firsts, extras, strict=False) for s, row in part.ends]
        experts = None if self.products is None else self.products.prepared_moves(memory.parts, members)
        is_whole = memory.is_fixed and for_graphs and graph_key.is_whole
        if (
            is_whole
            and all(part.is_capturable for part in extras)
            and not any(sequence.num_pooled for sequence, _ in ends)
        ):
            chosen_rows = sum(part.rows.count for part in memory.parts)
            program = self._whole(memory, experts)
        else:
            chosen_rows = None
            moves = Moves(self._storage.copy_groups(plan.copies), self._transfers)
            runs = [] if self._swaps is None else self._swaps.pool.runs_of(blocks)
            program = self._program(memory, extras, moves, runs, experts, chooses=False)
            counts = accumulate(sequence.num_outputs for sequence, _ in ends)
            ends = [(sequence, count - 1) for (sequence, _), count in zip(ends, counts, strict=True)]
        if not self._stages.has_head:
            ends = []  # the rank with the output head chooses tokens
        program.fill(members, Outputs(ends, self._stages, self._workspace, chosen_rows))
        return program

    def padding(self, graph_key: GraphKey) -> Program:
        """Return a program of padding only, to warm up kernels."""
        memory = self._workspace.memory(graph_key)
        no_members = BatchMembers.of(SubBatch(()), self._storage.tiers)
        for part in memory.parts:
            self._fill(part, no_members, NOWHERE)
        program = self._whole(memory)
        program.fill([no_members] * len(memory.parts), Outputs((), self._stages, self._workspace, 0))
        return program

    def _whole(self, memory: BatchMemory, experts: ExpertMoves | None = None) -> Program:
        """Return the program of a graph that holds whole iterations."""
        key = memory, self._async.newest
        if key in self._known:
            return self._known[key]
        count, runs = memory.graph_key.streamed_blocks, []
        if self._swaps is not None and count:
            runs = [BlockRun(0, min(count, self._swaps.pool.num_blocks))]
        extras, moves = [_Extras() for _ in memory.parts], Moves((), self._transfers)
        program = self._program(memory, extras, moves, runs, experts, chooses=True)
        if self.products is None:  # a stream of weights serves one iteration
            self._known[key] = program
        return program

    def _program(
        self,
        memory: BatchMemory,
        extras: Sequence[_Extras],
        moves: Moves,
        runs: Sequence[BlockRun],
        experts: ExpertMoves | None,
        *,
        chooses: bool,
    ) -> Program:
        """Return a program without its inputs.

        Args:
            runs: The blocks of streamed KV to prefetch.
            experts: Moves of experts beside the iteration.
        """
        shared: list[Attender] = [moves]
        stream = None
        if self._swaps is not None:
            stream = self._swaps.stream(runs, moves)
            shared.append(stream)
        passes = [self._pass(part, each, stream) for part, each in zip(memory.parts, extras, strict=True)]
        ending = OutputHead(self._stages, self._workspace, passes, self.products, chooses=chooses)
        used = [each.products for each in passes if each.products is not None] + ending.products
        can = memory.is_fixed and all(each.is_capturable for each in passes)
        linears = Linears(self._stages, self.products, used, are_capturable=can, moves=experts)
        return Program(self._workspace, memory, passes, shared, linears, ending)

    def _pass(self, memory: Memory, extras: _Extras, stream: PrefetchStream | None) -> SubBatchPass:
        products, layers = self.products, range(self._model.config.num_layers)
        attenders = [
            *self._offload.attenders(memory),
            *self._async.attenders(memory),
            *self._device_decodes(memory, stream),
            *self._prompts(memory, extras.prompts, stream),
        ]
        return SubBatchPass(
            memory,
            attenders,
            self._stages.embed if extras.images is None else extras.images.embed,
            partial(self._store, memory),
            [row + i for s, row in extras.ends for i in range(1 - s.num_outputs, 1)],
            None if products is None else products.of_rows(memory.index, memory.rows.count, layers),
            extras.is_capturable,
        )

    def _device_decodes(self, memory: Memory, stream: PrefetchStream | None) -> Iterator[Attender]:
        """Yield the decodes with attention on the device, by tier."""
        inputs, first = memory.inputs, 0
        for index, tier in enumerate(self._storage.tiers):
            count = memory.rows.decodes[index]
            if tier.host_attends or not count:
                continue
            rows = slice(first, first + count)
            first += count
            pool = self._storage[tier]
            given = (
                self._stages,
                memory,
                memory.rows.decodes_of(index),
                pool,
                inputs.block_tables[rows],
                inputs.context_lens[rows],
                inputs.decode_slots[rows],
                partial(self._workspace.partials, count),
            )
            if isinstance(pool, StreamedPool):
                assert stream is not None
                assert self._swaps is not None
                yield StreamedDecodes(*given, pool, stream, index, self._swaps.new_rows(memory.index, count))
            else:
                yield DeviceDecodes(*given)

    def _prompts(
        self, memory: Memory, sequences: Sequence[ScheduledSequence], stream: PrefetchStream | None
    ) -> Iterator[Attender]:
        """Yield the prompt chunks of a sub-batch, by tier."""
        row = memory.rows.first_prompt
        for tier, group in groupby(sequences, key=lambda sequence: sequence.tier):
            pool = self._storage[tier]
            chunks, slots = chunks_of(group, row, pool)
            row = chunks[-1].rows.stop
            given = self._stages, memory, pool, chunks
            if tier.host_attends:
                yield HostPrompts(*given, self._transfers)
            elif isinstance(pool, StreamedPool):
                assert stream is not None
                yield StreamedPrompts(self._stages, memory, pool, chunks, slots, stream)
            else:
                yield DevicePrompts(*given)

    def _store(self, memory: Memory, layer: int) -> Store | None:
        """Return the target of rows that the rotation kernel stores; at most one tier has it."""
        for tier in self._storage.tiers:
            pool = self._storage[tier]
            if pool.fused_kv_append:
                return pool.layer(layer).store(memory.inputs.slots)
        return None

    def _fill(self, memory: Memory, members: BatchMembers, rows_of_tokens: Mapping[str, int]) -> _Extras:
        """Fill in a sub-batch's inputs, and mark all other rows as padding; return what else it needs."""
        staged, rows = memory.staged, memory.rows
        inputs = staged.token_ids, staged.positions, staged.context_lens, staged.block_tables
        for ints in (*inputs, staged.async_positions):
            ints.fill(0)
        staged.slots.fill(-1)
        staged.decode_slots.fill(-1)
        staged.sources[:] = np.arange(memory.first_source, memory.first_source + len(staged.sources))
        self._fill_decodes(memory, members)
        if len(staged.spans):
            fill_spans(staged, rows, members)
        for where, group in zip(staged.async_positions, members.async_decodes, strict=False):
            where[: len(group)] = [0 if s is None else s.position for s in group]
        for row, each in enumerate(
            members.async_decodes[0] if members.async_decodes else (), rows.starts[-1]
        ):
            if each is not None:
                staged.token_ids[row], staged.positions[row] = each.token_ids[0], each.position
        for chunk, row in members.chunks(rows):
            self._fill_chunk(staged, chunk, row)
        placed = list(members.placed(rows))
        ends = [(s, row + len(s.token_ids) - 1) for s, row in placed]
        for sequence, row in ends if rows_of_tokens else ():
            if sequence.token_ids[-1] == UNKNOWN_TOKEN:
                staged.sources[row] = rows_of_tokens[sequence.request_id]
        with_images = [(s, row) for s, row in placed if s.images is not None]
        found = ImageInputs.of(with_images, self._stages) if with_images else None
        memory.state.recurrent = recurrent_batch(self._storage.states, memory, members)
        is_capturable = found is None and not has_new_spans(memory)
        return _Extras(ends, found, members.prompts, is_capturable)

    def _fill_decodes(self, memory: Memory, members: BatchMembers) -> None:
        staged, rows, block_size = memory.staged, memory.rows, self._storage.block_size
        first = 0
        for index, (tier, sequences) in enumerate(zip(self._storage.tiers, members.decodes, strict=True)):
            start, end = rows.starts[index], rows.starts[index] + len(sequences)
            staged.token_ids[start:end] = [s.token_ids[0] for s in sequences]
            staged.positions[start:end] = [s.position for s in sequences]
            if tier.host_attends:
                continue
            here = slice(first, first + len(sequences))
            first += rows.decodes[index]
            tables, starts = staged.block_tables[here], np.array([s.start for s in sequences], np.int32)
            for row, sequence in zip(tables, sequences, strict=True):
                row[: len(sequence.block_table)] = sequence.block_table
            staged.context_lens[here] = starts + 1
            stored = tables[np.arange(len(starts)), starts // block_size] * block_size + starts % block_size
            if self._storage[tier].fused_kv_append:
                staged.slots[start:end] = stored
            else:
                staged.decode_slots[here] = stored

    def _fill_chunk(
        self, staged: InputBuffers[NDArray[np.int32]], chunk: ScheduledSequence, row: int
    ) -> None:
        end, where = row + len(chunk.token_ids), np.arange(chunk.start, chunk.context_len)
        staged.token_ids[row:end] = chunk.token_ids
        staged.positions[row:end] = where if chunk.images is None else chunk.images.rotation(where)
        if self._storage[chunk.tier].fused_kv_append:
            staged.slots[row:end] = slots_of(chunk.block_table, where, self._storage.block_size)
