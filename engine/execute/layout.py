"""Where the rows of an iteration lie, and the sizes that graphs are made for.

A sub-batch's rows are its tokens. Decodes of each tier come first, then the chunks of prompts:

    | decodes of tier 0 | decodes of tier 1 | async decodes | chunk a | chunk b | ...

async decodes are rows of sub-batch 0. Such a row is a slot: in each stage it is of the decode that stands
there. Each part may have padding behind it, which nobody reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
from numpy.typing import NDArray

from neo_desktop.engine.batch import MAX_ASYNC_DECODES, AsyncGroup, IterationPlan, ScheduledSequence, SubBatch
from neo_desktop.engine.kv_tier import KVTier

MAX_DECODES = 256  # of a tier in a graph; more take long enough to be launched piece by piece
MIN_BLOCKS = 64  # in a row of a graph's block table; shorter ones are not worth a graph of their own
MIN_DECODES = 8  # of a tier beside prompts, likewise
TOKEN_STEP = 64  # by which iterations with prompts grow; of large ones a sixteenth


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows the parts of a sub-batch have, padding included."""

    decodes: tuple[int, ...]  # of each tier
    prompts: int = 0  # tokens
    async_decodes: int = 0  # slots

    @property
    def count(self) -> int:
        """All of them."""
        return self.first_prompt + self.prompts

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the decodes of each tier begin, and after them the async ones."""
        return tuple(accumulate(self.decodes, initial=0))

    @property
    def first_prompt(self) -> int:
        """Where prompts begin."""
        return sum(self.decodes) + self.async_decodes

    @property
    def async_slice(self) -> slice:
        """Return the rows of async decodes."""
        return slice(self.starts[-1], self.first_prompt)

    def decodes_of(self, tier: int) -> slice:
        """Return the rows of a tier's decodes."""
        start = self.starts[tier]
        return slice(start, start + self.decodes[tier])


