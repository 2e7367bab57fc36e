"""Memory regions for measurements: enough of a KV pool, in shuffled runs, to exceed every cache."""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Self

import torch

from neo_desktop.engine.int_array import IntArray, IntView
from neo_desktop.engine.kv.layer import block_bytes
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.profiling.hardware import last_level_cache_bytes
from neo_desktop.models.decoder import Decoder

GPU_REGION_BYTES = 256 * 1024**2  # several times the L2 cache of any GPU
TOY_REGION_BYTES = 8 * 1024**2
MIN_HOST_REGION_BYTES, MAX_HOST_REGION_BYTES = 64 * 1024**2, 1024**3
ROWS_AT_ONCE = 4096  # written at a time before the first measurement


@dataclass(frozen=True, slots=True)
class Region:
    """The blocks of a pool that measurements use.

    Consecutive turns use consecutive blocks, and wrap around at the end.
    """

    order: Sequence[int]  # block numbers, with shuffled runs

    @classmethod
    def of(cls, decoder: Decoder, pool: KVPool, layers: Collection[int]) -> Self:
        """Choose blocks of a pool, whose memory in these layers exceeds the caches, and write to them.

        The system maps memory that was never written to one shared page of zeros; reads would be as fast as a
        cache.
        """
        num_blocks = _num_blocks(decoder, pool, len(layers))
        rows = torch.zeros(ROWS_AT_ONCE, *pool.row_shape, dtype=decoder.dtype, device=pool.device)
        for layer in layers:
            for slots in torch.split(torch.arange(num_blocks * BLOCK_SIZE, device=pool.device), ROWS_AT_ONCE):
                pool.layer(layer).write(rows[: len(slots)], rows[: len(slots)], slots)
        firsts = range(0, num_blocks, BLOCKS_PER_RUN)
        runs = [range(first, min(first + BLOCKS_PER_RUN, num_blocks)) for first in firsts]
        random.Random(0).shuffle(runs)
        return cls([block for run in runs for block in run])

    @property
    def num_tokens(self) -> int:
        """Tokens per layer."""
        return len(self.order) * BLOCK_SIZE

    def blocks(self, count: int, turn: int) -> Iterator[int]:
        """Return `count` blocks."""
        first = turn * count % len(self.order)
        return islice(cycle(self.order), first, first + count)

    def tables(self, context_lens: Sequence[int], turn: int) -> list[IntView]:
        """Return block tables of requests, each on its own runs, as `BlockPool` allocates them."""
        widths = [-(-context_len // BLOCK_SIZE) for context_len in context_lens]
        taken = [-(-width // BLOCKS_PER_RUN) * BLOCKS_PER_RUN for width in widths]
        if sum(taken) > len(self.order):
            taken = widths  # too few runs: requests take single blocks, as in `BlockPool`
        blocks = self.blocks(sum(taken), turn)
        tables = [IntArray(islice(blocks, count)).view() for count in taken]
        return [table[:width] for table, width in zip(tables, widths, strict=True)]


def measured_blocks(decoder: Decoder, storage: KVStorage, tier: KVTier) -> int:
    """Return how many blocks of a tier measurements use at most; 0 without a pool."""
    pool = storage.get(tier)
    return 0 if pool is None else _num_blocks(decoder, pool, num_layers=1)


def stand_in_blocks(decoder: Decoder, device: torch.device) -> int:
    """Return the size of a small pool, for measurements of a tier that the policy lacks."""
    run_bytes = BLOCKS_PER_RUN * block_bytes(decoder.config, BLOCK_SIZE, decoder.dtype)
    num_runs = region_bytes(decoder, device) // 4 // (decoder.config.num_layers * run_bytes)
    return min(max(num_runs, 1), 1024) * BLOCKS_PER_RUN


def region_bytes(decoder: Decoder, device: torch.device) -> int:
    """Return several times the cache size; less for toy models, to save time."""
    if device.type == "cuda":
        return GPU_REGION_BYTES
    wanted = min(max(3 * last_level_cache_bytes(), MIN_HOST_REGION_BYTES), MAX_HOST_REGION_BYTES)
    return min(wanted, max(decoder.nbytes, TOY_REGION_BYTES))


def _num_blocks(decoder: Decoder, pool: KVPool, num_layers: int) -> int:
    run_bytes = num_layers * BLOCKS_PER_RUN * block_bytes(decoder.config, BLOCK_SIZE, pool.dtype)
    num_runs = max(region_bytes(decoder, pool.device) // run_bytes, 1)
    return min(pool.num_blocks, num_runs * BLOCKS_PER_RUN)
