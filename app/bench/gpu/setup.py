"""What the suite measures, the model and the memory for it, and the rates of the device that it runs on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import harmonic_mean

import psutil
import torch

from neo_desktop import native
from neo_desktop.app.bench.checks import above_zero, at_least
from neo_desktop.app.bench.hardware.device import CudaTimer, matrix_rate, read_rate
from neo_desktop.app.bench.hardware.host import Host
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.loading import LoadedModel, load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.parts import EngineParts, take_memory
from neo_desktop.engine.profiling.hardware import cpu_name

TRACED_ITERATIONS = 4  # per batch and round, with a timeline: recording costs a little
_RUN_TOKENS = BLOCKS_PER_RUN * BLOCK_SIZE  # blocks are handed out in runs where there is room
_MOST_BYTES = 1 << 30  # beyond any cache: more would only take longer
_SAMPLE_BYTES = 256 << 20  # on a CPU: fewer are read several times in a row
_MATRIX_SIZE = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True, slots=True)
class GpuOptions(EngineOptions):
    """What to measure, and how much time to take; the defaults are a thorough run.

    Raises ValueError for sizes and times that make no sense.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # requests that decode together
    context_tokens: int = 512  # of each prompt; decoding adds some
    iterations: int = 16  # per batch and round
    seconds: float = 60.0  # for all rounds; at least one is made
    seed: int = 0  # of the prompts

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise ValueError(f"batches must be rising numbers from 1 on, got {self.batches}")
        at_least(self, 1, "context_tokens", "iterations")
        above_zero(self, "seconds")

    @property
    def longest_tokens(self) -> int:
        """What the first request grows to: it is there in every batch of a round."""
        return self.context_tokens + len(self.batches) * (self.iterations + TRACED_ITERATIONS + 2) + 1

    @property
    def request_tokens(self) -> int:
        """That much memory, in whole runs of blocks."""
        return -(-self.longest_tokens // _RUN_TOKENS) * _RUN_TOKENS


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


def take_kv_memory(model: LoadedModel, options: GpuOptions) -> EngineParts:
    """Take what the largest batch needs and a prompt beside it, or as much as fits."""
    alone = replace(
        options,
        policy="gpu-only",
        cpu_cache_tokens=None,
        cpu_cache_dtype="auto",
        max_batch_requests=max(options.max_batch_requests, options.batches[-1]),
    )
    # A prompt is computed alone; those of the batches stay in the cache meanwhile.
    wanted = (options.batches[-1] + 1) * options.request_tokens
    if options.gpu_cache_tokens is not None:
        wanted = min(wanted, options.gpu_cache_tokens)
    try:
        return take_memory(model, replace(alone, gpu_cache_tokens=wanted))
    except MemoryError:
        return take_memory(model, replace(alone, gpu_cache_tokens=None))


def fitting_batches(parts: EngineParts, options: GpuOptions) -> tuple[tuple[int, ...], list[str]]:
    """Return the batches that the memory holds, and what to say about the others.

    Raises:
        MemoryError: there is no room for the smallest.
    """
    capacity = parts.tokens_in(host_memory=False)
    most = capacity // options.request_tokens
    batches = tuple(batch for batch in options.batches if batch <= most)
    if not batches:
        raise MemoryError(
            f"the KV of {options.batches[0]} requests of {options.longest_tokens} tokens does not fit: there "
            f"is room for {capacity} tokens; take shorter contexts or smaller batches"
        )
    left_out = ", ".join(str(batch) for batch in options.batches if batch > most)
    return batches, [f"Left out for want of memory for KV: batch {left_out}."] if left_out else []


@dataclass(frozen=True, slots=True)
class Processor:
    """The device that the model runs on, by itself: what limits the model."""

    name: str  # for people
    # Of plain reads of so many bytes, again and again; a gigabyte at most. What fits into a cache is read from
    # there, as an iteration's weights would be.
    read_gb_per_s: Callable[[int], float]
    matrix_gflop_per_s: Callable[[], float]  # of large square matrices in the model's dtype


def processor(streams: Streams, nbytes: int, dtype: torch.dtype) -> Processor:
    """Take the memory for reads of up to `nbytes`: all usable cores of the CPU, or the GPU that torch uses."""
    name, nbytes = str(dtype).removeprefix("torch."), min(nbytes, _MOST_BYTES)
    if streams.device.type == "cuda":
        timer = CudaTimer(streams, nbytes, _MATRIX_SIZE["cuda"])
        return Processor(
            timer.name,
            lambda wanted: read_rate(timer, min(wanted, timer.memory_bytes)).giga_per_s(),
            matrix_rate(timer, _MATRIX_SIZE["cuda"], name).giga_per_s,
        )
    host = Host(max(min(nbytes, psutil.virtual_memory().available // 4), 1))

    def read_gb_per_s(wanted: int) -> float:
        part = min(wanted, host.nbytes)
        threads = native.default_num_threads()
        host.read_gb_per_s(threads, part)  # into the cache, if it fits
        return harmonic_mean(
            [host.read_gb_per_s(threads, part) for _ in range(max(1, _SAMPLE_BYTES // part))]
        )

    return Processor(cpu_name(), read_gb_per_s, partial(host.matrix_gflop_per_s, _MATRIX_SIZE["cpu"], name))
