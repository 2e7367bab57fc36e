"""All measurements of the host, of the GPU and of the ways between them, in turn."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

from neo_desktop import native
from neo_desktop.app.bench.checks import above_zero, at_least
from neo_desktop.app.bench.computer import bytes_beyond_caches
from neo_desktop.app.bench.gpu_driver import gpu_driver
from neo_desktop.app.bench.hardware.device import CudaTimer, fitting_sizes, gpu_cases
from neo_desktop.app.bench.hardware.host import Case, Cases, Host, host_cases
from neo_desktop.app.bench.hardware.report import (
    GpuFigures,
    HandOffFigures,
    HardwareReport,
    HostFigures,
    MatrixFigures,
    TransferFigures,
    Way,
)
from neo_desktop.app.bench.section import Spread, size
from neo_desktop.engine.cuda.streams import Streams, open_streams
from neo_desktop.engine.execute.backend import open_backend
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.profiling.hand_off import HandOff
from neo_desktop.engine.profiling.hardware import find_gpus, last_level_cache_bytes
from neo_desktop.engine.progress import Progress

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LEAST_ROUNDS = 3

Samples = dict[Case, list[float]]


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """What to measure, and how much memory and time to take; the defaults are a thorough run.

    Raises ValueError for sizes and times that make no sense.
    """

    seconds: float = 45.0  # for all repetitions together; each measurement is made three times at least
    threads: tuple[int, ...] = ()  # of host measurements; empty: 1, 2, 4, ... and all usable cores
    # Read on the host; None: 1 GiB or four times the last-level cache, within a quarter of what is free.
    memory_bytes: int | None = None
    cpu_matrix_size: int = 2048  # rows and columns
    gpu_memory_bytes: int = GIB  # read on the GPU, within a quarter of what is free
    gpu_matrix_sizes: tuple[int, ...] = (1024, 2048, 4096, 8192)
    transfer_bytes: tuple[int, ...] = tuple(4 * KIB * 4**i for i in range(8))  # 4 KiB to 64 MiB
    gpu_slice: int | None = None  # multiprocessors of the GPU; None: all of them
    hand_off_bytes: tuple[int, ...] = (16 * KIB, 512 * KIB)  # about what 1 and 32 requests hand over

    def __post_init__(self) -> None:
        above_zero(self, "seconds")
        at_least(self, 1, "threads", "cpu_matrix_size", "gpu_matrix_sizes")
        at_least(self, 4 * KIB, "memory_bytes", "gpu_memory_bytes", "transfer_bytes", "hand_off_bytes")

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """The numbers of threads to measure with, rising."""
        return tuple(sorted(set(self.threads))) or doubling(native.num_usable_cpus())

    @property
    def host_bytes(self) -> int:
        """How much host memory to take."""
        return bytes_beyond_caches() if self.memory_bytes is None else self.memory_bytes


def doubling(cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the number of cores itself."""
    return (*(1 << i for i in range(cores.bit_length()) if 1 << i < cores), cores)


def run_hardware(options: HardwareOptions, progress: Progress) -> Iterator[HardwareReport]:
    """Measure; yields the report again after each round of repetitions.

    Raises MemoryError where the host has no memory for it, and what `open_streams` raises.
    """
    progress(0.0, "taking memory")
    streams = open_streams(choose_device("auto"), options.gpu_slice)
    gpu = _Gpu(options, streams) if streams.device.type == "cuda" else None
    try:
        host = Host(options.host_bytes)
    except RuntimeError as error:  # torch's own for memory that the system refuses
        raise MemoryError(
            f"there are no {size(options.host_bytes)} of host memory to measure on: close other programs or "
            "ask for less"
        ) from error
    with closing(hand_off_of(streams, in_graph=False)) as hand_off:
        cases = host_cases(host, options.thread_counts, options.cpu_matrix_size)
        cases |= {} if gpu is None else gpu.cases
        ways: dict[Case, Way] = {}
        for nbytes in options.hand_off_bytes:
            ways[Case("hand-off", nbytes)] = "threads" if gpu is None else "streams"
            cases[Case("hand-off", nbytes)] = partial(hand_off.seconds, nbytes)
            if gpu is not None:
                ways[Case("hand-off in a graph", nbytes)] = "graph"
                cases[Case("hand-off in a graph", nbytes)] = partial(gpu.graph_hand_off.seconds, nbytes)

        gpu_note = "" if gpu is not None else find_gpus()[1]
        last_level_bytes = last_level_cache_bytes()
        started = time.perf_counter()
        for samples in rounds(cases, options.seconds, progress):
            spreads = {case: Spread.of(values) for case, values in samples.items()}
            yield HardwareReport(
                seconds=time.perf_counter() - started,
                rounds=max(spread.samples for spread in spreads.values()),
                memory_bytes=host.nbytes,
                last_level_cache_bytes=last_level_bytes,
                huge_pages=host.huge_pages,
                isa=native.default_isa(),
                torch_threads=torch.get_num_threads(),
                host=_host_figures(spreads, options.thread_counts),
                matrices=_matrix_figures(spreads, "CPU matrix products"),
                gpu=None if gpu is None else gpu.figures(spreads),
                gpu_note=gpu_note,
                hand_off=tuple(
                    HandOffFigures(way, case.size, spreads[case].scaled(1e6)) for case, way in ways.items()
                ),
                notes=() if gpu is None else gpu.notes,
            )
    progress(1.0, "done")


