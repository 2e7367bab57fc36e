"""Where the rows of an iteration lie, and the sizes that graphs are made for.

A sub-batch's rows are its tokens. Decodes of each place come first, then the chunks of prompts:

    | decodes of place 0 | decodes of place 1 | staggered | chunk a | chunk b | ...

Staggered decodes are rows of sub-batch 0. Such a row is a slot: in each stage it is of the decode that stands
there. Each part may have padding behind it, which nobody reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
from numpy.typing import NDArray

from neo_desktop.engine.batch import MAX_STAGGERED, Cohort, IterationPlan, ScheduledSequence, SubBatch
from neo_desktop.engine.placement import Place

MAX_DECODES = 256  # of a place in a graph; more take long enough to be launched piece by piece
MIN_BLOCKS = 64  # in a row of a graph's block table; shorter ones are not worth a graph of their own
MIN_DECODES = 8  # of a place beside prompts, likewise
TOKEN_STEP = 64  # by which iterations with prompts grow; of large ones a sixteenth


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows the parts of a sub-batch have, padding included."""

    decodes: tuple[int, ...]  # of each place
    prompts: int = 0  # tokens
    staggered: int = 0  # slots

    @property
    def count(self) -> int:
        """All of them."""
        return self.first_prompt + self.prompts

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the decodes of each place begin, and after them the staggered ones."""
        return tuple(accumulate(self.decodes, initial=0))

    @property
    def first_prompt(self) -> int:
        """Where prompts begin."""
        return sum(self.decodes) + self.staggered

    @property
    def of_staggered(self) -> slice:
        """Return the rows of staggered decodes."""
        return slice(self.starts[-1], self.first_prompt)

    def decodes_of(self, place: int) -> slice:
        """Return the rows of a place's decodes."""
        start = self.starts[place]
        return slice(start, start + self.decodes[place])


@dataclass(frozen=True, slots=True)
class Members:
    """The sequences of a sub-batch, in the order of its rows."""

    decodes: tuple[tuple[ScheduledSequence, ...], ...]  # by place
    prompts: tuple[ScheduledSequence, ...]
    staggered: tuple[Cohort, ...] = ()  # by stage

    @classmethod
    def of(cls, sub_batch: SubBatch, places: Sequence[Place], staggered: tuple[Cohort, ...] = ()) -> Self:
        """Sort the sequences of a sub-batch, and of those that join it."""
        decodes: dict[Place, list[ScheduledSequence]] = {place: [] for place in places}
        prompts: list[ScheduledSequence] = []
        for sequence in sub_batch.sequences:
            (decodes[sequence.place] if sequence.is_decode else prompts).append(sequence)
        prompts.sort(key=lambda sequence: places.index(sequence.place))  # stable: otherwise as planned
        return cls(tuple(map(tuple, decodes.values())), tuple(prompts), staggered)

    @classmethod
    def of_all(cls, plan: IterationPlan, places: Sequence[Place]) -> list[Self]:
        """Sort the sequences of a plan's sub-batches, without those in which there is nobody."""
        first, *others = plan.sub_batches
        of_first = [cls.of(first, places, plan.staggered)] if first.sequences or plan.staggered else []
        return of_first + [cls.of(each, places) for each in others if each.sequences]

    @property
    def rows(self) -> Rows:
        """The rows without padding."""
        prompts = sum(len(s.token_ids) for s in self.prompts)
        return Rows(tuple(map(len, self.decodes)), prompts, len(self.staggered[0]) if self.staggered else 0)

    def placed(self, rows: Rows) -> Iterator[tuple[ScheduledSequence, int]]:
        """Yield all sequences, each with its first row; of staggered ones those at the last stage."""
        for start, sequences in zip(rows.starts, self.decodes, strict=False):
            yield from zip(sequences, range(start, start + len(sequences)), strict=True)
        for row, ending in enumerate(self.staggered[-1] if self.staggered else (), rows.starts[-1]):
            if ending is not None:
                yield ending, row
        row = rows.first_prompt
        for sequence in self.prompts:
            yield sequence, row
            row += len(sequence.token_ids)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes of an iteration, as far as memory and graphs depend on them."""

    sub_batches: tuple[Rows, ...]
    max_blocks: int  # of a row of the block tables of decodes that the device attends for
    has_copies: bool = False  # whether blocks move, so that layers have to wait for them
    swapped_blocks: int = 0  # so many of the first come to the device in each layer

    @classmethod
    def of(
        cls, plan: IterationPlan, members: Sequence[Members], places: Sequence[Place], block_size: int
    ) -> Self:
        """Return the exact sizes of a plan, whose sub-batches that are not empty have these members."""
        tables = (
            len(sequence.block_table)
            for each in members
            for place, sequences in zip(places, each.decodes, strict=True)
            if not place.host_attends
            for sequence in sequences
        )
        swapped = swapped_blocks(plan, block_size)
        rows = tuple(each.rows for each in members)
        return cls(rows, max(tables, default=0), bool(plan.copies), int(swapped.max(initial=-1)) + 1)

    def rounded(self) -> "Bucket":
        """Return the sizes of the graphs that serve this iteration and many like it.

        Among decodes alone padding costs less than a third of the rows, which cost little beside the weights.
        Beside prompts rows cost more: all of them are rounded by a sixteenth at most, if they are many.
        """
        has_prompts = any(rows.prompts for rows in self.sub_batches)
        table = self.max_blocks
        return Bucket(
            tuple(_with_prompts(rows) if has_prompts else _decodes(rows) for rows in self.sub_batches),
            max(_power_of_two(table), MIN_BLOCKS) if table else 0,
            self.has_copies,
            round_swapped(self.swapped_blocks),
        )

    @property
    def is_whole(self) -> bool:
        """Whether one graph can hold the iteration: nothing in it depends on more than these sizes."""
        return not self.has_copies and not any(rows.prompts for rows in self.sub_batches)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest iteration that memory is kept for."""

    tokens: int  # rows of sub-batch 0
    decodes: int  # rows of a place in a sub-batch; also all rows of sub-batch 1
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
        tokens = round_tokens(max_tokens + 2 * MIN_DECODES + MAX_STAGGERED)
        return cls(max(tokens, decodes), decodes, _power_of_two(-(-max_context_tokens // block_size)))


def swapped_blocks(plan: IterationPlan, block_size: int) -> NDArray[np.int32]:
    """Return the blocks of swapped KV that a plan attends to, those that are shared several times."""
    tables = [
        sequence.block_table[: -(-sequence.start // block_size)]
        for sequence in plan.sequences
        if sequence.place.is_swapped
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
    return Rows(tuple(map(round_decodes, rows.decodes)), staggered=round_decodes(rows.staggered))


def _with_prompts(rows: Rows) -> Rows:
    *decodes, staggered = (
        max(_power_of_two(count), MIN_DECODES) if count else 0 for count in (*rows.decodes, rows.staggered)
    )
    others = sum(decodes) + staggered
    prompts = round_tokens(others + rows.prompts) - others if rows.prompts else 0
    return Rows(tuple(decodes), prompts, staggered)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
