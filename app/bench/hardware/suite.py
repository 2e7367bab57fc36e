"""All measurements of the host, of the GPU and of the ways between them, in turn."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import torch

from neo_desktop import native
from neo_desktop.app.bench.gpu_driver import GpuState, gpu_driver
from neo_desktop.app.bench.hardware.cuda import CudaTimer, fitting_sizes
from neo_desktop.app.bench.hardware.device import gpu_cases
from neo_desktop.app.bench.hardware.figures import (
    GpuFigures,
    HandOffFigures,
    HostFigures,
    MatrixFigures,
    TransferFigures,
    Way,
)
from neo_desktop.app.bench.hardware.hand_off import HandOff
from neo_desktop.app.bench.hardware.host import Host, host_cases
from neo_desktop.app.bench.hardware.options import HardwareOptions
from neo_desktop.app.bench.hardware.report import HardwareReport
from neo_desktop.app.bench.hardware.rounds import Case, rounds
from neo_desktop.app.bench.section import Progress
from neo_desktop.app.bench.spread import Spread, size
from neo_desktop.engine.cuda.streams import Streams, open_streams
from neo_desktop.engine.execute.graphs.streams import CudaRunner, Lane
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.profiling.graph_hand_off import GraphHandOff
from neo_desktop.engine.profiling.hardware import find_gpus, last_level_cache_bytes


def run_hardware(options: HardwareOptions, progress: Progress) -> Iterator[HardwareReport]:
    """Measure; yields the report again after each round of repetitions.

    Raises MemoryError where the host has no memory for it, and what `open_streams` raises.
    """
    progress(0.0, "taking memory")
    streams = open_streams(choose_device("auto"), options.gpu_slice)
    gpu = _Gpu(options, streams) if streams.device.type == "cuda" else None
    host = _host(options)
    with closing(HandOff(streams)) as hand_off:
        cases = host_cases(host, options.thread_counts, options.cpu_matrix_size)
        if gpu is not None:
            cases |= gpu.cases
        ways: dict[Case, Way] = {}
        for nbytes in options.hand_off_bytes:
            case = Case("hand-off", nbytes)
            ways[case] = "threads" if gpu is None else "streams"
            cases[case] = partial(hand_off.seconds, nbytes)
            if gpu is not None:
                case = Case("hand-off in a graph", nbytes)
                ways[case] = "graph"
                cases[case] = partial(gpu.graph_hand_off.seconds, nbytes)

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


def graph_hand_off(streams: Streams) -> GraphHandOff:
    """Make what measures hand-offs in a CUDA graph."""
    return GraphHandOff(streams.device, CudaRunner({lane: streams.stream() for lane in Lane}, None))


class _Gpu:
    """The GPU that torch uses, asked for its state before anything runs on it."""

    def __init__(self, options: HardwareOptions, streams: Streams) -> None:
        self._state = _state()
        sizes = fitting_sizes(options.gpu_matrix_sizes)
        self.notes = tuple(
            f"Matrix products of {size} x {size} were left out: too little GPU memory is free."
            for size in options.gpu_matrix_sizes
            if size not in sizes
        )
        self.graph_hand_off = graph_hand_off(streams)
        self._timer = CudaTimer(
            streams, options.gpu_memory_bytes, max(sizes, default=0), max(options.transfer_bytes, default=0)
        )
        self.cases: dict[Case, Callable[[], float]] = gpu_cases(self._timer, sizes, options.transfer_bytes)

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


def _state() -> GpuState | None:
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    with gpu_driver(uuid) as driver:
        return None if driver is None else driver.state()


def _host(options: HardwareOptions) -> Host:
    try:
        return Host(options.host_bytes)
    except RuntimeError as error:  # torch's own for memory that the system refuses
        raise MemoryError(
            f"there are no {size(options.host_bytes)} of host memory to measure on: close other programs or "
            "ask for less"
        ) from error


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
                nbytes=nbytes,
                to_device_us=to_device,
                to_host_us=to_host,
                both_ways_us=both,
                to_device_gb_per_s=nbytes / to_device.median / 1e3,
                to_host_gb_per_s=nbytes / to_host.median / 1e3,
                both_ways_gb_per_s=2 * nbytes / both.median / 1e3,
            )
        )
    return tuple(found)
