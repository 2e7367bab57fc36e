"""Which rows of the matrices stay on the GPU where not all of them fit, and who computes the others.

After HeteGen (its paper's sections 3.2, 4.4 and 4.5). Of a matrix, some output rows are resident; the others
lie in host memory. For each product a share of those crosses the bus to be computed on the GPU, while the CPU
computes the rest next to where it lies:

    GPU    | resident rows | streamed rows, as they come |
    bus    | streamed rows, ahead of the product         |
    CPU    | the other rows                              |
    memory | both of them, read once                     |
           <------------- time of the product ---------->  and the hand-off to the CPU and back

The share that is streamed, the paper's α, is where the CPU's time and that of bus and GPU cross. For one row
both read weights only, and the faster one gets more of them. For a prompt the CPU would have to multiply far
more than it can, and nearly everything is streamed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import inf, log
from typing import NamedTuple

import torch

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.protocol import LinearForm
from neo_desktop.models.stored_form import StoredForm

RESIDENT_ROWS = 64  # resident rows come in multiples of this, or all
_STEPS = 16  # in which a matrix is looked at
_STRAIGHT = 0.02  # gains that differ by less are one step

# What a plan is made for: rows of a product -> how often it occurs. A chat of one person: each token of an
# answer is one row, and for some 200 of them a prompt of about 1,000 tokens is read.
ONE_CHAT: Mapping[int, float] = {1: 1.0, 1000: 1 / 200}


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast the sides of a machine are at products."""

    cpu_bytes_per_s: float  # of weights, in products of few rows
    cpu_flops: float  # in products of many rows
    bus_bytes_per_s: float  # from pinned host memory to the GPU
    gpu_bytes_per_s: float  # of weights in its own memory, in products of few rows
    gpu_flops: float  # in products of many rows
    hand_off_ms: float  # what a product takes longer because the CPU takes part
    host_bytes_per_s: float = inf  # what host memory gives to CPU and bus together


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one matrix, as if it were wholly at either place."""

    rows: int
    columns: int
    device_bytes: int
    host_bytes: int
    unpacked_bytes: int  # in the model's dtype, which streamed rows become before they are multiplied

    @property
    def parameters(self) -> int:
        """Weights."""
        return self.rows * self.columns


class ProductTime(NamedTuple):
    """What one product takes."""

    ms: float
    host_ms: float  # of that, how long the CPU computes
    streamed_share: float  # of what is in host memory


class WeightTimes(NamedTuple):
    """What the products of all layers take."""

    ms: float
    host_ms: float  # of that, how long the CPU computes
    streamed_bytes: float


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Where the weights lie."""

    resident_rows: Mapping[str, int]  # "3.qkv" -> the first rows, on the GPU: all, or a multiple of 64
    gpu_bytes: int  # with embeddings, head, norms and biases
    host_bytes: int

    @property
    def is_split(self) -> bool:
        """Whether some are in host memory."""
        return self.host_bytes > 0


def streamed_share(
    rates: Rates,
    host_bytes: float,
    parameters: float,
    rows: int,
    *,
    resident_ms: float = 0.0,
    unpacked_bytes: float = 0.0,
) -> float:
    """Return α: which share of the weights in host memory is to cross the bus for a product, 0 to 1.

    Args:
        host_bytes: of the weights in host memory.
        parameters: their number.
        rows: of the product.
        resident_ms: what the GPU needs for resident rows, before it can begin with streamed ones.
        unpacked_bytes: of them in the model's dtype; 0: nothing is unpacked.
    """
    times = _Times.of(rates, host_bytes, parameters, rows, resident_ms, unpacked_bytes)
    return times.best_share(rates.hand_off_ms)


def product_time(rates: Rates, sizes: Sizes, resident_rows: int, rows: int) -> ProductTime:
    """Predict the product of some rows with a matrix of which so many rows are resident."""
    resident = resident_rows / sizes.rows
    device_ms = 1e3 * max(
        resident * sizes.device_bytes / rates.gpu_bytes_per_s,
        2 * resident * sizes.parameters * rows / rates.gpu_flops,
    )
    if resident_rows == sizes.rows:
        return ProductTime(device_ms, 0.0, 0.0)
    others = 1 - resident
    times = _Times.of(
        rates,
        others * sizes.host_bytes,
        others * sizes.parameters,
        rows,
        device_ms,
        others * sizes.unpacked_bytes,
    )
    share = times.best_share(rates.hand_off_ms)
    hand_off_ms = rates.hand_off_ms if share < 1 else 0.0
    return ProductTime(times.ms(share) + hand_off_ms, (1 - share) * times.cpu, share)


