"""Which rows of the matrices stay on the GPU where not all of them fit: HeteGen's module scheduler.

See its paper's section 4.5, and `offloaded_matmul` for what becomes of the others.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

import torch

from neo_desktop.engine.predict.offloaded_matmul import Rates, Sizes, product_time
from neo_desktop.models.config import Matrix, ModelConfig
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.stored_form import StoredForm

EXPERTS = "experts"  # what a layer's are called together; of them some are resident
_PARTS = ("experts_gate", "experts_up", "experts_down")  # what each of them consists of
_ALWAYS = ("head", "router")  # on the GPU
_STEPS = 16  # in which a matrix is looked at
_ALIKE = 0.1  # gains that differ by less count as the same
_STRAIGHT = 0.12  # likewise of one matrix: they are one step

# What a plan is made for: rows of a product -> how often it occurs. A chat of one person: each token of an
# answer is one row, and for some 200 of them a prompt of about 1,000 tokens is read.
ONE_CHAT: Mapping[int, float] = {1: 1.0, 1000: 1 / 200}


class WeightTimes(NamedTuple):
    """What the products of all layers take."""

    ms: float
    host_ms: float  # of that, how long the CPU computes
    streamed_bytes: float


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Where the weights lie."""

    # "3.qkv" -> the first rows, on the GPU: all, or a multiple of 64; "3.experts" -> the first of them
    resident_rows: Mapping[str, int]
    gpu_bytes: int  # with embeddings, head, norms and biases
    host_bytes: int

    @property
    def is_split(self) -> bool:
        """Whether some are in host memory."""
        return self.host_bytes > 0


def host_form(form: WeightFormat) -> Dense:
    """Return the form that rows in host memory have if others have this one on a GPU."""
    return replace(form, kernels=None) if isinstance(form, StoredForm) else DENSE


def layer_matrices(config: ModelConfig, form: WeightFormat, dtype: torch.dtype) -> dict[str, Sizes]:
    """Return `name -> sizes` of all that may be divided: not embeddings, head and routers.

    A layer's experts are one, "3.experts", with a row for each of them.
    """
    on_host = host_form(form)

    def sizes(name: str, matrix: Matrix) -> Sizes:
        return Sizes(
            matrix.rows,
            matrix.columns,
            form.named(name).nbytes(matrix.rows, matrix.columns, dtype),
            on_host.named(name).nbytes(matrix.rows, matrix.columns, dtype),
            matrix.rows * matrix.columns * dtype.itemsize,
            dtype.itemsize,
        )

    stays = {name for name, m in config.each_matrix() if name.split(".")[-1] in _ALWAYS}
    if config.experts is None:  # those of a traced model are not divided
        stays |= {name for name, m in config.each_matrix() if m.experts}
    found = {name: sizes(name, m) for name, m in config.each_matrix() if name not in stays}
    if config.experts is None:
        return found
    for layer in config.experts.layers:
        parts = [found.pop(f"{layer}.{part}") for part in _PARTS]
        found[f"{layer}.{EXPERTS}"] = Sizes(
            config.experts.count,
            sum(part.parameters for part in parts) // config.experts.count,
            sum(part.device_bytes for part in parts),
            sum(part.host_bytes for part in parts),
            sum(part.unpacked_bytes for part in parts),
            dtype.itemsize,
            unit=1,
            used_share=config.experts.per_token / config.experts.count,
            handed=2 * config.hidden_size,
        )
    return found


def _with_parts(resident: Mapping[str, int], config: ModelConfig) -> dict[str, int]:
    """Return the rows of experts' matrices, too."""
    rows = dict(resident)
    if config.experts is not None:
        for layer, part in product(config.experts.layers, _PARTS):
            of_each = config.matrices[part].rows // config.experts.count
            rows[f"{layer}.{part}"] = resident[f"{layer}.{EXPERTS}"] * of_each
    return rows


def least_gpu_bytes(config: ModelConfig, form: WeightFormat, dtype: torch.dtype) -> int:
    """Return the bytes of what is always on the GPU: embeddings, head, norms, routers and biases."""
    divided = sum(sizes.device_bytes for sizes in layer_matrices(config, form, dtype).values())
    return config.weight_bytes(dtype, form) - divided


def plan_weights(
    config: ModelConfig,
    form: WeightFormat,
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
        has_experts = config.experts is None and any(m.experts for _, m in config.each_matrix())
        what = "embeddings, head, norms and experts" if has_experts else "embeddings, head and norms"
        raise MemoryError(
            f"{what} of this model take {always / 1e9:.2f} GB and have to be in GPU "
            f"memory, but there are {max(gpu_bytes, 0) / 1e9:.2f} GB for weights: allow more GPU memory, "
            "close other programs, or choose a smaller or a quantised model"
        )
    alike: dict[Sizes, list[str]] = defaultdict(list)
    for name, sizes in matrices.items():
        alike[sizes].append(name)
    resident = dict.fromkeys(matrices, 0)
    left: float = gpu_bytes - always
    steps = [step for sizes in alike for step in _worthwhile_steps(rates, sizes, load)]
    for equal in _by_gain(steps):
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
        _with_parts(resident, config),
        gpu_bytes=always + round(sum(share * sizes.device_bytes for sizes, share in parts)),
        host_bytes=round(sum((1 - share) * sizes.host_bytes for sizes, share in parts)),
    )


