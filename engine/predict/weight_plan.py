"""Placement of weights that do not all fit on the GPU: HeteGen's module scheduler.

See the paper's section 4.5. `offloaded_matmul` computes with the weights in host memory.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from neo_desktop.engine.predict.offloaded_matmul import Rates, Sizes, product_time
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import MoveBudget
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.matrices import OF_HEADS, Matrix
from neo_desktop.models.stored_form import StoredForm

EXPERTS = "experts"  # name of a layer's experts as one matrix, some rows of which are resident
_PARTS = ("experts_gate", "experts_up", "experts_down")  # an expert's matrices;
_ALWAYS = ("head", "router", *OF_HEADS)  # always on the GPU
_STEPS = 16  # resolution of a matrix
_ALIKE = 0.1  # gains that differ by less are equal;
_STRAIGHT = 0.12  # slopes within one matrix that differ by less are one step

# Workload of the plan: rows of a matmul -> frequency. One user's chat: each output token is one row, and some
# 200 rows follow a prompt of about 1,000 tokens.
ONE_CHAT: Mapping[int, float] = {1: 1.0, 1000: 1 / 200}


class WeightTimes(NamedTuple):
    """Total of the matmuls in every layer."""

    ms: float
    host_ms: float  # the part in which the CPU computes
    streamed_bytes: float


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Placement of the weights."""

    # "3.qkv" -> number of first rows on the GPU: all, or a multiple of 64; "3.experts" -> number of experts
    resident_rows: Mapping[str, int]
    gpu_bytes: int  # including head, norms and biases
    host_bytes: int
    moves: MoveBudget | None = None  # experts move, and all are in host memory; None: they stay
    device_tokens: int | None = None  # tokens whose KV has room on the GPU; None: the plan leaves that open

    @property
    def is_split(self) -> bool:
        """True if some weights are in host memory."""
        return self.host_bytes > 0


def host_form(form: WeightFormat) -> Dense:
    """Return the format of the host rows of a matrix with this format on a GPU."""
    return replace(form, kernels=None, tables=None) if isinstance(form, StoredForm) else DENSE


def layer_matrices(config: ModelConfig, form: WeightFormat, dtype: torch.dtype) -> dict[str, Sizes]:
    """Return `name -> sizes` of the matrices that may be divided: not embeddings, head, routers and those of
    heads.

    A layer's experts are one matrix, "3.experts", with one row per expert.
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
    if config.experts is None:  # experts of layers that differ are not divided
        stays |= {name for name, m in config.each_matrix() if m.experts}
    matrices = {name: sizes(name, m) for name, m in config.each_matrix() if name not in stays}
    if config.experts is None:
        return matrices
    for layer in config.experts.layers:
        names = [f"{layer}.{part}" for part in _PARTS]
        parts = [matrices.pop(name) for name in names if name in matrices]  # some experts have no gates
        matrices[f"{layer}.{EXPERTS}"] = Sizes(
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
    return matrices


def with_parts(resident: Mapping[str, int], config: ModelConfig) -> dict[str, int]:
    """Add the resident rows of the experts' matrices."""
    rows = dict(resident)
    for name, matrix in config.each_matrix() if config.experts is not None else ():
        if matrix.experts:
            layer = name.partition(".")[0]
            rows[name] = resident[f"{layer}.{EXPERTS}"] * matrix.rows // matrix.experts
    return rows


def slotted_experts(
    config: ModelConfig, form: WeightFormat, matrices: Mapping[str, Sizes], plan: WeightPlan
) -> list[tuple[Sizes, int]]:
    """Return the layers' experts that can move, with their number on the GPU.

    A layer's experts can move if some are on the GPU and some are not, and all have one format.

    Args:
        matrices: see `layer_matrices`.
    """
    on_host = host_form(form)
    found = []
    for layer in () if config.experts is None else config.experts.layers:
        sizes, resident = matrices[f"{layer}.{EXPERTS}"], plan.resident_rows[f"{layer}.{EXPERTS}"]
        if 0 < resident < sizes.rows:
            if any(len(on_host.named(f"{layer}.{part}").parts) > 1 for part in _PARTS):
                return []
            found.append((sizes, resident))
    return found


def least_gpu_bytes(config: ModelConfig, form: WeightFormat, dtype: torch.dtype) -> int:
    """Return the bytes that are always on the GPU: head, norms, routers, biases, and embeddings if tied."""
    divided = sum(sizes.device_bytes for sizes in layer_matrices(config, form, dtype).values())
    return config.weight_bytes(dtype, form) - divided


