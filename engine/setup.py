"""Model, limits and memory together: what an engine is made of, and what a measurement needs of it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from neo_desktop import native
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.ladder import ladder
from neo_desktop.engine.loading import LoadedModel, Progress, choose_cpu_cache_dtype, load
from neo_desktop.engine.placement import Place
from neo_desktop.engine.profiling.budget import BLOCK_SIZE, FreeMemory, MemoryCaps, pool_blocks
from neo_desktop.engine.profiling.warm_up import TorchGauge, warm_up
from neo_desktop.engine.schedule.scheduler import SchedulerLimits

logger = logging.getLogger(__name__)

MAX_BATCH_REQUESTS = 256
MAX_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}  # a chunk of prefill must not hold decodes up for long


@dataclass(frozen=True, slots=True)
class Setup:
    """A loaded model and the memory for its KV."""

    model: LoadedModel
    limits: SchedulerLimits
    num_blocks: dict[Place, int]  # of the places asked for
    storage: KVStorage


def set_up(
    model: str | Path,
    *,
    device: str,
    dtype: str,
    shape: str | None,
    places: Sequence[Place],
    cache_tokens: Mapping[Place, int | None],
    caps: MemoryCaps,
    cpu_cache_dtype: str = "auto",
    gpu_slice: int | None = None,
    max_batch_tokens: int | None = None,
    max_batch_requests: int = MAX_BATCH_REQUESTS,
    progress: Progress | None = None,
) -> Setup:
    """Load a model and take the memory for its KV; see `Engine.from_pretrained` for arguments and errors."""
    asked_dtype = choose_cpu_cache_dtype(cpu_cache_dtype)
    if asked_dtype is not None and not any(place.in_host_memory for place in places):
        raise ValueError(
            f"the CPU-cache was asked for in {cpu_cache_dtype}, but with this policy there is none"
        )
    loaded = load(
        model, device=device, dtype=dtype, shape=shape, gpu_slice=gpu_slice, caps=caps, progress=progress
    )
    return take_memory(
        loaded,
        places=places,
        cache_tokens=cache_tokens,
        caps=caps,
        cpu_cache_dtype=asked_dtype,
        max_batch_tokens=max_batch_tokens,
        max_batch_requests=max_batch_requests,
    )


def take_memory(
    loaded: LoadedModel,
    *,
    places: Sequence[Place],
    cache_tokens: Mapping[Place, int | None],
    caps: MemoryCaps,
    cpu_cache_dtype: torch.dtype | None = None,
    max_batch_tokens: int | None = None,
    max_batch_requests: int = MAX_BATCH_REQUESTS,
) -> Setup:
    """Take the memory for the KV of a loaded model; several may be taken, one after the other.

    On a GPU the largest iterations run first: what is free then is divided.

    Args:
        cpu_cache_dtype: of KV in host memory; None: the model's.

    Raises:
        MemoryError: there is no room.
    """
    decoder = loaded.decoder
    if any(place.host_attends for place in places):
        bind_threads()
    if decoder.device.type == "cuda":
        native.set_default_num_threads(native.num_threads_beside_gpu())
    limits = SchedulerLimits(
        max_batch_tokens=max_batch_tokens or max(MAX_BATCH_TOKENS[decoder.device.type], max_batch_requests),
        max_batch_requests=max_batch_requests,
    )
    iteration_bytes = None
    if decoder.device.type == "cuda":
        gauge = TorchGauge(decoder.device)
        iteration_bytes = warm_up(decoder, places, limits, loaded.streams, gauge)
        logger.debug("iterations take up to %d MiB of GPU memory beside KV", iteration_bytes >> 20)
    free = FreeMemory.now(decoder.device, iteration_bytes)
    fitting = pool_blocks(
        loaded.config, decoder.dtype, limits, decoder.device, cache_tokens, caps, cpu_cache_dtype, free
    )
    num_blocks = {place: fitting[place] for place in places}
    if not any(num_blocks.values()):
        raise MemoryError(
            f"there is no room for KV: it needs at least {BLOCK_SIZE} tokens of "
            f"{' or '.join(place.title for place in places)}"
        )
    with loaded.streams.on_device():  # memory stays with the stream that it was taken on
        pools = {
            place: KVPool(
                loaded.config,
                count,
                BLOCK_SIZE,
                (cpu_cache_dtype if place.in_host_memory else None) or decoder.dtype,
                place.torch_device(decoder.device),
            )
            for place, count in num_blocks.items()
        }
    return Setup(loaded, limits, num_blocks, KVStorage(pools))


def bind_threads() -> None:
    """Let threads of CPU attention stay on a core each, as far as the ladder and the system allow it."""
    wanted = ladder.rung("affinity") == "bound"
    if not native.bind_threads(wanted) and wanted:
        ladder.limit("affinity", "free", "the system refuses to bind threads to cores")