def plan_layers(config: ModelConfig, form: WeightFormat, dtype: torch.dtype, gpu_bytes: int) -> WeightPlan:
    """Put the first layers on the GPU, as many as fit, and the others in host memory, as llama.cpp does.

    Of a mixture all but the experts comes first. Nothing is divided: this is for comparisons.

    Args:
        gpu_bytes: the most that weights may take on the GPU; at least `least_gpu_bytes`.
    """
    matrices = layer_matrices(config, form, dtype)
    taken = least_gpu_bytes(config, form, dtype)
    layers: dict[tuple[bool, int], list[str]] = defaultdict(list)
    for name, sizes in matrices.items():
        layers[sizes.used_share < 1, int(name.split(".")[0])].append(name)
    resident = dict.fromkeys(matrices, 0)
    on_host = sum(sizes.host_bytes for sizes in matrices.values())
    for _, names in sorted(layers.items()):
        nbytes = sum(matrices[name].device_bytes for name in names)
        if taken + nbytes > gpu_bytes:
            break
        taken += nbytes
        on_host -= sum(matrices[name].host_bytes for name in names)
        resident |= {name: matrices[name].rows for name in names}
    return WeightPlan(_with_parts(resident, config), taken, on_host)


def weight_times(
    matrices: Mapping[str, Sizes], plan: WeightPlan, rates: Rates, rows: int, share: float | None = None
) -> WeightTimes:
    """Predict the products of all layers for so many rows; see `layer_matrices` and `product_time`."""
    alike: dict[tuple[Sizes, int], int] = defaultdict(int)
    for name, sizes in matrices.items():
        alike[sizes, plan.resident_rows[name]] += 1
    ms = host_ms = streamed = 0.0
    for (sizes, resident), count in alike.items():
        time = product_time(rates, sizes, resident, rows, share)
        ms += count * time.ms
        host_ms += count * time.host_ms
        streamed += count * time.streamed_share * (1 - resident / sizes.rows) * sizes.host_bytes
    return WeightTimes(ms, host_ms, streamed)


def bound_ms(matrices: Mapping[str, Sizes], plan: WeightPlan, rates: Rates) -> float:
    """Return what the products of one row take at least, for all layers.

    That is weights in host memory over what CPU and bus read together, or the others over what the GPU does;
    of experts, as many as one row needs.
    """
    together = min(rates.cpu_bytes_per_s + rates.bus_bytes_per_s, rates.host_bytes_per_s)
    on_host = resident = 0.0
    for name, sizes in matrices.items():
        others = sizes.used(plan.resident_rows[name])
        on_host += others * sizes.host_bytes
        resident += (sizes.used() - others) * sizes.device_bytes
    return 1e3 * max(on_host / together, resident / rates.gpu_bytes_per_s)


class _Step(NamedTuple):
    """Some more rows of matrices of one kind."""

    sizes: Sizes
    start: int
    end: int
    gain: float  # ms per byte
    is_whole: bool  # a part of it would bring less per byte: it would not save a hand-off

    @property
    def nbytes(self) -> float:
        return (self.end - self.start) * self.row_bytes

    @property
    def row_bytes(self) -> float:
        return self.sizes.device_bytes / self.sizes.rows


def _by_gain(steps: Iterable[_Step]) -> Iterator[list[_Step]]:
    """Yield steps that bring about the same, the best first; of these, those that can be divided."""
    left = sorted(steps, key=lambda step: -step.gain)
    while left:
        alike = [step for step in left if step.gain > (1 - _ALIKE) * left[0].gain]
        left = left[len(alike) :]
        parted = [step for step in alike if not step.is_whole]
        yield from (group for group in (parted, [step for step in alike if step.is_whole]) if group)


def _worthwhile_steps(rates: Rates, sizes: Sizes, load: Mapping[int, float]) -> list[_Step]:
    """Return what shortens products, each step more per byte than the next."""
    width = max(sizes.rows // _STEPS // sizes.unit, 1) * sizes.unit
    points = [
        (rows, sum(times * product_time(rates, sizes, rows, n).ms for n, times in load.items()))
        for rows in (*range(0, sizes.rows, width), sizes.rows)
    ]
    hull: list[tuple[int, float]] = []  # convex from below; what is nearly straight is one step
    for rows, ms in points:
        straight = 1.0 if rows == sizes.rows else 1 - _STRAIGHT
        while len(hull) > 1 and _slope(hull[-1], (rows, ms)) <= straight * _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((rows, ms))
    bytes_per_row = sizes.device_bytes / sizes.rows
    steps = []
    for start, end in pairwise(hull):
        slope = _slope(start, end)
        if slope < 0:
            # Where products in between take longer than on a straight line, parts of the step are worth less.
            above = [
                ms - start[1] - slope * (rows - start[0]) for rows, ms in points if start[0] < rows < end[0]
            ]
            is_whole = end[0] == sizes.rows or max(above, default=0.0) > _STRAIGHT * (start[1] - end[1])
            steps.append(_Step(sizes, start[0], end[0], -slope / bytes_per_row, is_whole))
    return steps


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def _take(step: _Step, names: Sequence[str], left: float, resident: dict[str, int]) -> float:
    """Let as many of these matrices take the step as there is room for, spread evenly; return its bytes."""
    if step.is_whole:
        for name in _spread(names, int(left // step.nbytes)):
            resident[name] = step.end
    else:
        unit = step.sizes.unit
        pieces = (step.end - step.start) // unit
        each, more = divmod(int(left // (unit * step.row_bytes)), max(len(names), 1))
        for name in names:
            resident[name] += unit * min(each, pieces)
        if each < pieces:
            for name in _spread(names, more):
                resident[name] += unit
    return sum(resident[name] - step.start for name in names) * step.row_bytes


def _spread(names: Sequence[str], count: int) -> list[str]:
    """Return so many of them, at even distances."""
    count = min(count, len(names))
    return [names[index * len(names) // count] for index in range(count)]