def plan_weights(
    config: ModelConfig,
    form: WeightFormat,
    dtype: torch.dtype,
    gpu_bytes: int,
    rates: Rates,
) -> WeightPlan:
    """Choose resident rows greedily by the time saved per byte.

    While CPU and bus take longer for the other rows than the GPU for its own, all rows are equally valuable:
    each matrix gets the same share, so that no side waits. Beyond that only the last row of a matrix gains
    anything: a fully resident matrix needs no copies of inputs and outputs, a large saving for small ones.
    Rows without gain stay in host memory, where the CPU multiplies them faster than the GPU could in
    addition.

    Raises:
        MemoryError: the limit is too small for the weights that must be on the GPU.
    """
    matrices = layer_matrices(config, form, dtype)
    always = config.weight_bytes(dtype, form) - sum(sizes.device_bytes for sizes in matrices.values())
    if gpu_bytes < always:
        has_experts = config.experts is None and any(m.experts for _, m in config.each_matrix())
        what = "head, norms and experts" if has_experts else "head and norms"
        if form.tables is None or config.tie_word_embeddings:
            what = f"embeddings, {what}"
        raise MemoryError(
            f"{what} of this model take {always / 1e9:.2f} GB and must be in GPU memory, "
            f"but only {max(gpu_bytes, 0) / 1e9:.2f} GB are free for weights: allow more GPU memory, "
            "close other programs, or choose a smaller or a quantised model"
        )
    alike: dict[Sizes, list[str]] = defaultdict(list)
    for name, sizes in matrices.items():
        alike[sizes].append(name)
    resident = dict.fromkeys(matrices, 0)
    left: float = gpu_bytes - always
    steps = [step for sizes in alike for step in _worthwhile_steps(rates, sizes)]
    for equal in _by_gain(steps):
        # Steps of equal gain share the remaining bytes proportionally.
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
        with_parts(resident, config),
        gpu_bytes=always + round(sum(share * sizes.device_bytes for sizes, share in parts)),
        host_bytes=round(sum((1 - share) * sizes.host_bytes for sizes, share in parts)),
    )


def weight_times(
    matrices: Mapping[str, Sizes], plan: WeightPlan, rates: Rates, rows: int, share: float | None = None
) -> WeightTimes:
    """Predict all layers' matmuls for `rows` rows; see `layer_matrices` and `product_time`."""
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
    """Return a lower bound for the matmuls of one row, in all layers.

    It is the larger of two times: reading host weights with CPU and bus together, and reading resident
    weights on the GPU. Only the experts that one row needs count.
    """
    together = min(rates.cpu_bytes_per_s + rates.bus_bytes_per_s, rates.host_bytes_per_s)
    on_host = resident = 0.0
    for name, sizes in matrices.items():
        others = sizes.used(plan.resident_rows[name])
        on_host += others * sizes.host_bytes
        resident += (sizes.used() - others) * sizes.device_bytes
    return 1e3 * max(on_host / together, resident / rates.gpu_bytes_per_s)


class _Step(NamedTuple):
    """Additional resident rows of equal matrices."""

    sizes: Sizes
    start: int
    end: int
    gain: float  # ms per byte
    is_whole: bool  # indivisible: only the whole step saves the copies of inputs and outputs

    @property
    def nbytes(self) -> float:
        return (self.end - self.start) * self.row_bytes

    @property
    def row_bytes(self) -> float:
        return self.sizes.device_bytes / self.sizes.rows


def _by_gain(steps: Iterable[_Step]) -> Iterator[list[_Step]]:
    """Yield groups of steps with about equal gain, the best first; divisible steps precede others."""
    left = sorted(steps, key=lambda step: -step.gain)
    while left:
        alike = [step for step in left if step.gain > (1 - _ALIKE) * left[0].gain]
        left = left[len(alike) :]
        parted = [step for step in alike if not step.is_whole]
        yield from (group for group in (parted, [step for step in alike if step.is_whole]) if group)


@lru_cache(maxsize=256)  # a model's plans differ in memory alone
def _worthwhile_steps(rates: Rates, sizes: Sizes) -> tuple[_Step, ...]:
    """Return the steps that shorten matmuls, in order of falling gain per byte."""
    width = max(sizes.rows // _STEPS // sizes.unit, 1) * sizes.unit
    points = [
        (rows, sum(times * product_time(rates, sizes, rows, n).ms for n, times in ONE_CHAT.items()))
        for rows in (*range(0, sizes.rows, width), sizes.rows)
    ]
    hull: list[tuple[int, float]] = []  # lower convex hull; nearly straight parts are one step
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
            # If times in between are above the straight line, parts of the step are worth less.
            above = [
                ms - start[1] - slope * (rows - start[0]) for rows, ms in points if start[0] < rows < end[0]
            ]
            is_whole = end[0] == sizes.rows or max(above, default=0.0) > _STRAIGHT * (start[1] - end[1])
            steps.append(_Step(sizes, start[0], end[0], -slope / bytes_per_row, is_whole))
    return tuple(steps)


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def _take(step: _Step, names: Sequence[str], left: float, resident: dict[str, int]) -> float:
    """Give the step to as many matrices as `left` allows, spread evenly; return the bytes used."""
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
    """Return `count` of the names at even distances."""
    count = min(count, len(names))
    return [names[index * len(names) // count] for index in range(count)]
