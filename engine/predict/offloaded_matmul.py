"""Offloaded matmuls, divided between GPU and CPU: the division and its time.

After HeteGen (sections 3.2 and 4.4). Some output rows of a matrix are resident on the GPU; the others are in
host memory. For each matmul a share of the others crosses the bus to be computed on the GPU, while the CPU
computes the rest in place:

    GPU    | resident rows | streamed rows on arrival    |
    bus    | streamed rows, ahead of the matmul          |
    CPU    | inputs | the other rows           | outputs |
    memory | streamed and other rows, read once          |
           <------------- time of the matmul ----------->

The best streamed share, α in the paper, balances the CPU's time against the time of bus and GPU. For one row
of inputs both only read weights, and the faster side takes more. For a prompt the CPU is far too slow, and
nearly all weights are streamed.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of a machine's processors and links in matmuls."""

    cpu_bytes_per_s: float  # of weights; in matmuls of few rows
    cpu_flops: float  # in matmuls of many rows
    bus_bytes_per_s: float  # from pinned host memory to the GPU
    gpu_bytes_per_s: float  # of weights in GPU memory; in matmuls of few rows
    gpu_flops: float  # in matmuls of many rows
    offload_ms: float  # time to copy few inputs to the CPU and its outputs back
    host_bytes_per_s: float = inf  # host memory bandwidth shared by CPU and bus


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one matrix, or of one layer's experts."""

    rows: int
    columns: int
    device_bytes: int
    host_bytes: int
    unpacked_bytes: int  # in the model's dtype, to which the GPU unpacks streamed rows
    itemsize: int = 2  # of inputs and outputs
    unit: int = 64  # resident rows are a multiple, or all rows;
    used_share: float = 1.0  # share of the rows that one row of inputs uses; below 1: experts, one row each
    handed: int = 0  # input and output numbers per row; 0: all columns and rows

    @property
    def parameters(self) -> int:
        return self.rows * self.columns

    @property
    def is_experts(self) -> bool:
        """True if the rows are a layer's experts."""
        return self.used_share < 1

    def used(self, first: int = 0) -> float:
        """Return the share of the weights that one row of inputs uses, in rows from `first` on."""
        return self.touched(1, first)

    def touched(self, rows: int, first: int = 0) -> float:
        """Return the share of the weights that at least one row of inputs uses.

        Args:
            rows: rows of inputs, which choose experts at random.
            first: count only weight rows from here on.
        """
        used = 1 - (1 - self.used_share) ** rows if self.is_experts else 1.0
        return used * (1 - first / self.rows)

    def handed_bytes(self, rows: int, others: float) -> float:
        """Return the bytes of inputs and outputs for `rows` rows, if the CPU has the share `others`."""
        return rows * (self.handed or self.columns + others * self.rows) * self.itemsize


class ProductTime(NamedTuple):
    """Time of one offloaded matmul."""

    ms: float
    host_ms: float  # the part in which the CPU computes
    streamed_share: float  # of the weights in host memory


def product_time(
    rates: Rates, sizes: Sizes, resident_rows: int, rows: int, share: float | None = None
) -> ProductTime:
    """Predict a matmul of `rows` input rows with a matrix of which `resident_rows` are resident.

    `share` is the streamed share of the others; None: the best.
    """
    touched = sizes.touched(rows) - sizes.touched(rows, resident_rows)
    used = sizes.used() - sizes.used(resident_rows)
    device_ms = 1e3 * max(
        touched * sizes.device_bytes / rates.gpu_bytes_per_s,
        2 * used * sizes.parameters * rows / rates.gpu_flops,
    )
    if resident_rows == sizes.rows:
        return ProductTime(device_ms, 0.0, 0.0)
    times = _Times.of(rates, sizes, resident_rows, rows, device_ms)
    if share is None:
        share = times.best_share()
    return ProductTime(times.ms(share), (1 - share) * times.cpu, share)


class _Times(NamedTuple):
    """Times for all weights in host memory on each processor and link, in ms.

    The needed experts are known too late to send only those. The bus sends all experts, while the CPU reads
    only the needed ones.
    """

    offload: float  # copies to the CPU and back, in addition to its computation
    cpu: float
    bus: float
    gpu: float
    cpu_memory: float  # host memory's time to supply the CPU
    bus_memory: float  # host memory's time to supply the bus
    resident: float  # the GPU's work on resident rows, done first

    @classmethod
    def of(cls, rates: Rates, sizes: Sizes, resident: int, rows: int, resident_ms: float) -> "_Times":
        others, touched = 1 - resident / sizes.rows, sizes.touched(rows, resident)
        sent_bytes, read_bytes = others * sizes.host_bytes, touched * sizes.host_bytes
        flops = 2 * sizes.used(resident) * sizes.parameters * rows
        # The GPU reads received weights, writes them unpacked, and reads the needed ones again to multiply.
        unpacking, reading = 0.0, read_bytes
        if sizes.unpacked_bytes:
            unpacking, reading = sent_bytes + others * sizes.unpacked_bytes, touched * sizes.unpacked_bytes
        gpu = unpacking / rates.gpu_bytes_per_s + max(
            reading / rates.gpu_bytes_per_s, flops / rates.gpu_flops
        )
        return cls(
            offload=rates.offload_ms + 1e3 * sizes.handed_bytes(rows, touched) / rates.bus_bytes_per_s,
            cpu=1e3 * max(read_bytes / rates.cpu_bytes_per_s, flops / rates.cpu_flops),
            bus=1e3 * sent_bytes / rates.bus_bytes_per_s,
            gpu=1e3 * gpu,
            cpu_memory=1e3 * read_bytes / rates.host_bytes_per_s,
            bus_memory=1e3 * sent_bytes / rates.host_bytes_per_s,
            resident=resident_ms,
        )

    def ms(self, share: float) -> float:
        on_cpu = self.offload + (1 - share) * self.cpu if share < 1 else 0.0
        memory = (1 - share) * self.cpu_memory + share * self.bus_memory
        return max(on_cpu, share * self.bus, self.resident + share * self.gpu, memory)

    def best_share(self) -> float:
        on_cpu = self.offload + self.cpu
        by_bus = on_cpu / (self.cpu + self.bus)
        by_gpu = (on_cpu - self.resident) / (self.cpu + self.gpu)
        crossing = max(min(by_bus, by_gpu), 0.0)
        if self.bus_memory > self.cpu_memory:  # unneeded experts cost memory bandwidth
            more = self.bus_memory - self.cpu_memory
            crossing = min(crossing, max((on_cpu - self.cpu_memory) / (self.cpu + more), 0.0))
        if crossing >= 1 or self.ms(1.0) < self.ms(crossing):
            return 1.0
        # If another part is the bottleneck, the CPU has time for more rows, and the bus is left to KV.
        return min(crossing, max((on_cpu - self.ms(crossing)) / self.cpu, 0.0))