def crossing_share(shares: Sequence[float], host_ms: Sequence[float], device_ms: Sequence[float]) -> float:
    """Return the share at which two measured times are the same: the paper's section 4.4.

    A straight line is laid through each; neither is proportional to its part of the weights.

    Args:
        shares: that were streamed, at least two different ones.
        host_ms: what the CPU took for the rest.
        device_ms: what bus and GPU took.
    """
    mean = sum(shares) / len(shares)
    spread = sum((share - mean) ** 2 for share in shares)

    def line(times: Sequence[float]) -> tuple[float, float]:
        level = sum(times) / len(times)
        slope = sum((share - mean) * ms for share, ms in zip(shares, times, strict=True)) / spread
        return level - slope * mean, slope

    (host_at_0, host_slope), (device_at_0, device_slope) = line(host_ms), line(device_ms)
    closing = device_slope - host_slope
    if closing <= 0:  # noise alone: whoever is faster computes everything
        return 0.0 if sum(host_ms) <= sum(device_ms) else 1.0
    return min(max((host_at_0 - device_at_0) / closing, 0.0), 1.0)


def host_form(form: LinearForm) -> LinearForm:
    """Return the form that rows in host memory have if others have this one on a GPU."""
    return replace(form, kernels=None) if isinstance(form, StoredForm) else form


def layer_matrices(config: ModelConfig, form: LinearForm, dtype: torch.dtype) -> dict[str, Sizes]:
    """Return `name -> sizes` of all matrices that may be divided: embeddings and head may not."""
    on_host = host_form(form)
    return {
        name: Sizes(
            matrix.rows,
            matrix.columns,
            form.named(name).nbytes(matrix.rows, matrix.columns, dtype),
            on_host.named(name).nbytes(matrix.rows, matrix.columns, dtype),
            matrix.rows * matrix.columns * dtype.itemsize,
        )
        for name, matrix in config.each_matrix()
        if name != "head"
    }


def least_gpu_bytes(config: ModelConfig, form: LinearForm, dtype: torch.dtype) -> int:
    """Return the bytes of what is always on the GPU: embeddings, head, norms and biases."""
    divided = sum(sizes.device_bytes for sizes in layer_matrices(config, form, dtype).values())
    return config.weight_bytes(dtype, form) - divided


def plan_weights(
    config: ModelConfig,
    form: LinearForm,
    dtype: torch.dtype,
    gpu_bytes: int,
    rates: Rates,
    load: Mapping[int, float] = ONE_CHAT,
) -> WeightPlan:
    """Decide which rows are resident, greedily by the time that they save per byte.

    Rows are equal as long as CPU and bus take longer for the others than the GPU for them: each matrix then
    gets as many, so that none of the three ever waits. Beyond that a row only brings anything if it is the
    last one: a matrix that is wholly resident saves its hand-off, which is much for small ones. What brings
    nothing stays in host memory, where the CPU is faster at it than the GPU would be on top of the others.

    Args:
        gpu_bytes: the most that weights may take on the GPU.
        load: rows of a product -> how often it occurs.

    Raises:
        MemoryError: they do not even hold what is always on the GPU.
    """
    matrices = layer_matrices(config, form, dtype)
    always = config.weight_bytes(dtype, form) - sum(sizes.device_bytes for sizes in matrices.values())
    if gpu_bytes < always:
        raise MemoryError(
            f"embeddings, head and norms of this model take {always / 1e9:.2f} GB and have to be in GPU "
            f"memory, but there are {max(gpu_bytes, 0) / 1e9:.2f} GB for weights: allow more GPU memory, "
            "close other programs, or choose a smaller or a quantised model"
        )
    alike: dict[Sizes, list[str]] = defaultdict(list)
    for name, sizes in matrices.items():
        alike[sizes].append(name)
    resident = dict.fromkeys(matrices, 0)
    left: float = gpu_bytes - always
    steps = [step for sizes in alike for step in _worthwhile_steps(rates, sizes, load)]
    for _, equal in groupby(sorted(steps, key=_Step.turn), key=_Step.turn):
        # Those that bring the same have equal parts in what is left.
        takers = [
            (step, [name for name in alike[step.sizes] if resident[name] == step.start]) for step in equal
        ]
        wanted = sum(step.nbytes * len(names) for step, names in takers)
        for step, names in takers:
            most = step.nbytes * len(names)
            taken = _take(step, names, left * min(most / wanted, 1.0) if wanted > left else most, resident)
            wanted, left = wanted - most, left - taken
    parts = [(sizes, resident[name] / sizes.rows) for name, sizes in matrices.items()]
    return WeightPlan(
        resident,
        gpu_bytes=always + round(sum(share * sizes.device_bytes for sizes, share in parts)),
        host_bytes=round(sum((1 - share) * sizes.host_bytes for sizes, share in parts)),
    )


def weight_times(matrices: Mapping[str, Sizes], plan: WeightPlan, rates: Rates, rows: int) -> WeightTimes:
    """Predict the products of all layers for so many rows; see `layer_matrices`."""
    alike: dict[tuple[Sizes, int], int] = defaultdict(int)
    for name, sizes in matrices.items():
        alike[sizes, plan.resident_rows[name]] += 1
    ms = host_ms = streamed = 0.0
    for (sizes, resident), count in alike.items():
        time = product_time(rates, sizes, resident, rows)
        ms += count * time.ms
        host_ms += count * time.host_ms
        streamed += count * time.streamed_share * (1 - resident / sizes.rows) * sizes.host_bytes
    return WeightTimes(ms, host_ms, streamed)


