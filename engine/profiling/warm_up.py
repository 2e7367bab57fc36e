"""Measures the GPU memory of iterations beside weights and KV: it runs the largest ones.

The first iterations also allocate lasting memory: kernels are compiled and loaded, and libraries initialise.
So they run after the weights are loaded, with a KV cache of a few blocks. The memory that is free afterwards
is truly free.

    weights | kernels, libraries | peak of an iteration, freed again |    free    |
                                                                         ^ KV, and peaks of iterations

A single layer per kind is enough: layers reuse the same memory. Kinds differ in their attention, and in the
part of their matrices that is in host memory.
"""

from collections.abc import Iterator, Sequence

import torch

from neo_desktop.engine.batch import IterationPlan, ScheduledSequence
from neo_desktop.engine.cuda.errors import is_short_of_memory
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.cuda.workspaces import clear_workspaces
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.layout import MAX_DECODES
from neo_desktop.engine.execute.recurrent import allocate_states
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv.streamed import make_pool
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.profiling.synthetic import ALL_SAMPLERS, plan_of, sequence, with_layers
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.traced.decoder import TracedDecoder

NUM_BLOCKS = 4 * BLOCKS_PER_RUN  # per tier; all requests share them, because the outputs are discarded


class Gauge:
    """Reads torch's allocator, which serves all memory of an iteration."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> int:
        """Free unused memory, return the allocated bytes and restart the peak of `most`."""
        clear_workspaces(self._device)
        return_memory()
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(torch.cuda.memory_reserved(self._device))

    def most(self) -> int:
        """Return the peak of allocated bytes since `begin`."""
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device))


def warm_up(
    decoder: Decoder, tiers: Sequence[KVTier], limits: SchedulerLimits, streams: Streams, gauge: Gauge
) -> int:
    """Run the largest iterations; return their peak memory in bytes, beside weights and KV.

    Raises:
        MemoryError: they do not fit.
    """
    before = gauge.begin()
    try:
        _carry_out(_one_layer_of_each_kind(decoder), tiers, limits, streams)
    except (MemoryError, RuntimeError) as error:
        if not is_short_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
    else:
        taken = gauge.most() - before
        gauge.begin()
        return taken
    gauge.begin()  # the error held frames, and these held tensors
    raise MemoryError(
        f"with the weights loaded, the GPU has too little memory for iterations of {limits.max_batch_tokens} "
        "tokens: close other programs, choose a smaller model or smaller iterations (max_batch_tokens) "
        f"({reason})"
    )


def _carry_out(decoder: Decoder, tiers: Sequence[KVTier], limits: SchedulerLimits, streams: Streams) -> None:
    with streams.on_device():
        storage = KVStorage(
            {
                tier: make_pool(
                    tier, decoder.config, NUM_BLOCKS, decoder.dtype, decoder.device, decoder.sinks
                )
                for tier in tiers
            },
            allocate_states(decoder.config, 1, decoder.device),
        )
    executor = build_executor(
        decoder, storage, limits.max_batch_tokens, limits.max_batch_requests, None, streams
    )
    try:
        for plan in _largest_plans(tiers, limits, decoder.config.max_context_tokens):
            executor.execute(plan)
            if isinstance(decoder, TracedDecoder):  # its graphs reserve memory for its tensors
                executor.execute(plan)
    finally:
        executor.close()


def _largest_plans(
    tiers: Sequence[KVTier], limits: SchedulerLimits, max_context_tokens: int
) -> Iterator[IterationPlan]:
    """Yield many prompts at once, chunks of a long prompt, and for each tier as many decodes as possible."""
    tokens, requests = limits.max_batch_tokens, limits.max_batch_requests
    for tier in tiers:
        each = min(tokens // requests, max_context_tokens)
        yield plan_of(_sequence(index, tier, 0, each) for index in range(requests))
        chunk = min(tokens, max_context_tokens)
        yield plan_of([_sequence(0, tier, 0, chunk)])
        yield plan_of([_sequence(0, tier, min(chunk, max_context_tokens - chunk), chunk)])
    # A graph in its second run: the first run only executes the work piece by piece.
    context = min(max_context_tokens, NUM_BLOCKS * BLOCK_SIZE) - 1
    rows = min(requests, MAX_DECODES)
    decodes = [_sequence(index, tiers[index % len(tiers)], context, 1) for index in range(rows)]
    decodes.sort(key=lambda sequence: tiers.index(sequence.tier))
    for _ in range(2):
        yield plan_of(decodes)


def _sequence(index: int, tier: KVTier, start: int, tokens: int) -> ScheduledSequence:
    num_blocks = -(-(start + tokens) // BLOCK_SIZE)
    table = IntArray((index + number) % NUM_BLOCKS for number in range(num_blocks)).view()
    return sequence(index, tier, start, tokens, table, ALL_SAMPLERS)


def _one_layer_of_each_kind(decoder: Decoder) -> Decoder:
    if isinstance(decoder, TracedDecoder):
        return decoder  # its stages are one piece
    windows = decoder.config.layer_windows
    kinds = [
        (window, *(m.resident_rows if isinstance(m, OffloadedLinear) else None for m in weights.linears()))
        for window, weights in zip(windows, decoder.layers, strict=True)
    ]
    return with_layers(decoder, [kinds.index(kind) for kind in dict.fromkeys(kinds)])
