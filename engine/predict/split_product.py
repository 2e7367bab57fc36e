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

MOST = 0.9  # of experts: if so many are needed, all of them are


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast the sides of a machine are at products."""

    cpu_bytes_per_s: float  # of weights, in products of few rows
    cpu_flops: float  # in products of many rows
    bus_bytes_per_s: float  # from pinned host memory to the GPU
    gpu_bytes_per_s: float  # of weights in its own memory, in products of few rows
    gpu_flops: float  # in products of many rows
    hand_off_ms: float  # that few inputs take to the CPU and its outputs back
    host_bytes_per_s: float = inf  # what host memory gives to CPU and bus together


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one matrix, as if it were wholly at either place."""

    rows: int
    columns: int
    device_bytes: int
    host_bytes: int
    unpacked_bytes: int  # in the model's dtype, which streamed rows become before they are multiplied
    itemsize: int = 2  # of inputs and outputs
    unit: int = 64  # resident rows are multiples of it, or all
    used_share: float = 1.0  # of them by one row of inputs; less than 1: they are experts, a row for each
    handed: int = 0  # numbers of inputs and outputs of such a row; 0: of all columns and rows
    is_streamed: bool = True  # for products of many rows, if not for few; else the CPU has all of the others

    @property
    def parameters(self) -> int:
        """Weights."""
        return self.rows * self.columns

    def touched(self, rows: int) -> float:
        """Return the share of the weights that any of so many rows of inputs uses, chosen at random."""
        return 1 - (1 - self.used_share) ** rows

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
    resident, touched = resident_rows / sizes.rows, sizes.touched(rows)
    rows_each = rows * sizes.used_share / touched  # that what is touched is multiplied with
    device_ms = 1e3 * max(
        resident * touched * sizes.device_bytes / rates.gpu_bytes_per_s,
        2 * resident * touched * sizes.parameters * rows_each / rates.gpu_flops,
    )
    if resident_rows == sizes.rows:
        return ProductTime(device_ms, 0.0, 0.0)
    others = (1 - resident) * touched
    times = _Times.of(
        rates,
        others * sizes.host_bytes,
        others * sizes.parameters,
        rows_each,
        device_ms,
        others * sizes.unpacked_bytes,
        sizes.handed_bytes(rows, others),
    )
    if share is None:  # which experts are needed is known when it is too late to send them
        share = times.best_share() if sizes.is_streamed and touched >= MOST else 0.0
    return ProductTime(times.ms(share), (1 - share) * times.cpu, share)


class _Times(NamedTuple):
    """What the sides take for all of the weights in host memory, in ms."""

    hand_off: float  # to the CPU and back, beside its computing
    cpu: float
    bus: float
    gpu: float
    memory: float
    resident: float  # what the GPU does before

    @classmethod
    def of(
        cls,
        rates: Rates,
        host_bytes: float,
        parameters: float,
        rows: float,
        resident_ms: float,
        unpacked_bytes: float,
        handed_bytes: float,
    ) -> "_Times":
        # The GPU reads what came, writes it unpacked, and reads it again to multiply.
        packed = host_bytes + unpacked_bytes if unpacked_bytes else 0.0
        reading = (unpacked_bytes or host_bytes) / rates.gpu_bytes_per_s
        gpu = packed / rates.gpu_bytes_per_s + max(reading, 2 * parameters * rows / rates.gpu_flops)
        return cls(
            hand_off=rates.hand_off_ms + 1e3 * handed_bytes / rates.bus_bytes_per_s,
            cpu=1e3 * max(host_bytes / rates.cpu_bytes_per_s, 2 * parameters * rows / rates.cpu_flops),
            bus=1e3 * host_bytes / rates.bus_bytes_per_s,
            gpu=1e3 * gpu,
            memory=1e3 * host_bytes / rates.host_bytes_per_s,
            resident=resident_ms,
        )

    def ms(self, share: float) -> float:
        """Return the time of the product if this share is streamed."""
        on_cpu = self.hand_off + (1 - share) * self.cpu if share < 1 else 0.0
        return max(on_cpu, share * self.bus, self.resident + share * self.gpu, self.memory)

    def best_share(self) -> float:
        """Return the share that takes the least time."""
        on_cpu = self.hand_off + self.cpu
        by_bus = on_cpu / (self.cpu + self.bus)
        by_gpu = (on_cpu - self.resident) / (self.cpu + self.gpu)
        crossing = max(min(by_bus, by_gpu), 0.0)
        if crossing >= 1:
            return 1.0
        # Where others hold the product up, the CPU has time for more, and the bus is left to KV.
        return min(crossing, max((on_cpu - self.ms(crossing)) / self.cpu, 0.0))
