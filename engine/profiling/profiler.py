"""Measures this computer with the loaded model: the tables behind `TableCostModel`.

Method, and limits on its cost:

- Stages are those of whole iterations of a few layers (see `IterationTimer`). Sizes grow by factors: times
  are curved at small sizes and straight lines at large ones.
- Every table has a share of the time, plus the time that earlier tables left. Its points first run once each,
  to warm up and to learn their cost: a few that span the range, then those between. Points that would take
  too long, or do not fit into memory, are left out; the model interpolates or extrapolates them. The
  remaining time goes to repetitions, all points in turn, so that a short disturbance hits single repetitions
  and not single points.
- A point's time is the lower quartile of its repetitions: other programs only make things slower. If a larger
  size still took less time than a smaller one, both get their mean.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import torch

from neo_desktop.engine.cuda.errors import is_short_of_memory
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.cuda.workspaces import clear_workspaces
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.predict.cost_model import NOTHING, UNSHARED, Curve, Surface, TableCostModel
from neo_desktop.engine.profiling.grids import Grid, Point, Stage, stage_grids
from neo_desktop.engine.profiling.iteration_timer import IterationTimer
from neo_desktop.engine.profiling.rates import measured_duplex, measured_memory_shares, measured_swap
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.models.decoder import Decoder

logger = logging.getLogger(__name__)


MAX_SECONDS = 8.0
MAX_ROUNDS = 9
# share of a table's time that may pass before a point runs for the first time
_SPANNING_SHARE, _BETWEEN_SHARE = 0.7, 0.35
_CHEAP_SHARE = 0.01  # a point between others that takes no more may run as late as a spanning point
_SECOND_CHANCES = 2
_SECONDS_PER_WEIGHT_BYTE = 4e-9
MIN_SECONDS = 1.5
# Stage -> share of the time, description. Device attention is measured only if it differs from the CPU's.
_TABLES = {
    Stage.LINEAR: (0.15, "linear layers"),
    Stage.CPU_ATTENTION: (0.25, "attention on the CPU"),
    Stage.FIRST_CHUNK_ATTENTION: (0.25, "attention of prompts"),
    Stage.LATER_CHUNK_ATTENTION: (0.15, "attention of long prompts"),
    Stage.HEAD: (0.2, "sampling"),
    Stage.GPU_ATTENTION: (0.1, "attention on the GPU"),
    Stage.TRANSFER: (0.05, "transfers"),
}


def profile(
    decoder: Decoder,
    storage: KVStorage,
    limits: SchedulerLimits,
    *,
    seconds: float | None = None,
    progress: Progress | None = None,
    streams: Streams | None = None,
) -> TableCostModel:
    """Measure the loaded model on this computer; the content of the KV pools is lost.

    Args:
        limits: bounds of the grid.
        seconds: of the grids, about; None: longer for larger models, at most `MAX_SECONDS`.
        streams: None: the whole device.
    """
    started = time.perf_counter()
    if seconds is None:
        seconds = min(MIN_SECONDS + decoder.nbytes * _SECONDS_PER_WEIGHT_BYTE, MAX_SECONDS)
    report = progress or (lambda share, what: None)
    report(0.0, "memory")
    with closing(IterationTimer(decoder, storage, limits, streams)) as timer:
        if decoder.has_splits:
            report(0.0, "weights in host memory")
            timer.measure_shares(limits.max_batch_tokens, seconds / 2)
        capacity, is_divided = timer.capacity_tokens, decoder.has_splits
        grids = stage_grids(
            capacity, decoder.config, limits, attends_alike=timer.attends_alike, has_splits=is_divided
        )
        times = _times(timer, grids, time.perf_counter() + seconds, report)
    if timer.is_cuda:
        clear_workspaces(decoder.device)
        return_memory()  # the largest sizes may have taken all free memory
    tables = _tables(timer, decoder, times)
    report(1.0, "done")
    logger.debug("profiled %d points in %.2f s", len(times), time.perf_counter() - started)
    row_bytes = decoder.config.kv_bytes_per_token(decoder.dtype) // decoder.config.num_layers
    return replace(
        tables,
        swap=measured_swap(decoder.device, row_bytes, limits.max_batch_tokens),
        duplex=measured_duplex(streams or Streams(decoder.device)),
        memory_shares=measured_memory_shares(decoder.device) if timer.is_cuda else UNSHARED,
    )


def _times(
    timer: IterationTimer, grids: Mapping[Stage, Grid], end: float, report: Progress
) -> dict[Point, float]:
    """Measure all grids until `end`; return `point -> ms`."""
    total = left = sum(_TABLES[stage][0] for stage in grids)
    times: dict[Point, float] = {}
    for stage, grid in grids.items():
        share, what = _TABLES[stage]
        report(1 - left / total, what)
        # The remaining stages share the time that earlier ones left.
        seconds = max(end - time.perf_counter(), 0.0) * share / left
        times = measure(timer, grid, seconds) | times
        left -= share
    return times


def _tables(timer: IterationTimer, decoder: Decoder, times: Mapping[Point, float]) -> TableCostModel:
    def curve(stage: Stage, times: Mapping[Point, float] = times) -> Curve:
        measured = sorted((point.x, ms) for point, ms in times.items() if point.stage is stage)
        return Curve([x for x, _ in measured], rising([ms for _, ms in measured]))

    host_linear = NOTHING
    if timer.is_cuda and timer.host_linear_ms:
        host_linear = curve(Stage.LINEAR, {p: typical_ms(ms) for p, ms in timer.host_linear_ms.items()})
    attention = dict.fromkeys(MEASURED_TIERS, _surface(Stage.CPU_ATTENTION, times))
    measured = dict.fromkeys(point.stage for point in times)
    attention |= {stage.tier: _surface(stage, times) for stage in measured if stage.tier is not None}
    return TableCostModel(
        num_layers=decoder.config.num_layers,
        overlaps=timer.is_cuda,
        iteration_ms=typical_ms(timer.outside_ms),
        linear=curve(Stage.LINEAR),
        head=curve(Stage.HEAD),
        offload=curve(Stage.OFFLOAD),
        transfer=curve(Stage.TRANSFER),
        first_chunk_attention=curve(Stage.FIRST_CHUNK_ATTENTION),
        later_chunk_attention=_surface(Stage.LATER_CHUNK_ATTENTION, times),
        attention=attention,
        host_linear=host_linear,
        streamed_shares=decoder.streamed_shares,
        streamed_experts=decoder.streamed_experts,
    )


def measure(timer: IterationTimer, grid: Grid, seconds: float) -> dict[Point, float]:
    """Return `point -> ms` for the points that fit into time and memory; see the module docstring.

    Points of other stages that the iterations show are included.

    Raises:
        MemoryError: not even the smallest points fit into GPU memory.
    """
    start = time.perf_counter()
    costs_ms: dict[Point, float] = {}  # of the first, or a better, iteration of a point
    first: dict[Point, float] = {}
    samples: dict[Point, list[float]] = defaultdict(list)
    for points, share in ((grid.spanning, _SPANNING_SHARE), (grid.between, _BETWEEN_SHARE)):
        for point in points:
            is_needed = len(costs_ms) < 4
            expected_ms = _expected_ms(point, costs_ms)
            limit = _SPANNING_SHARE if expected_ms / 1e3 < seconds * _CHEAP_SHARE else share
            if not is_needed and time.perf_counter() - start + expected_ms / 1e3 > seconds * limit:
                continue
            for _ in range(1 + _SECOND_CHANCES):
                cost_ms, times = _try(timer, point, 0)
                if not times:
                    break
                if cost_ms <= costs_ms.get(point, math.inf):
                    costs_ms[point] = cost_ms
                    first |= times
                if cost_ms <= 2 * expected_ms:  # else the first of its kind, or a disturbance
                    break

    if len(costs_ms) < min(4, len(grid.points)):
        raise MemoryError(
            f"too little GPU memory is left to measure this computer ({_TABLES[grid.stage][1]}): close other "
            "programs, or leave more room with a lower cap on GPU memory"
        )
    for turn in range(1, MAX_ROUNDS + 1):
        for point, cost_ms in costs_ms.items():
            if cost_ms / 1e3 <= seconds - (time.perf_counter() - start):
                for each, ms in _try(timer, point, turn)[1].items():
                    samples[each].append(ms)
    return {point: typical_ms(samples[point] or [ms]) for point, ms in first.items()}


def _try(timer: IterationTimer, point: Point, turn: int) -> tuple[float, dict[Point, float]]:
    """Measure a point; return the duration in ms and the times, which are empty without memory."""
    start = time.perf_counter()
    try:
        times = timer.time(point, turn)
    except (MemoryError, RuntimeError) as error:
        if not is_short_of_memory(error):
            raise
        # The scheduler will not use sizes that do not fit the GPU now.
        logger.debug("no memory for %s", point)
        times = {}
    return (time.perf_counter() - start) * 1e3, times


def typical_ms(values: Sequence[float]) -> float:
    """Return the lower quartile: other programs only make things slower."""
    return sorted(values)[len(values) // 4]


def _expected_ms(point: Point, known: dict[Point, float]) -> float:
    """Return about the most that an iteration takes: a fixed time, and time in proportion to the work."""
    smaller = [(other.work, ms) for other, ms in known.items() if other.work <= point.work]
    larger = [ms for other, ms in known.items() if other.work > point.work]
    if not smaller:
        return min(larger, default=0.0)
    (least_work, least_ms), (work, ms) = min(smaller), max(smaller)
    slope = max(ms - least_ms, 0.0) / (work - least_work) if work > least_work else ms / work
    grown_ms = ms + 2 * slope * (point.work - work)  # single iterations may be disturbed
    return min([grown_ms, ms * point.work / work, *larger])


def _surface(stage: Stage, times: Mapping[Point, float]) -> Surface:
    """Put the measured points of a grid into a rectangle; extrapolate its missing corners."""
    known = {(point.x, point.y): ms for point, ms in times.items() if point.stage is stage}
    xs, ys = sorted({x for x, _ in known}), sorted({y for _, y in known})
    rows = [rising(row) for row in fill(xs, ys, known)]
    columns = [rising(column) for column in zip(*rows, strict=True)]
    return Surface(xs, ys, list(zip(*columns, strict=True)))


def rising(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing values nearest to the given ones (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean, number of values
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, before_count = pools.pop()
            mean = (mean * count + before * before_count) / (count + before_count)
            count += before_count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def fill(xs: Sequence[int], ys: Sequence[int], known: dict[tuple[int, int], float]) -> list[list[float]]:
    """Complete a grid with a fit of `a + b*x + c*y + d*x*y`, scaled to the nearest measured points.

    Attention grows with the product of the two sizes, gathering KV with the context alone. A least-squares
    fit of relative errors finds both costs; the ratio at the nearest measured points corrects its residual.
    Measured times for less and for more work bound the result: a fit through noise may be far off.
    """
    points = torch.tensor([[1.0, x, y, x * y] for x, y in known], dtype=torch.float64)
    ms = torch.tensor(list(known.values()), dtype=torch.float64).clamp(min=1e-6)
    weights = torch.linalg.lstsq(
        points / ms[:, None], torch.ones(len(known), 1, dtype=torch.float64)
    ).solution
    factors = [max(float(weight), 0.0) for weight in weights.flatten()]

    def fitted(x: int, y: int) -> float:
        return max(factors[0] + factors[1] * x + factors[2] * y + factors[3] * x * y, 1e-6)

    def at(x: int, y: int) -> float:
        if (x, y) in known:
            return known[x, y]
        beside = [other for other in known if other[0] == x or other[1] == y] or list(known)
        nearest = min(beside, key=lambda other: abs(other[0] * other[1] - x * y))
        least = max((ms for (a, b), ms in known.items() if a <= x and b <= y), default=0.0)
        most = min((ms for (a, b), ms in known.items() if a >= x and b >= y), default=math.inf)
        return min(max(known[nearest] * fitted(x, y) / fitted(*nearest), least), most)

    return [[at(x, y) for y in ys] for x in xs]
