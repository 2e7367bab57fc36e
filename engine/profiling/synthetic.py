"""Synthetic iterations: a few layers of a model, plans whose outputs are discarded, and memory for their KV.

Measurements read enough of a KV pool, in shuffled runs, to exceed every cache.
"""

import copy
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Self

import torch

from neo_desktop.engine.batch import IterationPlan, SamplingInput, ScheduledSequence, SubBatch
from neo_desktop.engine.int_array import IntArray, IntView
from neo_desktop.engine.kv.layer import block_bytes
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.profiling.hardware import last_level_cache_bytes
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.decoder import Decoder

GREEDY = SamplingParams(temperature=0.0)
ALL_SAMPLERS = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, logprobs=1)  # the sampler's longest path
GPU_REGION_BYTES = 256 * 1024**2  # several times the L2 cache of any GPU
TOY_REGION_BYTES = 8 * 1024**2
MIN_HOST_REGION_BYTES, MAX_HOST_REGION_BYTES = 64 * 1024**2, 1024**3
ROWS_AT_ONCE = 4096  # written at a time before the first measurement


def with_layers(decoder: Decoder, indices: Sequence[int]) -> Decoder:
    """Return a model of some of the layers, which shares the weights."""
    if list(indices) == list(range(decoder.config.num_layers)):
        return decoder
    part = copy.copy(decoder)
    part.layers = [decoder.layers[index] for index in indices]
    windows = tuple(decoder.config.layer_windows[index] for index in indices)
    part.config = replace(decoder.config, num_layers=len(indices), layer_windows=windows)
    return part


def sequence(
    index: int, tier: KVTier, start: int, tokens: int, table: IntView, params: SamplingParams | None
) -> ScheduledSequence:
    """Return `tokens` tokens of a request after `start` computed ones; without `params` none is chosen."""
    no_tokens = IntArray().view()
    sampling = None if params is None else SamplingInput(params, 0, 0, start + tokens, no_tokens, no_tokens)
    return ScheduledSequence(str(index), (0,) * tokens, start, tier, table, sampling)


def plan_of(sequences: Iterable[ScheduledSequence]) -> IterationPlan:
    """Return an iteration of one sub-batch."""
    return IterationPlan((SubBatch(tuple(sequences)),))


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
        rows = torch.zeros(pool.rows_shape(ROWS_AT_ONCE)[1:], dtype=decoder.dtype, device=pool.device)
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
