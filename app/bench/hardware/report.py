"""What the suite found, and how it is told."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from neo_desktop.app.bench.charts import BLUE, GREEN, ORANGE, RED, doubling, round_logs, spreads, tidy
from neo_desktop.app.bench.computer import GpuState
from neo_desktop.app.bench.section import Column, Metric, Plot, Section, Spread, Table, size
from neo_desktop.app.bench.words import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Way = Literal["graph", "streams", "threads"]  # of a hand-off, see `HandOffFigures`
_WAYS = {
    "graph": "GPU, CPU, GPU in a graph (decodes)",
    "streams": "GPU, CPU, GPU on streams (with prompts)",
    "threads": "imitated by threads",
}
_STATE: dict[str, Column] = {
    "utilisation": "utilisation:.0%",
    "temperature": "temperature_c:.0f °C",
    "power": "power_w:.0f W",
    "power limit": "power_limit_w:.0f W",
    "clock of the multiprocessors": "sm_clock_mhz:.0f MHz",
    "their highest clock": "max_sm_clock_mhz:.0f MHz",
    "clock of the memory": "memory_clock_mhz:.0f MHz",
}


@dataclass(frozen=True, slots=True)
class HostFigures:
    """The host with so many threads."""

    threads: int
    read_gb_per_s: Spread
    copy_gb_per_s: Spread  # what is read and what is written both count
    fp32_gflop_per_s: Spread  # multiply-adds in registers; either counts as an operation
    bf16_gflop_per_s: Spread | None  # None: the instruction set of the kernels has none


@dataclass(frozen=True, slots=True)
class MatrixFigures:
    """Products of two square matrices."""

    size: int  # rows and columns
    dtype: str
    gflop_per_s: Spread


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """Copies between GPU memory and pinned host memory, several in a row."""

    nbytes: int  # of one copy
    to_device_us: Spread
    to_host_us: Spread
    both_ways_us: Spread  # one copy each way, at once
    to_device_gb_per_s: float  # medians
    to_host_gb_per_s: float
    both_ways_gb_per_s: float  # both ways together


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """The GPU by itself, and its way to the host."""

    name: str
    state: GpuState | None  # before the run; None: the driver cannot be asked
    memory_bytes: int  # that reads and copies go over
    read_gb_per_s: Spread
    copy_gb_per_s: Spread  # what is read and what is written both count
    matrices: tuple[MatrixFigures, ...]
    transfers: tuple[TransferFigures, ...]


@dataclass(frozen=True, slots=True)
class HandOffFigures:
    """From the device to the CPU and back, with work in between."""

    # "graph": inside a CUDA graph, through flags, as iterations of decodes do. "streams": on the engine's
    # lanes, as other iterations do. "threads": likewise, but without a GPU, between threads.
    way: Way
    nbytes: int  # each way
    us: Spread  # of a round trip, in a chain of them


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
        reads = "How fast the CPU reads and copies its memory, by number of threads"
        plots = [Plot("hardware-host-memory", reads, self._draw_reads)]
        if self.gpu is not None and self.gpu.transfers:
            crosses = "How fast data crosses the bus between GPU and host, by size of a copy"
            plots.append(Plot("hardware-transfers", crosses, self._draw_transfers))
        title, summary, *notes = say("hardware", report=self)
        return Section(title, summary, tuple(self._tables()), tuple(plots), (*notes, *self.notes))

    def metrics(self) -> tuple[Metric, ...]:
        """The figures to compare with another run."""
        host, gpu, found = self.host, self.gpu, []

        def add(name: str, value: float, unit: str = "GB/s", higher: bool = True) -> None:
            found.append(Metric(f"hardware.{name}", value, unit, higher))

        add("host_read_gb_per_s", max(row.read_gb_per_s.median for row in host))
        add("host_copy_gb_per_s", max(row.copy_gb_per_s.median for row in host))
        add("cpu_fp32_gflop_per_s", max(row.fp32_gflop_per_s.median for row in host), "GFLOP/s")
        for row in self.matrices:
            add(f"cpu_matrix_{row.dtype}_gflop_per_s", row.gflop_per_s.median, "GFLOP/s")
        if gpu is not None:
            add("gpu_read_gb_per_s", gpu.read_gb_per_s.median)
            add("gpu_copy_gb_per_s", gpu.copy_gb_per_s.median)
            for dtype in dict.fromkeys(row.dtype for row in gpu.matrices):
                best = max(row.gflop_per_s.median for row in gpu.matrices if row.dtype == dtype)
                add(f"gpu_matrix_{dtype}_gflop_per_s", best, "GFLOP/s")
            for largest in gpu.transfers[-1:]:
                add("to_gpu_gb_per_s", largest.to_device_gb_per_s)
                add("to_host_gb_per_s", largest.to_host_gb_per_s)
                add("both_ways_gb_per_s", largest.both_ways_gb_per_s)
        for each in self.hand_off:
            add(f"hand_off_{each.way}_us.{each.nbytes}_bytes", each.us.median, "us", False)
        return tuple(found)

    def _draw_reads(self, figure: "Figure") -> None:
        """GB/s against threads; bars from the 10th to the 90th percentile."""
        axes = figure.subplots()
        threads = [row.threads for row in self.host]
        spreads(axes, threads, [row.read_gb_per_s for row in self.host], "o-", BLUE, "read")
        copies = [row.copy_gb_per_s for row in self.host]
        spreads(axes, threads, copies, "s--", ORANGE, "copy (read + written)")
        doubling(axes, threads)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="threads", ylabel="host memory, GB/s")
        tidy(axes)
        axes.legend(frameon=False)

    def _draw_transfers(self, figure: "Figure") -> None:
        """GB/s against bytes of a copy, to the GPU, to the host and both ways together."""
        axes = figure.subplots()
        transfers = () if self.gpu is None else self.gpu.transfers
        sizes = [row.nbytes for row in transfers]
        for way, style, colour, label in (
            ("both_ways", "D:", GREEN, "both ways together"),
            ("to_device", "o-", BLUE, "host to GPU"),
            ("to_host", "s--", RED, "GPU to host"),
        ):
            rates = [getattr(row, f"{way}_gb_per_s") for row in transfers]
            axes.plot(sizes, rates, style, color=colour, label=label)
        axes.set_yscale("log")
        doubling(axes, sizes, [size(nbytes) for nbytes in sizes])
        round_logs(axes.yaxis)
        axes.set(xlabel="size of one copy", ylabel="between GPU and host, GB/s")
        tidy(axes)
        axes.legend(frameon=False)

    def _tables(self) -> Iterator[Table]:
        gpu = self.gpu
        by_threads: dict[str, Column] = {
            "threads": "threads",
            "read GB/s": "read_gb_per_s",
            "copy GB/s": "copy_gb_per_s",
            "multiply-adds fp32 GFLOP/s": "fp32_gflop_per_s",
        }
        if any(row.bf16_gflop_per_s is not None for row in self.host):
            by_threads["bf16 GFLOP/s"] = lambda row: str(row.bf16_gflop_per_s)
        products = [("CPU", row) for row in self.matrices]
        products += [] if gpu is None else [("GPU", row) for row in gpu.matrices]
        yield Table.of("Host by threads", self.host, by_threads)
        yield Table.of(
            "Matrix products",
            products,
            {
                "processor": lambda row: row[0],
                "dtype": lambda row: row[1].dtype,
                "size": lambda row: f"{row[1].size} x {row[1].size}",
                "GFLOP/s": lambda row: row[1].gflop_per_s,
            },
        )
        if gpu is not None:
            if gpu.state is not None:
                columns = (gpu.state.name, "before the run")
                yield Table.listing("State of the GPU", columns, gpu.state, _STATE)
            title = f"Memory of the {gpu.name}, over {size(gpu.memory_bytes)}"
            rates: dict[str, Column] = {"read": "read_gb_per_s", "copy": "copy_gb_per_s"}
            yield Table.listing(title, ("GPU memory", "GB/s"), gpu, rates)
            if gpu.transfers:
                yield _transfer_table(gpu.transfers)
        if self.hand_off:
            way: dict[str, Column] = {"way": lambda row: _WAYS[row.way]}
            rest: dict[str, Column] = {"bytes each way": "nbytes:size", "round trip us": "us"}
            yield Table.of("Hand-off", self.hand_off, way | rest)


def _transfer_table(transfers: tuple[TransferFigures, ...]) -> Table:
    columns = ("bytes", "to GPU us", "GB/s", "to host us", "GB/s", "both ways us", "GB/s")
    ways = ("to_device", "to_host", "both_ways")
    figures = [f"{way}_{figure}" for way in ways for figure in ("us", "gb_per_s")]
    of_each: dict[str, Column] = {"bytes": "nbytes:size"}
    table = Table.of("Between GPU and host", transfers, of_each | {name: name for name in figures})
    return replace(table, columns=columns)
