"""Which iterations are carried out by one graph."""

from dataclasses import dataclass
from typing import Self

import torch

from neo_desktop.engine.batch import IterationPlan, SubBatch
from neo_desktop.engine.placement import Place
from neo_desktop.models.config import ModelConfig

MAX_ROWS = 256  # of a sub-batch; iterations with more take long enough to be launched piece by piece
MIN_BLOCKS = 64  # in a row of a block table; shorter ones are not worth a graph of their own


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a sub-batch, padding included: first those with KV on the device."""

    device: int
    host: int

    @property
    def count(self) -> int:
        """All of them."""
        return self.device + self.host


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes that a graph is made for. Smaller iterations fill it up with rows that nobody reads.

    Padding costs less than a third of the rows, and rows of a decode cost little beside the weights.
    """

    sub_batches: tuple[Rows, ...]
    max_blocks: int  # of a row of the device's block tables

    @classmethod
    def of(cls, plan: IterationPlan) -> Self:
        """Return the bucket of a plan that consists of decodes alone."""
        max_blocks = max((len(s.block_table) for s in plan.sequences if s.place == Place.DEVICE), default=0)
        return cls(
            tuple(
                Rows(*(_round_up(_count(sub_batch, place)) for place in (Place.DEVICE, Place.HOST)))
                for sub_batch in plan.sub_batches
                if sub_batch.sequences
            ),
            _table_width(max_blocks),
        )


@dataclass(frozen=True, slots=True)
class Most:
    """The largest bucket: for what memory is taken."""

    rows: int  # of a sub-batch
    blocks: int  # of a row of the block tables

    @classmethod
    def of(cls, max_requests: int, max_context_tokens: int, block_size: int) -> Self:
        """Return what holds every iteration of decodes, up to MAX_ROWS requests."""
        return cls(_round_up(min(max_requests, MAX_ROWS)), _table_width(-(-max_context_tokens // block_size)))

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket.max_blocks <= self.blocks and all(
            max(rows.device, rows.host, rows.count) <= self.rows for rows in bucket.sub_batches
        )

    def device_bytes(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Return about what `Workspace` takes of the device's memory."""
        wide = 5 * config.hidden_size + config.qkv_rows + config.num_heads * config.head_dim
        per_row = 2 * wide + 3 * config.intermediate_size + 2 * config.vocab_size
        attention = config.num_heads * (config.head_dim + 1) * torch.float32.itemsize
        ints = 2 * (4 + self.blocks) * torch.int32.itemsize
        return self.rows * (per_row * dtype.itemsize + attention + ints)


def _table_width(num_blocks: int) -> int:
    return max(1 << (num_blocks - 1).bit_length(), MIN_BLOCKS) if num_blocks else 0


def _count(sub_batch: SubBatch, place: Place) -> int:
    return sum(sequence.place == place for sequence in sub_batch.sequences)


def _round_up(count: int) -> int:
    """Return 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 and so on: the next one that is not below `count`."""
    if count == 0:
        return 0
    step = 1 << max((count - 1).bit_length() - 2, 0)
    return -(-count // step) * step
