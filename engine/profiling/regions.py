"""Memory regions for measurements: enough of a KV pool, in shuffled runs, to exceed every cache."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from neo_desktop.engine.int_array import IntArray, IntView
from neo_desktop.engine.kv.layer import block_bytes, slots_of
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.kv.storage import KVPool, KVStorage, memory_of
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.profiling.hardware import last_level_cache_bytes
from neo_desktop.models.decoder import Decoder

GPU_REGION_BYTES = 256 * 1024**2  # several times the L2 cache of any GPU
TOY_REGION_BYTES = 8 * 1024**2
MIN_HOST_REGION_BYTES, MAX_HOST_REGION_BYTES = 64 * 1024**2, 1024**3
ROWS_AT_ONCE = 4096  # written at a time before the first measurement


@dataclass(frozen=True, slots=True)
class Region:
    """The blocks of a pool that measurements use, the same in a few of its layers.

    Consecutive turns use consecutive blocks, and wrap around at the end.
    """

    pool: KVPool
    layers: tuple[int, ...]
    order: Sequence[int]  # block numbers, with shuffled runs

    @property
    def num_tokens(self) -> int:
        """Tokens per layer."""
        return len(self.order) * BLOCK_SIZE

    def layer(self, number: int) -> int:
        """Return one of its layers, as a layer number of the model."""
        return self.layers[number % len(self.layers)]

    def pool_from(self, number: int) -> KVPool:
        """Return the pool with its layers repeated in place of the model's, `number` first."""
        num_layers = self.pool.parts[0].shape[0]
        return self.pool.with_layers(self.layer(number + index) for index in range(num_layers))

    def blocks(self, count: int, turn: int) -> Iterator[int]:
        """Return `count` blocks."""
        first = turn * count % len(self.order)
        return islice(cycle(self.order), first, first + count)

    def slots(self, tokens: int, turn: int) -> Tensor:
        """Return slots of whole blocks, except for the last block, [tokens] int64."""
        blocks = torch.tensor(list(self.blocks(-(-tokens // BLOCK_SIZE), turn)))
        return slots_of(blocks, BLOCK_SIZE)[:tokens]

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
    """Return how many blocks of a tier measurements use in each layer; 0 without a pool."""
    pool = storage.get(tier)
    if pool is None:
        return 0
    bytes_per_block = block_bytes(decoder.config, BLOCK_SIZE, pool.dtype)
    num_runs = max(_region_bytes(decoder, pool.device) // (BLOCKS_PER_RUN * bytes_per_block), 1)
    return min(pool.num_blocks, num_runs * BLOCKS_PER_RUN)


def choose_region(decoder: Decoder, storage: KVStorage, tier: KVTier) -> Region:
    """Choose layers and blocks of a tier's pool, or of a temporary pool, and write to them.

    The system maps memory that was never written to one shared page of zeros; reads would be as fast as a
    cache.
    """
    config, device = decoder.config, memory_of(tier, decoder.device)
    region_bytes, num_blocks = _region_bytes(decoder, device), measured_blocks(decoder, storage, tier)
    if num_blocks:
        pool = storage[tier]
    else:
        bytes_per_block = config.num_layers * block_bytes(config, BLOCK_SIZE, decoder.dtype)
        num_runs = min(max(region_bytes // 4 // (BLOCKS_PER_RUN * bytes_per_block), 1), 1024)
        num_blocks = num_runs * BLOCKS_PER_RUN
        pool = KVPool(config, num_blocks, BLOCK_SIZE, decoder.dtype, device, sinks=decoder.sinks)
    num_layers = max(region_bytes // (num_blocks * block_bytes(config, BLOCK_SIZE, pool.dtype)), 1)
    if len(set(config.layer_windows)) > 1:
        num_layers = max(num_layers, 8)  # both kinds of layers, in about their proportion
    num_layers = min(num_layers, config.num_layers)
    layers = tuple(i * config.num_layers // num_layers for i in range(num_layers))
    rows = torch.zeros(ROWS_AT_ONCE, config.num_kv_heads, config.head_dim, dtype=decoder.dtype, device=device)
    for layer in layers:
        for slots in torch.split(torch.arange(num_blocks * BLOCK_SIZE, device=device), ROWS_AT_ONCE):
            pool.layer(layer).write(rows[: len(slots)], rows[: len(slots)], slots)
    firsts = range(0, num_blocks, BLOCKS_PER_RUN)
    order = [
        block
        for first in random.Random(0).sample(firsts, len(firsts))
        for block in range(first, min(first + BLOCKS_PER_RUN, num_blocks))
    ]
    return Region(pool, layers, order)


def _region_bytes(decoder: Decoder, device: torch.device) -> int:
    """Return several times the cache size; less for toy models, to save time."""
    if device.type == "cuda":
        return GPU_REGION_BYTES
    wanted = min(max(3 * last_level_cache_bytes(), MIN_HOST_REGION_BYTES), MAX_HOST_REGION_BYTES)
    return min(wanted, max(decoder.nbytes, TOY_REGION_BYTES))
