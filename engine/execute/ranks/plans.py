"""Incremental encoding of plans for the other ranks.

A plan has the whole block table of every sequence. A request's table only grows while the request stays in
its tier, so the encoding sends only the new blocks. Only rank 0 chooses tokens. The others learn which rows
get a token, not how it is sampled, so that all ranks compute the same rows.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from neo_desktop.engine.batch import (
    BlockCopy,
    IterationPlan,
    IterationTiming,
    SamplingInput,
    ScheduledSequence,
    SubBatch,
)
from neo_desktop.engine.int_array import IntArray, IntView
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.sampling_params import SamplingParams

T = TypeVar("T")

MAX_TABLES = 4096  # remembered tables; other tables are sent as a whole
_SOMEHOW = SamplingInput(SamplingParams(), 0, 0, 0, IntArray().view(), IntArray().view())


class ToldSequence(NamedTuple):
    """The encoding of a `ScheduledSequence`."""

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    tier: KVTier
    num_known: int  # blocks of its table that were sent before
    new_blocks: bytes  # int32: the blocks after the known ones
    num_pooled: int
    is_sampled: bool  # True if a token is chosen


class ToldPlan(NamedTuple):
    """The encoding of an `IterationPlan`."""

    sub_batches: Sequence[Sequence[ToldSequence]]
    async_decodes: Sequence[Sequence[ToldSequence | None]]
    copies: tuple[BlockCopy, ...]
    predicted: IterationTiming


class PlanWriter:
    """Rank 0's encoder."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[str, KVTier], IntView] = OrderedDict()  # tables as last sent

    def told(self, plan: IterationPlan) -> ToldPlan:
        """Encode the next plan."""
        return ToldPlan(
            [[self._sequence(each) for each in batch.sequences] for batch in plan.sub_batches],
            [[each and self._sequence(each) for each in group] for group in plan.async_decodes],
            plan.copies,
            plan.predicted,
        )

    def _sequence(self, sequence: ScheduledSequence) -> ToldSequence:
        key, table = (sequence.request_id, sequence.tier), sequence.block_table
        known = self._tables.get(key)
        num_known = len(known) if known is not None and _extends(known, table) else 0
        _keep(self._tables, key, table)
        new_blocks = table[num_known:].tobytes()
        return ToldSequence(
            sequence.request_id,
            sequence.token_ids,
            sequence.start,
            sequence.tier,
            num_known,
            new_blocks,
            sequence.num_pooled,
            sequence.sampling is not None,
        )


class PlanReader:
    """The other ranks' decoder; it must receive every plan, in order."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[str, KVTier], IntArray] = OrderedDict()

    def plan(self, told: ToldPlan) -> IterationPlan:
        """Decode a plan; its sampling parameters are placeholders."""
        sub_batches = [SubBatch(tuple(self._sequences(batch))) for batch in told.sub_batches]
        return IterationPlan(
            tuple(sub_batches),
            told.copies,
            told.predicted,
            async_decodes=tuple(
                tuple(each and self._sequence(each) for each in group) for group in told.async_decodes
            ),
        )

    def _sequences(self, told: Iterable[ToldSequence]) -> Iterable[ScheduledSequence]:
        return (self._sequence(each) for each in told)

    def _sequence(self, told: ToldSequence) -> ScheduledSequence:
        key = told.request_id, told.tier
        table = self._tables.get(key) if told.num_known else None
        if table is None:
            table = IntArray()
        elif len(table) != told.num_known:
            raise ValueError(
                f"{told.num_known} blocks of {told.request_id} were told before, not {len(table)}"
            )
        if told.new_blocks:
            table.extend(np.frombuffer(told.new_blocks, np.int32))
        _keep(self._tables, key, table)
        return ScheduledSequence(
            told.request_id,
            told.token_ids,
            told.start,
            told.tier,
            table.view(),
            _SOMEHOW if told.is_sampled else None,
            num_pooled=told.num_pooled,
        )


def _extends(known: IntView, table: IntView) -> bool:
    """Return True if `table` extends `known`; a table in the same memory does, because it only grows."""
    is_same = known.base is not None and known.base is table.base and len(table) >= len(known)
    return is_same or np.array_equal(table[: len(known)], known)


def _keep(tables: OrderedDict[tuple[str, KVTier], T], key: tuple[str, KVTier], table: T) -> None:
    """Remember a table as the newest; encoder and decoder evict the same tables."""
    tables[key] = table
    tables.move_to_end(key)
    if len(tables) > MAX_TABLES:
        tables.popitem(last=False)