def bound_ms(plan: WeightPlan, rates: Rates) -> float:
    """Return the least time of one row: weights in host memory over what CPU and bus read together."""
    together = min(rates.cpu_bytes_per_s + rates.bus_bytes_per_s, rates.host_bytes_per_s)
    return 1e3 * max(plan.host_bytes / together, plan.gpu_bytes / rates.gpu_bytes_per_s)


class _Times(NamedTuple):
    """What the sides take for all of the weights in host memory, in ms."""

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
        rows: int,
        resident_ms: float,
        unpacked_bytes: float,
    ) -> "_Times":
        # The GPU reads what came, writes it unpacked, and reads it again to multiply.
        packed = host_bytes + unpacked_bytes if unpacked_bytes else 0.0
        reading = (unpacked_bytes or host_bytes) / rates.gpu_bytes_per_s
        gpu = packed / rates.gpu_bytes_per_s + max(reading, 2 * parameters * rows / rates.gpu_flops)
        return cls(
            cpu=1e3 * max(host_bytes / rates.cpu_bytes_per_s, 2 * parameters * rows / rates.cpu_flops),
            bus=1e3 * host_bytes / rates.bus_bytes_per_s,
            gpu=1e3 * gpu,
            memory=1e3 * host_bytes / rates.host_bytes_per_s,
            resident=resident_ms,
        )

    def ms(self, share: float) -> float:
        """Return the time of the product if this share is streamed, without a hand-off."""
        return max((1 - share) * self.cpu, share * self.bus, self.resident + share * self.gpu, self.memory)

    def best_share(self, hand_off_ms: float) -> float:
        """Return the share that takes the least time."""
        if self.cpu <= 0:
            return 0.0
        by_bus = self.cpu / (self.cpu + self.bus)
        by_gpu = (self.cpu - self.resident) / (self.cpu + self.gpu)
        crossing = max(min(by_bus, by_gpu), 0.0)
        # Where others hold the product up, the CPU has time for more, and the bus is left to KV.
        held_up = self.ms(crossing)
        share = min(crossing, max(1 - held_up / self.cpu, 0.0))
        return share if self.ms(share) + hand_off_ms < self.ms(1.0) else 1.0


class _Step(NamedTuple):
    """Some more rows of matrices of one kind."""

    sizes: Sizes
    start: int
    end: int
    gain: float  # ms per byte

    def turn(self) -> tuple[int, bool]:
        """Whose turn it is, by gains on a scale where a hundredth more is the same."""
        return -round(100 * log(self.gain)), self.completes

    @property
    def nbytes(self) -> float:
        return (self.end - self.start) * self.row_bytes

    @property
    def row_bytes(self) -> float:
        return self.sizes.device_bytes / self.sizes.rows

    @property
    def completes(self) -> bool:
        """Whether all rows are resident after it: part of it would not save the hand-off."""
        return self.end == self.sizes.rows


def _worthwhile_steps(rates: Rates, sizes: Sizes, load: Mapping[int, float]) -> list[_Step]:
    """Return what shortens products, each step more per byte than the next."""
    width = max(sizes.rows // _STEPS // RESIDENT_ROWS, 1) * RESIDENT_ROWS
    points = [
        (rows, sum(times * product_time(rates, sizes, rows, n).ms for n, times in load.items()))
        for rows in (*range(0, sizes.rows, width), sizes.rows)
    ]
    hull: list[tuple[int, float]] = []  # convex from below; what is nearly straight is one step
    for rows, ms in points:
        straight = 1.0 if rows == sizes.rows else 1 - _STRAIGHT
        while len(hull) > 1 and _slope(hull[-2], (rows, ms)) <= straight * _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((rows, ms))
    bytes_per_row = sizes.device_bytes / sizes.rows
    return [
        _Step(sizes, a[0], b[0], gain)
        for a, b in pairwise(hull)
        if (gain := -_slope(a, b) / bytes_per_row) > 0
    ]


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def _take(step: _Step, names: Sequence[str], left: float, resident: dict[str, int]) -> float:
    """Let as many of these matrices take the step as there is room for, spread evenly; return its bytes."""
    if step.completes:
        for name in _spread(names, int(left // step.nbytes)):
            resident[name] = step.end
    else:
        pieces = (step.end - step.start) // RESIDENT_ROWS
        each, more = divmod(int(left // (RESIDENT_ROWS * step.row_bytes)), max(len(names), 1))
        for name in names:
            resident[name] += RESIDENT_ROWS * min(each, pieces)
        if each < pieces:
            for name in _spread(names, more):
                resident[name] += RESIDENT_ROWS
    return sum(resident[name] - step.start for name in names) * step.row_bytes


def _spread(names: Sequence[str], count: int) -> list[str]:
    """Return so many of them, at even distances."""
    count = min(count, len(names))
    return [names[index * len(names) // count] for index in range(count)]
