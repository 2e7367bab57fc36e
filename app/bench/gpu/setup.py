"""The model, and as much memory for KV as the batches need."""

from dataclasses import replace

from neo_desktop.app.bench.gpu.options import GpuOptions
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.loading import LoadedModel, load
from neo_desktop.engine.placement import Place
from neo_desktop.engine.setup import Setup, take_memory

_RUN_TOKENS = BLOCKS_PER_RUN * BLOCK_SIZE  # blocks are handed out in runs where there is room


def load_model(options: GpuOptions) -> LoadedModel:
    """Load it; ValueError where prompts and outputs do not fit into its context."""
    model = load(options)
    longest, most = options.longest_tokens, model.config.max_context_tokens
    if longest > most:
        raise ValueError(
            f"requests would grow to {longest} tokens, but {model.name} holds {most}: take shorter contexts "
            "or fewer iterations"
        )
    return model


def take_kv_memory(model: LoadedModel, options: GpuOptions) -> Setup:
    """Take what the largest batch needs and a prompt beside it, or as much as fits."""
    # A prompt is computed alone; those of the batches stay in the cache meanwhile.
    wanted = (options.batches[-1] + 1) * _request_tokens(options)
    if options.gpu_cache_tokens is not None:
        wanted = min(wanted, options.gpu_cache_tokens)
    try:
        return _take(model, options, wanted)
    except MemoryError:
        return _take(model, options, None)


def fitting_batches(setup: Setup, options: GpuOptions) -> tuple[tuple[int, ...], list[str]]:
    """Return the batches that the memory holds, and what to say about the others.

    Raises:
        MemoryError: there is no room for the smallest.
    """
    capacity = setup.num_blocks[Place.DEVICE] * BLOCK_SIZE
    most = capacity // _request_tokens(options)
    batches = tuple(batch for batch in options.batches if batch <= most)
    if not batches:
        raise MemoryError(
            f"the KV of {options.batches[0]} requests of {options.longest_tokens} tokens does not fit: there "
            f"is room for {capacity} tokens; take shorter contexts or smaller batches"
        )
    left_out = ", ".join(str(batch) for batch in options.batches if batch > most)
    notes = [f"Left out for want of memory for KV: batch {left_out}."] if left_out else []
    return batches, notes


def _take(model: LoadedModel, options: GpuOptions, tokens: int | None) -> Setup:
    alone = replace(
        options,
        policy="gpu-only",
        gpu_cache_tokens=tokens,
        cpu_cache_tokens=None,
        cpu_cache_dtype="auto",
        max_batch_requests=max(options.max_batch_requests, options.batches[-1]),
    )
    return take_memory(model, alone)


def _request_tokens(options: GpuOptions) -> int:
    return -(-options.longest_tokens // _RUN_TOKENS) * _RUN_TOKENS
