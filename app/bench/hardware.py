"""Suite `hardware`: the rates of this computer's processors and memories, and of the ways between them.

They bound everything else: decoding reads weights and KV, prefill multiplies matrices, offloading crosses the
bus and waits for the CPU. host_rates.py, device_rates.py and engine/profiling/offload.py hold the timed work.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from neo_desktop import native
from neo_desktop.app.bench.device_rates import (
    CudaTimer,
    Direction,
    Rate,
    fitting_sizes,
    matrix_rate,
    read_rate,
)
from neo_desktop.app.bench.host_rates import Host, bytes_beyond_caches, native_dtypes
from neo_desktop.app.bench.options import BenchOptions, HardwareOptions
from neo_desktop.app.bench.section import Section, Spread, Table
from neo_desktop.app.bench.words import many, say
from neo_desktop.app.words import binary_size
from neo_desktop.engine.cuda.streams import open_streams
from neo_desktop.engine.execute.backend import Backend, open_backend
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.profiling.hardware import find_gpus, last_level_cache_bytes
from neo_desktop.engine.profiling.offload import round_trip_s
from neo_desktop.engine.progress import Progress

LEAST_ROUNDS = 3
_OFFLOADS = {
    "graph": "hand-off in a graph (decodes)",
    "streams": "hand-off on streams (with prompts)",
    "threads": "hand-off, imitated by threads",
}
_WAYS = {
    "host to GPU": (Direction.TO_DEVICE,),
    "GPU to host": (Direction.TO_HOST,),
    "both ways together": tuple(Direction),
}


@dataclass(frozen=True, slots=True)
class Figure:
    what: str  # "host reads"
    of: str  # "2 threads"
    unit: str
    value: Spread


@dataclass(frozen=True, slots=True)
class HardwareReport:
    rounds: int  # repetitions per measurement
    memory_bytes: int  # host memory that reads and copies go over
    last_level_cache_bytes: int  # of the first core; 0: the system does not say
    huge_pages: bool  # the system agreed to them
    isa: str  # of the kernels
    torch_threads: int  # of matrix products on the CPU
    gpu_name: str  # empty: there is no GPU
    gpu_note: str  # why there is none
    gpu_memory_bytes: int  # that reads and copies go over
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
    suite: Literal["hardware"] = "hardware"

    def best(self, what: str, lowest: bool = False) -> Figure | None:
        found = [each for each in self.figures if each.what == what]
        choose = min if lowest else max
        return choose(found, key=lambda each: each.value.median, default=None)

    def section(self) -> Section:
        columns = {"what": "what", "with": "of", "median (p10 - p90)": "value", "unit": "unit"}
        title, summary, *notes = say("hardware", report=self)
        tables = (Table.of("", self.figures, columns),)
        return Section(title, summary, tables, (*notes, *self.notes))


@dataclass(slots=True)
class Measurement:
    what: str
    of: str
    unit: str
    measure: Callable[[], float]
    samples: list[float] = field(default_factory=list)


def doubling(cores: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and the number of cores itself."""
    return (*(1 << i for i in range(cores.bit_length()) if 1 << i < cores), cores)


def rounds(work: list[Measurement], seconds: float, progress: Progress) -> Iterator[int]:
    """Make all once without counting them, then in turn, again and again, for about this time.

    So a disturbance hits a few repetitions of every measurement, and not every repetition of one.
    Yields after each round.
    """
    for each in work:
        progress(0.0, f"warming up: {each.what}")
        each.measure()
    start = time.perf_counter()
    round_seconds, done = 0.0, 0
    while done < LEAST_ROUNDS or round_seconds * (done + 1) < seconds:
        share = done * round_seconds / max(seconds, LEAST_ROUNDS * round_seconds)
        new = []
        for each in work:
            progress(share, each.what)
            new.append(each.measure())
        for each, value in zip(work, new, strict=True):
            each.samples.append(value)
        done += 1
        round_seconds = (time.perf_counter() - start) / done
        yield done


