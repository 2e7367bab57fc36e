"""Grids of sizes for stage measurements, in growing steps up to the scheduler's limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from neo_desktop.engine.profiling.points import NEAR, Point, Stage
from neo_desktop.engine.profiling.stage_timer import StageTimer
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Grid:
    """Points of one stage: a few that span the range, and those between them."""

    spanning: Sequence[Point]
    between: Sequence[Point]

    @property
    def stage(self) -> Stage:
        return self.spanning[0].stage

    @property
    def points(self) -> tuple[Point, ...]:
        return (*self.spanning, *self.between)


def stage_grids(timer: StageTimer, config: ModelConfig, limits: SchedulerLimits) -> dict[Stage, Grid]:
    """Return `stage -> grid`: urgent stages first, then stages that profit from leftover time."""
    tokens, requests = limits.max_batch_tokens, limits.max_batch_requests
    grids = {
        Stage.LINEAR: _line(Stage.LINEAR, tokens),
        Stage.CPU_ATTENTION: _decode_grid(Stage.CPU_ATTENTION, timer, config, requests),
        Stage.FIRST_CHUNK_ATTENTION: _first_chunk_grid(timer, config, tokens),
        Stage.LATER_CHUNK_ATTENTION: _later_chunk_grid(timer, config, tokens),
    }
    if not timer.attends_alike:
        grids[Stage.GPU_ATTENTION] = _decode_grid(Stage.GPU_ATTENTION, timer, config, requests)
    grids[Stage.HEAD] = _line(Stage.HEAD, requests)
    grids[Stage.OFFLOAD] = _line(Stage.OFFLOAD, requests)  # early: it finds out whether flags work
    grids[Stage.TRANSFER] = _line(Stage.TRANSFER, tokens)
    grids[Stage.SWAP] = _line(Stage.SWAP, tokens)
    return grids


def _line(stage: Stage, most: int) -> Grid:
    xs = _sizes(1, most)
    return _grid([Point(stage, x) for x in xs], xs, [1])


def _sizes(least: int, most: int) -> list[int]:
    """Return sizes that grow by a third or a half."""
    sizes = {1, 2, 3, 4, 6, 8, most}
    size = 8
    while size < most:
        sizes |= {size, size * 3 // 2}
        size *= 2
    return sorted(size for size in sizes if least <= size <= most)


def _decode_grid(stage: Stage, timer: StageTimer, config: ModelConfig, most_requests: int) -> Grid:
    """Return requests x mean context, limited to the pool's capacity, with at least two values each."""
    assert stage.tier is not None
    capacity = timer.capacity_tokens(stage.tier)
    contexts = _axis(16, 4, min(config.max_context_tokens, capacity))
    requests = _axis(1, 4, min(most_requests, capacity // contexts[0]))
    points = [
        Point(stage, x, y)
        for x, y in product(requests, contexts)
        if x * y <= capacity or (x in requests[:2] and y in contexts[:2])
    ]
    return _grid(points, requests, contexts)


def _first_chunk_grid(timer: StageTimer, config: ModelConfig, most_tokens: int) -> Grid:
    """Return tokens of a chunk; a single token would be a decode."""
    sizes = _ordinary(_sizes(2, max(min(most_tokens, _most_context(timer, config)), 2)))
    return _grid([Point(Stage.FIRST_CHUNK_ATTENTION, x, x) for x in sizes], sizes, sizes)


def _later_chunk_grid(timer: StageTimer, config: ModelConfig, most_tokens: int) -> Grid:
    """Return chunk tokens x context at the chunk's end. The product is the work: masking saves nothing."""
    most_context = _most_context(timer, config)
    chunks = _axis(8, 4, max(min(most_tokens, most_context), 2))
    contexts = _axis(16, 4, max(most_context, 2 * chunks[1]))
    points = [
        Point(Stage.LATER_CHUNK_ATTENTION, x, y)
        for x, y in product(chunks, contexts)
        if x < y and (y <= most_context or (x in chunks[:2] and y in contexts[:2]))
    ]
    return _grid(points, chunks, contexts)


def _ordinary(sizes: Sequence[int]) -> list[int]:
    """Return odd sizes slightly below the given ones: round sizes are rare in prompts and suit kernels best.

    The first and last sizes stay: the first bounds the measured range, the last is that of a full batch.
    """
    return sorted({sizes[0], sizes[-1], *(size * 15 // 16 | 1 for size in sizes[1:-1])})


def _most_context(timer: StageTimer, config: ModelConfig) -> int:
    return min(config.max_context_tokens, timer.capacity_tokens(NEAR))


def _axis(first: int, factor: int, last: int) -> list[int]:
    """Return at least two sizes, which grow by a factor and end with `last`; the second may be added."""
    sizes = []
    size = first
    while size * 1.5 < last:
        sizes.append(size)
        size *= factor
    sizes.append(max(last, 1))
    return sizes if len(sizes) > 1 else [sizes[0], 2 * sizes[0]]


def _grid(points: list[Point], xs: Sequence[int], ys: Sequence[int]) -> Grid:
    """Divide the points of a grid into spanning points and others, each sorted by work."""

    def spans(axis: Sequence[int], value: int) -> bool:
        i = axis.index(value)
        return i % 4 == 0 or i == len(axis) - 1 or (i == 1 and len(ys) > 1)  # a surface needs two per axis

    points = sorted(points, key=lambda point: (point.work, point.x))
    spanning = [point for point in points if spans(xs, point.x) and spans(ys, point.y)]
    return Grid(spanning, [point for point in points if point not in spanning])