def rounds(cases: Cases, seconds: float, progress: Progress) -> Iterator[Samples]:
    """Make all measurements once without counting them, then in turn, again and again, for about so long.

    So a disturbance hits a few repetitions of each and not all of one. Yields what there is after each round:
    `case -> its samples so far`.
    """
    for case, measure in cases.items():
        progress(0.0, f"warming up: {case.what}")
        measure()
    samples: Samples = {case: [] for case in cases}
    start = time.perf_counter()
    round_seconds, done = 0.0, 0
    while done < LEAST_ROUNDS or round_seconds * (done + 1) < seconds:
        share = done * round_seconds / max(seconds, LEAST_ROUNDS * round_seconds)
        new = []
        for case, measure in cases.items():
            progress(share, case.what)
            new.append(measure())
        for values, value in zip(samples.values(), new, strict=True):
            values.append(value)
        done += 1
        round_seconds = (time.perf_counter() - start) / done
        yield samples


def hand_off_of(streams: Streams, *, in_graph: bool) -> HandOff:
    """Make what measures hand-offs."""
    return HandOff(streams.device, open_backend(streams), in_graph=in_graph)


class _Gpu:
    """The GPU that torch uses, asked for its state before anything runs on it."""

    def __init__(self, options: HardwareOptions, streams: Streams) -> None:
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        with gpu_driver(uuid) as driver:
            self._state = None if driver is None else driver.state()
        sizes = fitting_sizes(options.gpu_matrix_sizes)
        self.notes = tuple(
            f"Matrix products of {size} x {size} were left out: too little GPU memory is free."
            for size in options.gpu_matrix_sizes
            if size not in sizes
        )
        self.graph_hand_off = hand_off_of(streams, in_graph=True)
        most_matrix, most_transfer = (max(each, default=0) for each in (sizes, options.transfer_bytes))
        self._timer = CudaTimer(streams, options.gpu_memory_bytes, most_matrix, most_transfer)
        self.cases = gpu_cases(self._timer, sizes, options.transfer_bytes)

    def figures(self, spreads: dict[Case, Spread]) -> GpuFigures:
        nbytes = self._timer.memory_bytes
        return GpuFigures(
            name=self._timer.name,
            state=self._state,
            memory_bytes=nbytes,
            read_gb_per_s=spreads[Case("GPU reads", nbytes)],
            copy_gb_per_s=spreads[Case("GPU copies", nbytes)],
            matrices=_matrix_figures(spreads, "GPU matrix products"),
            transfers=_transfer_figures(spreads),
        )


def _host_figures(spreads: dict[Case, Spread], thread_counts: tuple[int, ...]) -> tuple[HostFigures, ...]:
    return tuple(
        HostFigures(
            threads=threads,
            read_gb_per_s=spreads[Case("host reads", threads)],
            copy_gb_per_s=spreads[Case("host copies", threads)],
            fp32_gflop_per_s=spreads[Case("CPU multiply-adds", threads, "float32")],
            bf16_gflop_per_s=spreads.get(Case("CPU multiply-adds", threads, "bfloat16")),
        )
        for threads in thread_counts
    )


def _matrix_figures(spreads: dict[Case, Spread], what: str) -> tuple[MatrixFigures, ...]:
    return tuple(
        MatrixFigures(case.size, case.dtype, spread) for case, spread in spreads.items() if case.what == what
    )


def _transfer_figures(spreads: dict[Case, Spread]) -> tuple[TransferFigures, ...]:
    found = []
    for nbytes in (case.size for case in spreads if case.what == "transfers to device"):
        to_device, to_host, both = (
            spreads[Case(f"transfers {name}", nbytes)] for name in ("to device", "to host", "both ways")
        )
        found.append(
            TransferFigures(
                *(nbytes, to_device, to_host, both),
                to_device_gb_per_s=nbytes / to_device.median / 1e3,
                to_host_gb_per_s=nbytes / to_host.median / 1e3,
                both_ways_gb_per_s=2 * nbytes / both.median / 1e3,
            )
        )
    return tuple(found)