def run_hardware(bench: BenchOptions, progress: Progress) -> Iterator[HardwareReport]:
    """Measure; yields the report again after each round of repetitions.

    Raises MemoryError where the host has no memory for it, and what `open_streams` raises.
    """
    progress(0.0, "taking memory")
    options = bench.hardware
    streams = open_streams(choose_device("auto"), bench.gpu_slice)
    timer: CudaTimer | None = None
    sizes: tuple[int, ...] = ()
    if streams.device.type == "cuda":
        sizes = fitting_sizes(options.gpu_matrix_sizes)
        most_matrix, most_transfer = (max(each, default=0) for each in (sizes, options.transfer_bytes))
        timer = CudaTimer(streams, options.gpu_memory_bytes, most_matrix, most_transfer)
    nbytes = bytes_beyond_caches() if options.memory_bytes is None else options.memory_bytes
    try:
        host = Host(nbytes)
    except RuntimeError as error:  # torch's own for memory that the system refuses
        raise MemoryError(
            f"{binary_size(nbytes)} of host memory are not free: close other programs, or measure with less"
        ) from error
    with ExitStack() as stack:
        work = list(_of_host(host, options))
        if timer is not None:
            work += _of_gpu(timer, sizes, options.transfer_bytes)
        for way in ("threads",) if timer is None else ("streams", "graph"):
            backend = stack.enter_context(closing(open_backend(streams)))
            for each in options.offload_bytes:
                measure = partial(_offload_us, streams.device, backend, each, in_graph=way == "graph")
                work.append(Measurement(_OFFLOADS[way], binary_size(each), "us", measure))
        for done in rounds(work, options.seconds, progress):
            yield HardwareReport(
                rounds=done,
                memory_bytes=host.nbytes,
                last_level_cache_bytes=last_level_cache_bytes(),
                huge_pages=host.huge_pages,
                isa=native.default_isa(),
                torch_threads=torch.get_num_threads(),
                gpu_name="" if timer is None else timer.name,
                gpu_note="" if timer is not None else find_gpus()[1],
                gpu_memory_bytes=0 if timer is None else timer.memory_bytes,
                figures=tuple(Figure(m.what, m.of, m.unit, Spread.of(m.samples)) for m in work),
                notes=tuple(
                    f"Matrix products of {n} x {n} were left out: too little GPU memory is free."
                    for n in options.gpu_matrix_sizes
                    if timer is not None and n not in sizes
                ),
            )
    progress(1.0, "done")


def _offload_us(device: torch.device, backend: Backend, nbytes: int, *, in_graph: bool) -> float:
    return round_trip_s(device, backend, nbytes, in_graph=in_graph) * 1e6


def _of_host(host: Host, options: HardwareOptions) -> Iterator[Measurement]:
    """Yield GB/s of reads and copies, GFLOP/s of multiply-adds and of matrix products."""
    for threads in options.threads or doubling(native.num_usable_cpus()):
        of = many(threads, "thread")
        yield Measurement("host reads", of, "GB/s", partial(host.read_gb_per_s, threads))
        yield Measurement("host copies", of, "GB/s", partial(host.copy_gb_per_s, threads))
        for dtype in native_dtypes():
            measure = partial(host.multiply_add_gflop_per_s, threads, dtype)
            yield Measurement(f"CPU multiply-adds, {dtype}", of, "GFLOP/s", measure)
    n = options.cpu_matrix_size
    for dtype in native_dtypes():
        measure = partial(host.matrix_gflop_per_s, n, dtype)
        yield Measurement(f"CPU matrix products, {dtype}", f"{n} x {n}", "GFLOP/s", measure)


def _of_gpu(
    timer: CudaTimer, sizes: tuple[int, ...], transfer_bytes: tuple[int, ...]
) -> Iterator[Measurement]:
    """Yield GFLOP/s of matrix products, GB/s in its memory and over the bus."""
    memory = timer.memory_bytes
    size = binary_size(memory)
    copies = Rate(lambda times: timer.copy_seconds(memory, times), memory)  # half is read, half is written
    yield Measurement("GPU reads", size, "GB/s", read_rate(timer, memory).giga_per_s)
    yield Measurement("GPU copies", size, "GB/s", copies.giga_per_s)
    for dtype in timer.dtypes:
        for n in sizes:
            measure = matrix_rate(timer, n, dtype).giga_per_s
            yield Measurement(f"GPU matrix products, {dtype}", f"{n} x {n}", "GFLOP/s", measure)
    for nbytes in transfer_bytes:
        for what, ways in _WAYS.items():
            rate = Rate(partial(timer.transfer_seconds, nbytes, ways), len(ways) * nbytes)
            yield Measurement(what, binary_size(nbytes), "GB/s", rate.giga_per_s)
