"""What was measured, part by part."""

from dataclasses import dataclass
from typing import Literal

from neo_desktop.app.bench.gpu_driver import GpuState
from neo_desktop.app.bench.spread import Spread

Way = Literal["graph", "streams", "threads"]  # of a hand-off, see `HandOffFigures`


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
