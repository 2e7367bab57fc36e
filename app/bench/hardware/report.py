"""What the suite found, and how it is told."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from neo_desktop.app.bench.gpu_driver import GpuState, no_gpu, state_notes
from neo_desktop.app.bench.hardware.figures import (
    GpuFigures,
    HandOffFigures,
    HostFigures,
    MatrixFigures,
    TransferFigures,
)
from neo_desktop.app.bench.hardware.plot import draw_reads, draw_transfers
from neo_desktop.app.bench.section import Metric, Plot, Section, Table
from neo_desktop.app.bench.spread import number, size


@dataclass(frozen=True, slots=True)
class HardwareReport:
    """What this computer reaches."""

    seconds: float  # that the repetitions took
    rounds: int  # repetitions of each measurement
    memory_bytes: int  # host memory that reads and copies go over
    last_level_cache_bytes: int  # of the first core; 0: the system does not say
    huge_pages: bool  # whether the system agreed to them
    isa: str  # of the kernels
    torch_threads: int  # of matrix products on the CPU
    host: tuple[HostFigures, ...]  # by rising number of threads
    matrices: tuple[MatrixFigures, ...]  # on the CPU
    gpu: GpuFigures | None
    gpu_note: str  # why there is none; empty if there is one
    hand_off: tuple[HandOffFigures, ...]
    notes: tuple[str, ...]
    suite: Literal["hardware"] = "hardware"

    def section(self) -> Section:
        """What is shown everywhere."""
        plots = [
            Plot(
                "hardware-host-memory",
                "How fast the CPU reads and copies its memory, by number of threads",
                partial(draw_reads, host=self.host),
            )
        ]
        if self.gpu is not None and self.gpu.transfers:
            plots.append(
                Plot(
                    "hardware-transfers",
                    "How fast data crosses the bus between GPU and host, by size of a copy",
                    partial(draw_transfers, transfers=self.gpu.transfers),
                )
            )
        return Section(
            title="Hardware",
            summary=self._summary(),
            tables=tuple(self._tables()),
            plots=tuple(plots),
            notes=self._notes(),
        )

    def metrics(self) -> tuple[Metric, ...]:
        """The figures to compare with another run."""
        best = _best(self.host)
        most = max(self.host, key=lambda row: row.fp32_gflop_per_s.median)
        found = [
            Metric("hardware.host_read_gb_per_s", best.read_gb_per_s.median, "GB/s"),
            Metric("hardware.host_copy_gb_per_s", max(r.copy_gb_per_s.median for r in self.host), "GB/s"),
            Metric("hardware.cpu_fp32_gflop_per_s", most.fp32_gflop_per_s.median, "GFLOP/s"),
        ]
        found += [
            Metric(f"hardware.cpu_matrix_{row.dtype}_gflop_per_s", row.gflop_per_s.median, "GFLOP/s")
            for row in self.matrices
        ]
        if self.gpu is not None:
            found += _gpu_metrics(self.gpu)
        found += [
            Metric(f"hardware.hand_off_{row.way}_us.{row.nbytes}_bytes", row.us.median, "us", False)
            for row in self.hand_off
        ]
        return tuple(found)

    def _summary(self) -> str:
        one, best = self.host[0], _best(self.host)
        reads = f"This computer reads its memory at {_rate(best)} GB/s with {_threads(best.threads)}"
        if one.threads != best.threads:
            reads += f" ({_rate(one)} with {_threads(one.threads)})"
        products = " and ".join(
            f"{number(row.gflop_per_s.median)} GFLOP/s in {row.dtype}" for row in self.matrices
        )
        host = f"{reads}. Its CPU multiplies matrices at {products}."
        gpu = self.gpu
        if gpu is None:
            return f"{host} {no_gpu(self.gpu_note)}."
        text = f"{host} Its GPU, {gpu.name}, reads its own memory at {number(gpu.read_gb_per_s.median)} GB/s"
        if gpu.matrices:
            fastest = max(gpu.matrices, key=lambda row: row.gflop_per_s.median)
            text += (
                f", multiplies matrices at {number(fastest.gflop_per_s.median / 1e3)} TFLOP/s in "
                f"{fastest.dtype}"
            )
        if gpu.transfers:
            to_device = max(row.to_device_gb_per_s for row in gpu.transfers)
            to_host = max(row.to_host_gb_per_s for row in gpu.transfers)
            text += f" and receives {number(to_device)} GB/s from the host, sends {number(to_host)}"
        if self.hand_off:
            fastest_us = min(row.us.median for row in self.hand_off)
            text += f". Handing work to the CPU and back takes {number(fastest_us)} us"
        return f"{text}."

    def _tables(self) -> list[Table]:
        tables = [_host_table(self.host), _matrix_table(self.matrices, self.gpu)]
        if self.gpu is not None:
            if self.gpu.state is not None:
                tables.append(_state_table(self.gpu.state))
            tables.append(_memory_table(self.gpu))
            if self.gpu.transfers:
                tables.append(_transfer_table(self.gpu.transfers))
        if self.hand_off:
            tables.append(_hand_off_table(self.hand_off))
        return tables

    def _notes(self) -> tuple[str, ...]:
        times = "1 repetition" if self.rounds == 1 else f"{self.rounds} repetitions"
        notes = [
            f"Medians of {times}, in brackets the 10th and 90th percentile; all measurements took turns.",
            f"Host reads: the kernels' own thread pool ({self.isa}), front to back over "
            f"{size(self.memory_bytes)}{'' if self.huge_pages else ', without huge pages'}. Copies: torch, "
            "one half of it to the other; bytes read and bytes written both count.",
            "Multiply-adds stay in registers and count as two operations; matrix products are torch's, on "
            f"{_threads(self.torch_threads)}.",
        ]
        if 0 < self.memory_bytes < 4 * self.last_level_cache_bytes:
            notes.append(
                f"Only {size(self.memory_bytes)} of memory were free for this, less than four times the "
                f"last-level cache ({size(self.last_level_cache_bytes)}): reads may partly come from there."
            )
        if self.gpu is None:
            notes.append(f"No GPU that torch can use: {self.gpu_note}. GPU and bus were not measured.")
            notes.append(
                "Hand-off is that of the imitated lanes: threads of the CPU that pass work to each other and "
                "copy within host memory, a chain of round trips. It says nothing about a GPU."
            )
        else:
            notes += [
                f"GPU reads add up {size(self.gpu.memory_bytes)} as fp32; GPU copies move one half of it to "
                "the other, and bytes read and bytes written both count.",
                "Transfers go through pinned memory, several in a row between two GPU events: for small ones "
                "the time is that of starting a copy. Both ways: one copy each way at once, bytes added up.",
                "Hand-off: on the engine's own lanes, a chain of round trips: a kernel, a copy to pinned "
                "memory, a thread that waits for it and adds one number, a copy back.",
                *state_notes(self.gpu.state),
            ]
        return (*notes, *self.notes)


def _best(host: tuple[HostFigures, ...]) -> HostFigures:
    return max(host, key=lambda row: row.read_gb_per_s.median)


def _rate(row: HostFigures) -> str:
    return number(row.read_gb_per_s.median)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _host_table(host: tuple[HostFigures, ...]) -> Table:
    has_bf16 = any(row.bf16_gflop_per_s is not None for row in host)
    columns = ("threads", "read GB/s", "copy GB/s", "multiply-adds fp32 GFLOP/s")
    rows = []
    for row in host:
        cells: tuple[object, ...] = (row.threads, row.read_gb_per_s, row.copy_gb_per_s, row.fp32_gflop_per_s)
        rows.append(tuple(map(str, (*cells, row.bf16_gflop_per_s) if has_bf16 else cells)))
    return Table((*columns, "bf16 GFLOP/s") if has_bf16 else columns, tuple(rows), "Host by threads")


def _matrix_table(on_cpu: tuple[MatrixFigures, ...], gpu: GpuFigures | None) -> Table:
    where = [("CPU", row) for row in on_cpu]
    where += [] if gpu is None else [("GPU", row) for row in gpu.matrices]
    rows = tuple((name, row.dtype, f"{row.size} x {row.size}", str(row.gflop_per_s)) for name, row in where)
    return Table(("processor", "dtype", "size", "GFLOP/s"), rows, "Matrix products")


def _memory_table(gpu: GpuFigures) -> Table:
    rows = (("read", str(gpu.read_gb_per_s)), ("copy", str(gpu.copy_gb_per_s)))
    return Table(("GPU memory", "GB/s"), rows, f"Memory of the {gpu.name}, over {size(gpu.memory_bytes)}")


def _transfer_table(transfers: tuple[TransferFigures, ...]) -> Table:
    columns = ("bytes", "to GPU us", "GB/s", "to host us", "GB/s", "both ways us", "GB/s")
    rows = tuple(
        (
            size(row.nbytes),
            str(row.to_device_us),
            number(row.to_device_gb_per_s),
            str(row.to_host_us),
            number(row.to_host_gb_per_s),
            str(row.both_ways_us),
            number(row.both_ways_gb_per_s),
        )
        for row in transfers
    )
    return Table(columns, rows, "Between GPU and host")


def _hand_off_table(hand_off: tuple[HandOffFigures, ...]) -> Table:
    names = {
        "graph": "GPU, CPU, GPU in a graph (decodes)",
        "streams": "GPU, CPU, GPU on streams (with prompts)",
        "threads": "imitated by threads",
    }
    rows = tuple((names[row.way], size(row.nbytes), str(row.us)) for row in hand_off)
    return Table(("way", "bytes each way", "round trip us"), rows, "Hand-off")


def _state_table(state: GpuState) -> Table:
    def cell(value: float | None, unit: str) -> str:
        return "not measured" if value is None else f"{value:.0f} {unit}"

    rows = (
        ("utilisation", "not measured" if state.utilisation is None else f"{state.utilisation:.0%}"),
        ("temperature", cell(state.temperature_c, "°C")),
        ("power", cell(state.power_w, "W")),
        ("power limit", cell(state.power_limit_w, "W")),
        ("clock of the multiprocessors", cell(state.sm_clock_mhz, "MHz")),
        ("their highest clock", cell(state.max_sm_clock_mhz, "MHz")),
        ("clock of the memory", cell(state.memory_clock_mhz, "MHz")),
    )
    return Table((state.name, "before the run"), rows, "State of the GPU")


def _gpu_metrics(gpu: GpuFigures) -> list[Metric]:
    found = [
        Metric("hardware.gpu_read_gb_per_s", gpu.read_gb_per_s.median, "GB/s"),
        Metric("hardware.gpu_copy_gb_per_s", gpu.copy_gb_per_s.median, "GB/s"),
    ]
    for dtype in dict.fromkeys(row.dtype for row in gpu.matrices):
        rates = [row.gflop_per_s.median for row in gpu.matrices if row.dtype == dtype]
        found.append(Metric(f"hardware.gpu_matrix_{dtype}_gflop_per_s", max(rates), "GFLOP/s"))
    if gpu.transfers:
        largest = gpu.transfers[-1]
        found += [
            Metric("hardware.to_gpu_gb_per_s", largest.to_device_gb_per_s, "GB/s"),
            Metric("hardware.to_host_gb_per_s", largest.to_host_gb_per_s, "GB/s"),
            Metric("hardware.both_ways_gb_per_s", largest.both_ways_gb_per_s, "GB/s"),
        ]
    return found
