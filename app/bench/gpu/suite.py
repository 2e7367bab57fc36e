"""Rounds over all batches, with the device's own rates measured in between."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import torch

from neo_desktop.app.bench.gpu.report import GpuReport, Measured, decode_figures, prefill_figures
from neo_desktop.app.bench.gpu.rig import Iteration, Rig, iteration_work
from neo_desktop.app.bench.gpu.setup import (
    TRACED_ITERATIONS,
    GpuOptions,
    fitting_batches,
    load_model,
    processor,
    take_kv_memory,
)
from neo_desktop.app.bench.gpu_driver import GpuDriver, gpu_driver
from neo_desktop.app.bench.section import Spread
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.profiling.hardware import find_gpus, last_level_cache_bytes
from neo_desktop.engine.progress import Progress


def run_gpu(options: GpuOptions, progress: Progress) -> Iterator[GpuReport]:
    """Measure; yields the report again after each batch of each round.

    Raises what `Engine.from_pretrained` raises for a model, a device or memory; ValueError where prompts and
    outputs do not fit into the model's context, RuntimeError where the engine fails.
    """
    progress(0.0, "loading the model")
    with ExitStack() as stack:
        yield from _Measurement(options, stack).run(progress)
    progress(1.0, "done")


class _Measurement:
    """Everything that is measured, and the report of it."""

    def __init__(self, options: GpuOptions, stack: ExitStack) -> None:
        self._options = options
        device = choose_device(options.device)
        self._is_cuda = device.type == "cuda"
        self._driver: GpuDriver | None = None
        if self._is_cuda:
            uuid = torch.cuda.get_device_properties(device).uuid
            self._driver = stack.enter_context(gpu_driver(str(uuid)))
        self._state = None if self._driver is None else self._driver.state()  # before anything runs on it

        self._model = load_model(options)
        decoder = self._model.decoder
        setup = take_kv_memory(self._model, options)
        self._batches, notes = fitting_batches(setup, options)
        self._notes = [*_device_notes(options, self._is_cuda), *notes]
        self._rig = Rig(setup, options.context_tokens, options.seed)
        stack.callback(self._rig.close)

        before = torch.cuda.memory_allocated() if self._is_cuda else 0
        self._processor = processor(self._model.streams, self._bytes(self._batches[-1]), decoder.dtype)
        self._processor.matrix_gflop_per_s()  # to warm up, and to take its memory
        self._own_bytes = 0
        if self._is_cuda:
            self._own_bytes = torch.cuda.memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()

        self._prefills: list[list[Iteration]] = []
        self._prefill_read_gb_per_s: list[float] = []
        self._matrix_gflop_per_s: list[float] = []
        self._measured: dict[int, Measured] = {}
        self._process_bytes = 0

    def run(self, progress: Progress) -> Iterator[GpuReport]:
        """Go round until the time is over, once at least."""
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
        rig, nbytes, driver = self._rig, self._bytes(batch), self._driver
        rig.join(batch)
        rig.decode(1)
        reads = [self._processor.read_gb_per_s(nbytes)]
        joules_before = None if driver is None else driver.energy_j()
        iterations = rig.decode(self._options.iterations)
        joules_after = None if driver is None else driver.energy_j()
        reads.append(self._processor.read_gb_per_s(nbytes))
        idle_share = rig.idle_share(TRACED_ITERATIONS)
        self._process_bytes = max(self._process_bytes, psutil.Process().memory_info().rss)

        measured = self._measured.setdefault(batch, Measured())
        measured.iterations += iterations
        measured.read_gb_per_s += reads
        measured.idle_shares.append(idle_share)
        if joules_before is not None and joules_after is not None:
            measured.joules.append(joules_after - joules_before)

    def _leaves_out(self, batch: int, new_prompts: int, left_s: float) -> bool:
        """Whether computing the prompts of this batch would take longer than there is time; then say so."""
        seconds = new_prompts * sum(each.step_s for each in self._prefills[0])
        if seconds <= left_s:
            return False
        left_out = ", ".join(str(each) for each in self._batches if each >= batch)
        self._batches = tuple(each for each in self._batches if each < batch)
        self._notes.append(
            f"Left out for want of time: batch {left_out}. The prompts of batch {batch} alone would take "
            f"about {seconds:.0f} s; allow more time or take shorter contexts."
        )
        return True

    def _bytes(self, batch: int) -> int:
        """Weights, and KV of so many prompts."""
        decoder = self._model.decoder
        context_lens = [self._options.context_tokens] * batch
        return iteration_work(decoder.config, decoder.dtype, context_lens, batch, batch).nbytes

    def _report(self) -> GpuReport:
        decoder, matrix = self._model.decoder, Spread.of(self._matrix_gflop_per_s)
        return GpuReport(
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
            state=self._state,
            notes=tuple(self._notes),
        )


def _device_notes(options: GpuOptions, is_cuda: bool) -> list[str]:
    notes = []
    if not is_cuda and options.device == "cpu":
        notes.append("Device 'cpu' was asked for: the CPU computed the model, its limits are those shown.")
    elif not is_cuda:
        notes.append(
            f"No GPU that torch can use: {find_gpus()[1]}. The CPU computed the model, its limits are those "
            "shown."
        )
    if options.cpu_cache_tokens is not None or options.cpu_cache_dtype != "auto":
        notes.append("There is no CPU-cache in this suite: its settings had no effect.")
    return notes