@dataclass(frozen=True, slots=True)
class BatchMembers:
    """The sequences of a sub-batch, in the order of its rows."""

    decodes: tuple[tuple[ScheduledSequence, ...], ...]  # by tier
    prompts: tuple[ScheduledSequence, ...]
    async_decodes: tuple[AsyncGroup, ...] = ()  # by stage

    @classmethod
    def of(
        cls, sub_batch: SubBatch, tiers: Sequence[KVTier], async_decodes: tuple[AsyncGroup, ...] = ()
    ) -> Self:
        """Sort the sequences of a sub-batch, and of those that join it."""
        decodes: dict[KVTier, list[ScheduledSequence]] = {tier: [] for tier in tiers}
        prompts: list[ScheduledSequence] = []
        for sequence in sub_batch.sequences:
            (decodes[sequence.tier] if sequence.is_decode else prompts).append(sequence)
        prompts.sort(key=lambda sequence: tiers.index(sequence.tier))  # stable: otherwise as planned
        return cls(tuple(map(tuple, decodes.values())), tuple(prompts), async_decodes)

    @classmethod
    def of_all(cls, plan: IterationPlan, tiers: Sequence[KVTier]) -> list[Self]:
        """Sort the sequences of a plan's sub-batches, without those in which there is nobody."""
        first, *others = plan.sub_batches
        of_first = [cls.of(first, tiers, plan.async_decodes)] if first.sequences or plan.async_decodes else []
        return of_first + [cls.of(each, tiers) for each in others if each.sequences]

    @property
    def rows(self) -> Rows:
        """The rows without padding."""
        prompts = sum(len(s.token_ids) for s in self.prompts)
        return Rows(
            tuple(map(len, self.decodes)), prompts, len(self.async_decodes[0]) if self.async_decodes else 0
        )

    def placed(self, rows: Rows) -> Iterator[tuple[ScheduledSequence, int]]:
        """Yield all sequences, each with its first row; of async ones those at the last stage."""
        for start, sequences in zip(rows.starts, self.decodes, strict=False):
            yield from zip(sequences, range(start, start + len(sequences)), strict=True)
        for row, ending in enumerate(self.async_decodes[-1] if self.async_decodes else (), rows.starts[-1]):
            if ending is not None:
                yield ending, row
        row = rows.first_prompt
        for sequence in self.prompts:
            yield sequence, row
            row += len(sequence.token_ids)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The sizes of an iteration, as far as memory and graphs depend on them."""

    sub_batches: tuple[Rows, ...]
    max_blocks: int  # of a row of the block tables of decodes that the device attends for
    has_copies: bool = False  # whether blocks move, so that layers have to wait for them
    streamed_blocks: int = 0  # so many of the first come to the device in each layer

    @classmethod
    def of(
        cls, plan: IterationPlan, members: Sequence[BatchMembers], tiers: Sequence[KVTier], block_size: int
    ) -> Self:
        """Return the exact sizes of a plan, whose sub-batches that are not empty have these members."""
        tables = (
            len(sequence.block_table)
            for each in members
            for tier, sequences in zip(tiers, each.decodes, strict=True)
            if not tier.host_attends
            for sequence in sequences
        )
        streamed = streamed_blocks(plan, block_size)
        rows = tuple(each.rows for each in members)
        return cls(rows, max(tables, default=0), bool(plan.copies), int(streamed.max(initial=-1)) + 1)

    def rounded(self) -> "GraphKey":
        """Return the sizes of the graphs that serve this iteration and many like it.

        Among decodes alone padding costs less than a third of the rows, which cost little beside the weights.
        Beside prompts rows cost more: all of them are rounded by a sixteenth at most, if they are many.
        """
        has_prompts = any(rows.prompts for rows in self.sub_batches)
        table = self.max_blocks
        return GraphKey(
            tuple(_with_prompts(rows) if has_prompts else _decodes(rows) for rows in self.sub_batches),
            max(_power_of_two(table), MIN_BLOCKS) if table else 0,
            self.has_copies,
            round_swapped(self.streamed_blocks),
        )

    @property
    def is_whole(self) -> bool:
        """Whether one graph can hold the iteration: nothing in it depends on more than these sizes."""
        return not self.has_copies and not any(rows.prompts for rows in self.sub_batches)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest iteration that memory is kept for."""

    tokens: int  # rows of sub-batch 0
    decodes: int  # rows of a tier in a sub-batch; also all rows of sub-batch 1
    blocks: int  # of a row of the block tables

    @classmethod
    def of(cls, max_tokens: int, max_requests: int, max_context_tokens: int, block_size: int) -> Self:
        """Return what holds every iteration within the limits.

        Args:
            max_tokens: of an iteration.
            max_requests: likewise.
            max_context_tokens: of a request.
            block_size: tokens per block.
        """
        decodes = round_decodes(min(max_requests, MAX_DECODES))
        tokens = round_tokens(max_tokens + 2 * MIN_DECODES + MAX_ASYNC_DECODES)
        return cls(max(tokens, decodes), decodes, _power_of_two(-(-max_context_tokens // block_size)))


def streamed_blocks(plan: IterationPlan, block_size: int) -> NDArray[np.int32]:
    """Return the blocks of swapped KV that a plan attends to, those that are shared several times."""
    tables = [
        sequence.block_table[: -(-sequence.start // block_size)]
        for sequence in plan.sequences
        if sequence.tier.is_streamed
    ]
    return np.concatenate(tables) if tables else np.empty(0, np.int32)


def round_decodes(count: int) -> int:
    """Return 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 and so on: the next one that is not below `count`."""
    if count == 0:
        return 0
    step = 1 << max((count - 1).bit_length() - 2, 0)
    return -(-count // step) * step


def round_tokens(count: int) -> int:
    """Return the next number of tokens that there are graphs for."""
    step = max(TOKEN_STEP, 1 << max((count - 1).bit_length() - 5, 0))
    return -(-count // step) * step


def round_swapped(blocks: int) -> int:
    """Return for how many blocks of swapped KV there are graphs.

    What comes for nothing costs time on the bus: it is at most an eighth, if there are many.
    """
    step = max(MIN_BLOCKS, 1 << max((blocks - 1).bit_length() - 4, 0))
    return -(-blocks // step) * step


def _decodes(rows: Rows) -> Rows:
    return Rows(tuple(map(round_decodes, rows.decodes)), async_decodes=round_decodes(rows.async_decodes))


def _with_prompts(rows: Rows) -> Rows:
    *decodes, async_decodes = (
        max(_power_of_two(count), MIN_DECODES) if count else 0
        for count in (*rows.decodes, rows.async_decodes)
    )
    others = sum(decodes) + async_decodes
    prompts = round_tokens(others + rows.prompts) - others if rows.prompts else 0
    return Rows(tuple(decodes), prompts, async_decodes)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
