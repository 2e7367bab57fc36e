"""All measurements of the host, of the GPU and of the ways between them, in turn."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch

from neo_desktop import native
from neo_desktop.app.bench.checks import above_zero, at_least
from neo_desktop.app.bench.computer import GpuState, bytes_beyond_caches, gpu_driver
from neo_desktop.app.bench.hardware.device import (
    BOTH,
    CudaTimer,
    Rate,
    Way,
    fitting_sizes,
    matrix_rate,
    read_rate,
)
from neo_desktop.app.bench.hardware.host import Host, native_dtypes
from neo_desktop.app.bench.hardware.report import (
    GpuFigures,
    HandOffFigures,
    HardwareReport,
    HostFigures,
    MatrixFigures,
    TransferFigures,
)
from neo_desktop.app.bench.hardware.report import Way as HandOffWay
from neo_desktop.app.bench.section import Spread, size
from neo_desktop.engine.cuda.streams import Streams, open_streams
from neo_desktop.engine.execute.backend import open_backend
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.profiling.hand_off import HandOff
from neo_desktop.engine.profiling.hardware import find_gpus, last_level_cache_bytes
from neo_desktop.engine.progress import Progress

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LEAST_ROUNDS = 3


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


@dataclass(slots=True)
class Measurement:
    """Made again and again."""

    what: str
    measure: Callable[[], float]
    samples: list[float] = field(default_factory=list)


class Measurements(list[Measurement]):
    """All of a run: a report is written with measurements in its places, and filled in after each round."""

    def __call__(self, what: str, measure: Callable[[], float]) -> Any:
        """Add one; returns what stands for its spread until `filled_in`."""
        self.append(Measurement(what, measure))
        return partial(Spread.of, self[-1].samples)

    def rounds(self, seconds: float, progress: Progress) -> Iterator[int]:
        """Make all once without counting them, then in turn, again and again, for about so long.

        So a disturbance hits a few repetitions of each and not all of one. Yields after each round.
        """
        for each in self:
            progress(0.0, f"warming up: {each.what}")
            each.measure()
        start = time.perf_counter()
        round_seconds, done = 0.0, 0
        while done < LEAST_ROUNDS or round_seconds * (done + 1) < seconds:
            share = done * round_seconds / max(seconds, LEAST_ROUNDS * round_seconds)
            new = []
            for each in self:
                progress(share, each.what)
                new.append(each.measure())
            for each, value in zip(self, new, strict=True):
                each.samples.append(value)
            done += 1
            round_seconds = (time.perf_counter() - start) / done
            yield done


def filled_in(figures: Any) -> Any:
    """Return a report with what its functions say now."""
    if callable(figures):
        return figures()
    if isinstance(figures, tuple):
        return tuple(map(filled_in, figures))
    if is_dataclass(figures) and not isinstance(figures, type):
        return replace(figures, **{f.name: filled_in(getattr(figures, f.name)) for f in fields(figures)})
    return figures


def run_hardware(options: HardwareOptions, progress: Progress) -> Iterator[HardwareReport]:
    """Measure; yields the report again after each round of repetitions.

    Raises MemoryError where the host has no memory for it, and what `open_streams` raises.
    """
    progress(0.0, "taking memory")
    streams = open_streams(choose_device("auto"), options.gpu_slice)
    timer: CudaTimer | None = None
    state: GpuState | None = None
    sizes: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    if streams.device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        with gpu_driver(uuid) as driver:  # asked before anything runs on it
            state = None if driver is None else driver.state()
        sizes = fitting_sizes(options.gpu_matrix_sizes)
        notes = tuple(
            f"Matrix products of {size} x {size} were left out: too little GPU memory is free."
            for size in options.gpu_matrix_sizes
            if size not in sizes
        )
        most_matrix, most_transfer = (max(each, default=0) for each in (sizes, options.transfer_bytes))
        timer = CudaTimer(streams, options.gpu_memory_bytes, most_matrix, most_transfer)
    try:
        host = Host(options.host_bytes)
    except RuntimeError as error:  # torch's own for memory that the system refuses
        raise MemoryError(
            f"there are no {size(options.host_bytes)} of host memory to measure on: close other programs or "
            "ask for less"
        ) from error
    with ExitStack() as stack:
        each = Measurements()
        ways: tuple[HandOffWay, ...] = ("threads",) if timer is None else ("streams", "graph")
        between = {
            way: stack.enter_context(closing(hand_off_of(streams, in_graph=way == "graph"))) for way in ways
        }
        host_rows = host_figures(host, options.thread_counts, each)
        products = tuple(
            MatrixFigures(n, dtype, each("CPU matrix products", partial(host.matrix_gflop_per_s, n, dtype)))
            for dtype in native_dtypes()
            for n in [options.cpu_matrix_size]
        )
        gpu = None if timer is None else gpu_figures(timer, state, sizes, options.transfer_bytes, each)
        report = HardwareReport(
            seconds=0.0,
            rounds=0,
            memory_bytes=host.nbytes,
            last_level_cache_bytes=last_level_cache_bytes(),
            huge_pages=host.huge_pages,
            isa=native.default_isa(),
            torch_threads=torch.get_num_threads(),
            host=host_rows,
            matrices=products,
            gpu=gpu,
            gpu_note="" if timer is not None else find_gpus()[1],
            hand_off=tuple(
                HandOffFigures(way, nbytes, each("hand-off", partial(_hand_off_us, between[way], nbytes)))
                for nbytes in options.hand_off_bytes
                for way in ways
            ),
            notes=notes,
        )
        started = time.perf_counter()
        for done in each.rounds(options.seconds, progress):
            yield replace(filled_in(report), seconds=time.perf_counter() - started, rounds=done)
    progress(1.0, "done")


def hand_off_of(streams: Streams, *, in_graph: bool) -> HandOff:
    """Make what measures hand-offs."""
    return HandOff(streams.device, open_backend(streams), in_graph=in_graph)


def _hand_off_us(between: HandOff, nbytes: int) -> float:
    return between.seconds(nbytes) * 1e6


def host_figures(host: Host, thread_counts: Sequence[int], each: Measurements) -> tuple[HostFigures, ...]:
    """GB/s of reads and copies, GFLOP/s of multiply-adds."""
    adds = "CPU multiply-adds"
    return tuple(
        HostFigures(
            threads,
            each("host reads", partial(host.read_gb_per_s, threads)),
            each("host copies", partial(host.copy_gb_per_s, threads)),
            each(adds, partial(host.multiply_add_gflop_per_s, threads, "float32")),
            each(adds, partial(host.multiply_add_gflop_per_s, threads, "bfloat16"))
            if "bfloat16" in native_dtypes()
            else None,
        )
        for threads in thread_counts
    )


def gpu_figures(
    timer: CudaTimer,
    state: GpuState | None,
    matrix_sizes: Sequence[int],
    transfer_bytes: Sequence[int],
    each: Measurements,
) -> GpuFigures:
    """GFLOP/s of matrix products, GB/s in its memory, us of transfers."""
    memory = timer.memory_bytes
    copies = Rate(lambda times: timer.copy_seconds(memory, times), memory)  # half is read, half is written
    return GpuFigures(
        name=timer.name,
        state=state,
        memory_bytes=memory,
        matrices=tuple(
            MatrixFigures(n, dtype, each("GPU matrix products", matrix_rate(timer, n, dtype).giga_per_s))
            for dtype in timer.dtypes
            for n in matrix_sizes
        ),
        read_gb_per_s=each("GPU reads", read_rate(timer, memory).giga_per_s),
        copy_gb_per_s=each("GPU copies", copies.giga_per_s),
        transfers=tuple(_transfer(timer, nbytes, each) for nbytes in transfer_bytes),
    )


def _transfer(timer: CudaTimer, nbytes: int, each: Measurements) -> TransferFigures:
    """Either way alone, and both at once: then the bytes of both count."""
    rates = [
        Rate(partial(timer.transfer_seconds, nbytes, ways), len(ways) * nbytes)
        for ways in ((Way.TO_DEVICE,), (Way.TO_HOST,), BOTH)
    ]
    spreads = [each("transfers", rate.microseconds) for rate in rates]
    medians: list[Any] = [
        lambda rate=rate, spread=spread: rate.work / spread().median / 1e3
        for rate, spread in zip(rates, spreads, strict=True)
    ]
    return TransferFigures(nbytes, *spreads, *medians)
