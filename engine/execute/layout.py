"""Where the rows of an iteration lie, and the sizes that graphs are made for.

A sub-batch's rows are its tokens. Decodes of each place come first, then the chunks of prompts:

    | decodes of place 0 | decodes of place 1 | chunk a | chunk b | ...

Each part may have padding behind it, which nobody reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from neo_desktop.engine.batch import IterationPlan, ScheduledSequence, SubBatch
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

    @property
    def count(self) -> int:
        """All of them."""
        return sum(self.decodes) + self.prompts

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the decodes of each place begin, and after them the prompts."""
        return tuple(accumulate(self.decodes, initial=0))

    def decodes_of(self, place: int) -> slice:
        """Return the rows of a place's decodes."""
        start = self.starts[place]
        return slice(start, start + self.decodes[place])


@dataclass(frozen=True, slots=True)
class Members:
    """The sequences of a sub-batch, in the order of its rows."""

    decodes: tuple[tuple[ScheduledSequence, ...], ...]  # by place
    prompts: tuple[ScheduledSequence, ...]

    @classmethod
    def of(cls, sub_batch: SubBatch, places: Sequence[Place]) -> Self:
        """Sort a sub-batch's sequences."""
        decodes: dict[Place, list[ScheduledSequence]] = {place: [] for place in places}
        prompts: list[ScheduledSequence] = []
        for sequence in sub_batch.sequences:
            (decodes[sequence.place] if sequence.is_decode else prompts).append(sequence)
        prompts.sort(key=lambda sequence: places.index(sequence.place))  # stable: otherwise as planned
        return cls(tuple(map(tuple, decodes.values())), tuple(prompts))

    @property
    def rows(self) -> Rows:
        """The rows without padding."""
        return Rows(tuple(map(len, self.decodes)), sum(len(s.token_ids) for s in self.prompts))

    def placed(self, rows: Rows) -> Iterator[tuple[ScheduledSequence, int]]:
        """Yield all sequences, each with its first row."""
        for start, sequences in zip(rows.starts, self.decodes, strict=False):
            yield from zip(sequences, range(start, start + len(sequences)), strict=True)
        row = rows.starts[-1]
        for sequence in self.prompts:
            yield sequence, row
            row += len(sequence.token_ids)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes of an iteration, as far as memory and graphs depend on them."""

    sub_batches: tuple[Rows, ...]
    max_blocks: int  # of a row of the block tables of decodes that the device attends for
    has_copies: bool = False  # whether blocks move, so that layers have to wait for them

    @classmethod
    def of(cls, plan: IterationPlan, members: Sequence[Members], places: Sequence[Place]) -> Self:
        """Return the exact sizes of a plan, whose sub-batches that are not empty have these members."""
        tables = (
            len(sequence.block_table)
            for each in members
            for place, sequences in zip(places, each.decodes, strict=True)
            if not place.host_attends
            for sequence in sequences
        )
        return cls(tuple(each.rows for each in members), max(tables, default=0), bool(plan.copies))

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
        tokens = round_tokens(max_tokens + 2 * MIN_DECODES)
        return cls(max(tokens, decodes), decodes, _power_of_two(-(-max_context_tokens // block_size)))


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


def _decodes(rows: Rows) -> Rows:
    return Rows(tuple(map(round_decodes, rows.decodes)))


def _with_prompts(rows: Rows) -> Rows:
    decodes = tuple(max(_power_of_two(count), MIN_DECODES) if count else 0 for count in rows.decodes)
    prompts = round_tokens(sum(decodes) + rows.prompts) - sum(decodes) if rows.prompts else 0
    return Rows(decodes, prompts)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
