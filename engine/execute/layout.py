"""The row layout of an iteration, and the sizes of graphs.

A sub-batch's rows are its tokens. The decodes of every tier come first, then the chunks of prompts:

    | decodes of tier 0 | decodes of tier 1 | async decodes | chunk a | chunk b | ...

Async decodes are rows of sub-batch 0. Their rows are slots: at each stage, a slot belongs to the decode at
that stage. Each part may end with padding, whose results are never read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
from numpy.typing import NDArray

from neo_desktop.engine.batch import (
    MAX_ASYNC_DECODES,
    AsyncGroup,
    IterationPlan,
    ScheduledSequence,
    SubBatch,
    rounded_size,
)
from neo_desktop.engine.kv_tier import KVTier

MAX_DECODES = 256  # most decodes of a tier in a graph; more take long enough to be launched one by one.
MIN_BLOCKS = 64  # smallest row of a graph's block table; smaller sizes are not worth their own graph.
MIN_DECODES = 8  # smallest number of a tier's decodes beside prompts, for the same reason.
TOKEN_STEP = 64  # step between the sizes of iterations with prompts; a sixteenth for large ones.


@dataclass(frozen=True, slots=True)
class Rows:
    """Row counts of a sub-batch's parts, padding included."""

    decodes: tuple[int, ...]  # decodes per tier
    prompts: int = 0  # prompt tokens
    async_decodes: int = 0  # slots of async decodes

    @property
    def count(self) -> int:
        return self.first_prompt + self.prompts

    @property
    def starts(self) -> tuple[int, ...]:
        """First row of every tier's decodes, then the first row of the async decodes."""
        return tuple(accumulate(self.decodes, initial=0))

    @property
    def first_prompt(self) -> int:
        return sum(self.decodes) + self.async_decodes

    @property
    def async_slice(self) -> slice:
        return slice(self.starts[-1], self.first_prompt)

    def decodes_of(self, tier: int) -> slice:
        start = self.starts[tier]
        return slice(start, start + self.decodes[tier])


