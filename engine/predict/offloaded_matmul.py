"""One product of weights that are divided between GPU and CPU: how, and how long it takes.

After HeteGen (its paper's sections 3.2 and 4.4). Of a matrix, some output rows are resident on the GPU; the
others lie in host memory. For each product a share of those crosses the bus to be computed on the GPU, while
the CPU computes the rest next to where it lies:

    GPU    | resident rows | streamed rows, as they come |
    bus    | streamed rows, ahead of the product         |
    CPU    | inputs | the other rows           | outputs |
    memory | streamed and other rows, read once          |
           <------------- time of the product ---------->

The share that is streamed, the paper's α, is where the CPU's time and that of bus and GPU cross. For one row
both read weights only, and the faster one gets more of them. For a prompt the CPU would have to multiply far
more than it can, and nearly everything is streamed.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast the sides of a machine are at products."""

    cpu_bytes_per_s: float  # of weights, in products of few rows
    cpu_flops: float  # in products of many rows
    bus_bytes_per_s: float  # from pinned host memory to the GPU
    gpu_bytes_per_s: float  # of weights in its own memory, in products of few rows
    gpu_flops: float  # in products of many rows
    offload_ms: float  # that few inputs take to the CPU and its outputs back
    host_bytes_per_s: float = inf  # what host memory gives to CPU and bus together


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one matrix, as if it were wholly at either tier."""

    rows: int
    columns: int
    device_bytes: int
    host_bytes: int
    unpacked_bytes: int  # in the model's dtype, which streamed rows become before they are multiplied
    itemsize: int = 2  # of inputs and outputs
    unit: int = 64  # resident rows are multiples of it, or all
    used_share: float = 1.0  # of them by one row of inputs; less than 1: they are experts, a row for each
    handed: int = 0  # numbers of inputs and outputs of such a row; 0: of all columns and rows

    @property
    def parameters(self) -> int:
        """Weights."""
        return self.rows * self.columns

    @property
    def is_experts(self) -> bool:
        """Whether it is a layer's experts, a row each."""
        return self.used_share < 1

    def used(self, first: int = 0) -> float:
        """Return the share of the weights that one row of inputs uses, from a first row of them on."""
        return self.touched(1, first)

    def touched(self, rows: int, first: int = 0) -> float:
        """Return the share of the weights that any row of inputs uses.

        Args:
            rows: of inputs, which use experts at random.
            first: rows of the weights before this one do not count.
        """
        used = 1 - (1 - self.used_share) ** rows if self.is_experts else 1.0
        return used * (1 - first / self.rows)

    def handed_bytes(self, rows: int, others: float) -> float:
        """Return the bytes of inputs and outputs, of so many rows of them, where the CPU has this share."""
        return rows * (self.handed or self.columns + others * self.rows) * self.itemsize


class ProductTime(NamedTuple):
    """What one product takes."""

    ms: float
    host_ms: float  # of that, how long the CPU computes
    streamed_share: float  # of what is in host memory


def product_time(
    rates: Rates, sizes: Sizes, resident_rows: int, rows: int, share: float | None = None
) -> ProductTime:
    """Predict the product of some rows with a matrix of which so many rows are resident.

    `share` is that of the others that is streamed; None: the best.
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
    """What the sides take for all of the weights in host memory, in ms.

    Which experts are needed is known when it is too late to send them: all come, while the CPU reads those
    that are.
    """

    offload: float  # to the CPU and back, beside its computing
    cpu: float
    bus: float
    gpu: float
    cpu_memory: float  # what it takes host memory to give the CPU its weights
    bus_memory: float  # likewise the bus
    resident: float  # what the GPU does before

    @classmethod
    def of(cls, rates: Rates, sizes: Sizes, resident: int, rows: int, resident_ms: float) -> "_Times":
        """Return those of the weights behind the resident rows, for so many rows of inputs."""
        others, touched = 1 - resident / sizes.rows, sizes.touched(rows, resident)
        sent_bytes, read_bytes = others * sizes.host_bytes, touched * sizes.host_bytes
        flops = 2 * sizes.used(resident) * sizes.parameters * rows
        # The GPU reads what came, writes it unpacked, and reads what it needs of that again to multiply.
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
        """Return the time of the product if this share is streamed."""
        on_cpu = self.offload + (1 - share) * self.cpu if share < 1 else 0.0
        memory = (1 - share) * self.cpu_memory + share * self.bus_memory
        return max(on_cpu, share * self.bus, self.resident + share * self.gpu, memory)

    def best_share(self) -> float:
        """Return the share that takes the least time."""
        on_cpu = self.offload + self.cpu
        by_bus = on_cpu / (self.cpu + self.bus)
        by_gpu = (on_cpu - self.resident) / (self.cpu + self.gpu)
        crossing = max(min(by_bus, by_gpu), 0.0)
        if self.bus_memory > self.cpu_memory:  # what nobody needs is read, too
            more = self.bus_memory - self.cpu_memory
            crossing = min(crossing, max((on_cpu - self.cpu_memory) / (self.cpu + more), 0.0))
        if crossing >= 1 or self.ms(1.0) < self.ms(crossing):
            return 1.0
        # Where others hold the product up, the CPU has time for more, and the bus is left to KV.
        return min(crossing, max((on_cpu - self.ms(crossing)) / self.cpu, 0.0))
