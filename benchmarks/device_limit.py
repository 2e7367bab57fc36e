"""Decoding on one device, compared with that device's limit.

    python -m benchmarks.device_limit --shape llama-3.2-1b

An iteration of decodes reads all weights once and its requests' KV, and multiplies every weight once
per request. Reading limits small batches, arithmetic large ones. The limit is the longer of the two times, at
rates that are measured in between. rig.py defines the counts and timings.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import harmonic_mean
from typing import Any

import psutil
import torch

from benchmarks.checks import above_zero, at_least
from benchmarks.device_limit_report import DeviceReport, Measured, decode_figures, prefill_figures
from benchmarks.rig import Iteration, Rig, iteration_work
from benchmarks.shown import model_arguments, progress, show
from neo_desktop import native
from neo_desktop.app.bench.section import Spread
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN
from neo_desktop.engine.loading import LoadedModel, choose_device, load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.profiling.device_rates import CudaTimer, matrix_rate, read_rate
from neo_desktop.engine.profiling.hardware import cpu_name, last_level_cache_bytes
from neo_desktop.engine.profiling.host_rates import Host
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.setup import EngineParts, take_memory

TRACED_ITERATIONS = 4  # per batch and round, with a timeline, which costs a little
_RUN_TOKENS = BLOCKS_PER_RUN * BLOCK_SIZE  # blocks are allocated in runs while memory is free
_MOST_BYTES = 1 << 30  # beyond any cache; more would only take longer
_SAMPLE_BYTES = 256 << 20  # on a CPU: fewer are read several times in a row
_MATRIX_SIZE = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True, slots=True)
class DeviceOptions(EngineOptions):
    """Options of the measurement; the defaults are a thorough run.

    Raises ValueError for invalid sizes and times.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # requests that decode together
    context_tokens: int = 512  # of a prompt; decoding adds some
    iterations: int = 16  # per batch and round
    seconds: float = 60.0  # for all rounds; one is the minimum
    seed: int = 0  # of the prompts

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise ValueError(f"batches must be rising numbers from 1 on, got {self.batches}")
        at_least(self, 1, "context_tokens", "iterations")
        above_zero(self, "seconds")

    @property
    def longest_tokens(self) -> int:
        """Final tokens of the first request, which is in every batch of a round."""
        return self.context_tokens + len(self.batches) * (self.iterations + TRACED_ITERATIONS + 2) + 1

    @property
    def request_tokens(self) -> int:
        """Memory of a request, in whole runs of blocks."""
        return -(-self.longest_tokens // _RUN_TOKENS) * _RUN_TOKENS


def load_model(options: DeviceOptions) -> LoadedModel:
    """Load the model; raises ValueError if prompts and outputs exceed its context."""
    model = load(options)
    longest, most = options.longest_tokens, model.config.max_context_tokens
    if longest > most:
        raise ValueError(
            f"requests would grow to {longest} tokens, but {model.name} holds {most}: take shorter contexts "
            "or fewer iterations"
        )
    return model


def take_kv_memory(model: LoadedModel, options: DeviceOptions) -> EngineParts:
    """Allocate KV for the largest batch and one prompt, or as much as fits."""
    alone = replace(
        options,
        policy="gpu-only",
        cpu_cache_tokens=None,
        cpu_cache_dtype="auto",
        max_batch_requests=max(options.most_requests, options.batches[-1]),
    )
    # A prompt is computed alone; the batch's prompts stay in the cache meanwhile.
    wanted = (options.batches[-1] + 1) * options.request_tokens
    if options.gpu_cache_tokens is not None:
        wanted = min(wanted, options.gpu_cache_tokens)
    try:
        return take_memory(model, replace(alone, gpu_cache_tokens=wanted))
    except MemoryError:
        return take_memory(model, replace(alone, gpu_cache_tokens=None))


def fitting_batches(parts: EngineParts, options: DeviceOptions) -> tuple[int, ...]:
    """Return the batches that memory holds; raises MemoryError if the smallest does not fit."""
    capacity = parts.tokens_in(host_memory=False)
    batches = tuple(batch for batch in options.batches if batch <= capacity // options.request_tokens)
    if not batches:
        raise MemoryError(
            f"the KV of {options.batches[0]} requests of {options.longest_tokens} tokens does not fit: there "
            f"is room for {capacity} tokens; take shorter contexts or smaller batches"
        )
    return batches


@dataclass(frozen=True, slots=True)
class Processor:
    """Limits of the device that runs the model."""

    name: str  # for people
    # Rate of repeated plain reads of this many bytes, a gigabyte at most. Small sizes are read from a cache,
    # as an iteration's weights would be.
    read_gb_per_s: Callable[[int], float]
    matrix_gflop_per_s: Callable[[], float]  # of large square matrices in the model's dtype


def processor(streams: Streams, nbytes: int, dtype: torch.dtype) -> Processor:
    """Return the limits of torch's GPU, or the usable cores', for reads of up to `nbytes`."""
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


def run_device_limit(options: DeviceOptions, progress: Progress) -> Iterator[DeviceReport]:
    """Measure; yield the growing report after each batch of a round.

    Raises the errors of `Engine.from_pretrained`; ValueError if prompts and outputs exceed the model's
    context; RuntimeError if the engine fails.
    """
    progress(0.0, "loading the model")
    with ExitStack() as stack:
        yield from _Measurement(options, stack).run(progress)
    progress(1.0, "done")


class _Measurement:
    """The measurement and its report."""

    def __init__(self, options: DeviceOptions, stack: ExitStack) -> None:
        self._options = options
        device = choose_device(options.device)
        self._is_cuda = device.type == "cuda"
        self._model = load_model(options)
        decoder = self._model.decoder
        setup = take_kv_memory(self._model, options)
        self._batches = fitting_batches(setup, options)
        without_room = [str(batch) for batch in options.batches if batch not in self._batches]
        self._notes: tuple[str, ...] = ()
        if without_room:
            self._notes = (f"Left out for want of memory for KV: batch {', '.join(without_room)}.",)
        self._rig = Rig(setup, options.context_tokens, options.seed)
        stack.callback(self._rig.close)

        before = torch.cuda.memory_allocated() if self._is_cuda else 0
        self._processor = processor(self._model.streams, self._bytes(self._batches[-1]), decoder.dtype)
        self._processor.matrix_gflop_per_s()  # warm up, and allocate
        self._own_bytes = 0
        if self._is_cuda:
            self._own_bytes = torch.cuda.memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()

        self._prefills: list[list[Iteration]] = []
        self._prefill_read_gb_per_s: list[float] = []
        self._matrix_gflop_per_s: list[float] = []
        self._measured: dict[int, Measured] = {}
        self._process_bytes = 0

    def run(self, progress: Progress) -> Iterator[DeviceReport]:
        """Repeat rounds until the time is over, at least once."""
        options, rig = self._options, self._rig
        progress(0.0, "warming up")
        rig.prefill()
        rig.join(1)
        rig.decode(2)
        rig.leave()
        start = time.perf_counter()
        rounds, taken = 0, 0.0
        while rounds == 0 or taken * (rounds + 1) / rounds < options.seconds:
            share = min(taken / options.seconds, 1.0)
            progress(share, "prefill")
            self._prefill()
            yield self._report()
            running = 0
            for batch in self._batches:
                if rounds == 0 and running > 0:
                    left_s = options.seconds - (time.perf_counter() - start)
                    if self._leaves_out(batch, batch - running, left_s):
                        yield self._report()
                        break
                progress(share, f"decoding with batch {batch}")
                self._decode(batch)
                running = batch
                yield self._report()
            rig.leave()
            rounds += 1
            taken = time.perf_counter() - start

    def _prefill(self) -> None:
        self._matrix_gflop_per_s.append(self._processor.matrix_gflop_per_s())
        iterations = self._rig.prefill()
        self._prefill_read_gb_per_s.append(self._processor.read_gb_per_s(iterations[-1].work.nbytes))
        self._prefills.append(iterations)

    def _decode(self, batch: int) -> None:
        rig, nbytes = self._rig, self._bytes(batch)
        rig.join(batch)
        rig.decode(1)
        reads = [self._processor.read_gb_per_s(nbytes)]
        iterations = rig.decode(self._options.iterations)
        reads.append(self._processor.read_gb_per_s(nbytes))
        idle_share = rig.idle_share(TRACED_ITERATIONS)
        self._process_bytes = max(self._process_bytes, psutil.Process().memory_info().rss)

        measured = self._measured.setdefault(batch, Measured())
        measured.iterations += iterations
        measured.read_gb_per_s += reads
        measured.idle_shares.append(idle_share)

    def _leaves_out(self, batch: int, new_prompts: int, left_s: float) -> bool:
        """True, with a note, if the prompts of this batch would take longer than the time left."""
        seconds = new_prompts * sum(each.step_s for each in self._prefills[0])
        if seconds <= left_s:
            return False
        left_out = ", ".join(str(each) for each in self._batches if each >= batch)
        self._batches = tuple(each for each in self._batches if each < batch)
        self._notes += (
            f"Left out for want of time: batch {left_out}. The prompts of batch {batch} alone would take "
            f"about {seconds:.0f} s; allow more time or take shorter contexts.",
        )
        return True

    def _bytes(self, batch: int) -> int:
        """Bytes of the weights and of KV for this many prompts."""
        decoder = self._model.decoder
        context_lens = [self._options.context_tokens] * batch
        return iteration_work(decoder.config, decoder.dtype, context_lens, batch, batch).nbytes

    def _report(self) -> DeviceReport:
        decoder, matrix = self._model.decoder, Spread.of(self._matrix_gflop_per_s)
        return DeviceReport(
            model=self._model.name,
            device=decoder.device.type,
            device_name=self._processor.name,
            dtype=str(decoder.dtype).removeprefix("torch."),
            weight_bytes=iteration_work(decoder.config, decoder.dtype, [], 1, 1).nbytes,
            last_level_cache_bytes=0 if self._is_cuda else last_level_cache_bytes(),
            rounds=len(self._prefills),
            matrix_gflop_per_s=matrix,
            prefill=prefill_figures(
                self._prefills, Spread.of(self._prefill_read_gb_per_s).median, matrix.median
            ),
            decode=tuple(
                decode_figures(batch, measured, matrix.median) for batch, measured in self._measured.items()
            ),
            peak_gpu_bytes=torch.cuda.max_memory_allocated() - self._own_bytes if self._is_cuda else None,
            process_bytes=self._process_bytes,
            notes=self._notes,
        )


def short_options(device: str, **settings: Any) -> DeviceOptions:
    """Options for a run of 20 seconds; a CPU alone takes a second for a hundred tokens."""
    batches, context = ((1, 8, 32), 512) if choose_device(device).type == "cuda" else ((1, 4), 64)
    return DeviceOptions(device=device, batches=batches, context_tokens=context, seconds=20.0, **settings)


if __name__ == "__main__":
    given = model_arguments(__doc__).parse_args()
    show(
        run_device_limit(short_options(given.device, shape=given.shape, dtype=given.dtype), progress),
        given.json,
    )