@dataclass(frozen=True, slots=True)
class BatchMembers:
    """The sequences of a sub-batch, in the order of its rows."""

    decodes: tuple[tuple[ScheduledSequence, ...], ...]  # indexed by tier
    prompts: tuple[ScheduledSequence, ...]
    async_decodes: tuple[AsyncGroup, ...] = ()  # indexed by stage

    @classmethod
    def of(
        cls, sub_batch: SubBatch, tiers: Sequence[KVTier], async_decodes: tuple[AsyncGroup, ...] = ()
    ) -> Self:
        """Sort the sequences of a sub-batch and the async decodes that join it."""
        decodes: dict[KVTier, list[ScheduledSequence]] = {tier: [] for tier in tiers}
        prompts: list[ScheduledSequence] = []
        for sequence in sub_batch.sequences:
            (decodes[sequence.tier] if sequence.is_decode else prompts).append(sequence)
        prompts.sort(key=lambda sequence: tiers.index(sequence.tier))  # stable: keeps the plan's order
        return cls(tuple(map(tuple, decodes.values())), tuple(prompts), async_decodes)

    @classmethod
    def of_all(cls, plan: IterationPlan, tiers: Sequence[KVTier]) -> list[Self]:
        """Group each sub-batch's sequences by kind and tier; leave out empty sub-batches."""
        first, *others = plan.sub_batches
        members = [cls.of(first, tiers, plan.async_decodes)] if first.sequences or plan.async_decodes else []
        return members + [cls.of(each, tiers) for each in others if each.sequences]

    @property
    def rows(self) -> Rows:
        """Row counts without padding."""
        prompts = sum(len(s.token_ids) for s in self.prompts)
        return Rows(
            tuple(map(len, self.decodes)), prompts, len(self.async_decodes[0]) if self.async_decodes else 0
        )

    def placed(self, rows: Rows) -> Iterator[tuple[ScheduledSequence, int]]:
        """Yield all sequences with their first rows; async decodes only at the last stage."""
        for start, sequences in zip(rows.starts, self.decodes, strict=False):
            yield from zip(sequences, range(start, start + len(sequences)), strict=True)
        for row, ending in enumerate(self.async_decodes[-1] if self.async_decodes else (), rows.starts[-1]):
            if ending is not None:
                yield ending, row
        yield from self.chunks(rows)

    def chunks(self, rows: Rows) -> Iterator[tuple[ScheduledSequence, int]]:
        """Yield the prompts with their first rows."""
        row = rows.first_prompt
        for sequence in self.prompts:
            yield sequence, row
            row += len(sequence.token_ids)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The sizes of an iteration that determine its memory and graphs."""

    sub_batches: tuple[Rows, ...]
    max_blocks: int  # row length of the block tables for device attention.
    has_copies: bool = False  # True if blocks move: layers then wait for the copies.
    streamed_blocks: int = 0  # leading blocks that are copied to the device per streamed layer

    @classmethod
    def of(
        cls,
        members: Sequence[BatchMembers],
        tiers: Sequence[KVTier],
        streamed_blocks: NDArray[np.int32],
        *,
        has_copies: bool,
    ) -> Self:
        """Return the exact sizes of an iteration.

        Args:
            members: The members of the plan's sub-batches, without empty ones.
        """
        tables = [
            len(sequence.block_table)
            for each in members
            for tier, sequences in zip(tiers, each.decodes, strict=True)
            if not tier.host_attends
            for sequence in sequences
        ]
        rows = tuple(each.rows for each in members)
        return cls(rows, max(tables, default=0), has_copies, int(streamed_blocks.max(initial=-1)) + 1)

    def rounded(self, *, pads: bool = True) -> "GraphKey":
        """Return the graph sizes that serve this iteration and similar ones.

        Args:
            pads: Add rows of padding, which a CPU would compute one after the other.

        With decodes alone, padding adds less than a third of the rows, and rows cost little beside the
        weights. With prompts, rows cost more: a large total is rounded up by a sixteenth at most.
        """
        has_prompts = any(rows.prompts for rows in self.sub_batches)
        table = self.max_blocks
        pad = _with_prompts if has_prompts else _decodes
        return GraphKey(
            tuple(map(pad, self.sub_batches)) if pads else self.sub_batches,
            max(rounded_size(table, 0), MIN_BLOCKS) if table else 0,
            self.has_copies,
            # Padding blocks cost time on the bus. If the blocks are many, padding is an eighth at most.
            rounded_size(self.streamed_blocks, 4, MIN_BLOCKS),
        )

    @property
    def is_whole(self) -> bool:
        """True if one graph can hold the iteration, because it depends on nothing but these sizes."""
        return not self.has_copies and not any(rows.prompts for rows in self.sub_batches)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest iteration that memory is reserved for."""

    tokens: int  # rows of sub-batch 0
    decodes: int  # rows per tier and sub-batch, and the total rows of sub-batch 1
    blocks: int  # row length of the block tables

    @classmethod
    def of(cls, max_tokens: int, max_requests: int, max_context_tokens: int, block_size: int) -> Self:
        """Return a capacity for every iteration within the limits."""
        decodes = rounded_size(min(max_requests, MAX_DECODES))
        tokens = round_tokens(max_tokens + 2 * MIN_DECODES + MAX_ASYNC_DECODES)
        return cls(max(tokens, decodes), decodes, rounded_size(-(-max_context_tokens // block_size), 0))


def streamed_blocks(plan: IterationPlan, block_size: int) -> NDArray[np.int32]:
    """Return the blocks of streamed KV that a plan attends to, with duplicates for shared blocks."""
    tables = [
        sequence.block_table[: -(-sequence.start // block_size)]
        for sequence in plan.sequences
        if sequence.tier.is_streamed
    ]
    return np.concatenate(tables) if tables else np.empty(0, np.int32)


def round_tokens(count: int) -> int:
    """Round up to a token count of the graphs."""
    return rounded_size(count, 5, TOKEN_STEP)


def _decodes(rows: Rows) -> Rows:
    return Rows(tuple(map(rounded_size, rows.decodes)), async_decodes=rounded_size(rows.async_decodes))


def _with_prompts(rows: Rows) -> Rows:
    *decodes, async_decodes = (
        max(rounded_size(count, 0), MIN_DECODES) if count else 0
        for count in (*rows.decodes, rows.async_decodes)
    )
    others = sum(decodes) + async_decodes
    prompts = round_tokens(others + rows.prompts) - others if rows.prompts else 0
    return Rows(tuple(decodes), prompts, async_decodes)
