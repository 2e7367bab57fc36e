"""Measuring points: the stages of an iteration, and grids of sizes up to the scheduler's limits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.config import ModelConfig

# the tier whose KV prompts attend to fastest
NEAR = next(tier for tier in MEASURED_TIERS if not tier.host_attends)
LINEAR_CONTEXT = 4096  # a row's linear stages take about as long as attention to this context


class Stage(StrEnum):
    """A part of an iteration, named like its table in `TableCostModel`."""

    LINEAR = "linear"  # x: tokens
    HEAD = "head"  # x: rows
    OFFLOAD = "offload"  # x: requests; measured with CPU attention
    TRANSFER = "transfer"  # x: tokens
    FIRST_CHUNK_ATTENTION = "first_chunk_attention"  # of a prompt; x: tokens, y: the same
    LATER_CHUNK_ATTENTION = "later_chunk_attention"  # x: tokens, y: context at its end, more than x
    GPU_ATTENTION = "gpu_attention"  # x: requests, y: mean context
    CPU_ATTENTION = "cpu_attention"  # x: requests, y: mean context

    @property
    def tier(self) -> KVTier | None:
        """KV tier of decode attention; None: another stage."""
        label = self.value.removesuffix("_attention")
        return next((tier for tier in MEASURED_TIERS if tier.label == label), None)

    @property
    def is_attention(self) -> bool:
        """True if the time depends on the layer's sliding window."""
        return self.is_prefill or self.tier is not None

    @property
    def is_prefill(self) -> bool:
        """True if this is a prompt chunk's attention."""
        return self in (Stage.FIRST_CHUNK_ATTENTION, Stage.LATER_CHUNK_ATTENTION)


@dataclass(frozen=True, slots=True)
class Point:
    """A stage at one size; `Stage` defines x and y."""

    stage: Stage
    x: int
    y: int = 1

    @property
    def work(self) -> int:
        """A measure roughly proportional to the time of large iterations."""
        return self.x * (LINEAR_CONTEXT + self.y)


Capacity = Callable[[KVTier], int]
"""Returns how many tokens the measured attention of a tier can cover."""


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


def stage_grids(
    capacity: Capacity, config: ModelConfig, limits: SchedulerLimits, *, attends_alike: bool, has_splits: bool
) -> dict[Stage, Grid]:
    """Return `stage -> grid`: urgent stages first, then stages that profit from leftover time.

    Args:
        attends_alike: decode attention is equal in all tiers, so one is measured.
        has_splits: chunks of prompts do not show the linear stages, because they run in a few layers.
    """
    tokens, requests = limits.max_batch_tokens, limits.max_batch_requests
    most_context = min(config.max_context_tokens, capacity(NEAR))
    chunks = _ordinary(_sizes(2, max(min(tokens, most_context), 2)))  # a single token would be a decode
    longest = 0 if has_splits else chunks[-1]
    linear = [x for x in _sizes(1, tokens) if x <= requests or x > longest]
    grids = {
        Stage.FIRST_CHUNK_ATTENTION: _grid(
            [Point(Stage.FIRST_CHUNK_ATTENTION, x, x) for x in chunks], chunks, chunks
        ),
        Stage.LATER_CHUNK_ATTENTION: _later_chunk_grid(most_context, tokens),
        Stage.LINEAR: _line(Stage.LINEAR, linear),
        Stage.CPU_ATTENTION: _decode_grid(Stage.CPU_ATTENTION, capacity, config, requests),
    }
    if not attends_alike:
        grids[Stage.GPU_ATTENTION] = _decode_grid(Stage.GPU_ATTENTION, capacity, config, requests)
    grids[Stage.HEAD] = _line(Stage.HEAD, _sizes(1, requests))
    grids[Stage.TRANSFER] = _line(Stage.TRANSFER, _sizes(1, tokens))
    return grids


def _line(stage: Stage, xs: Sequence[int]) -> Grid:
    return _grid([Point(stage, x) for x in xs], xs, [1])


def _sizes(least: int, most: int) -> list[int]:
    """Return sizes that grow by a third or a half."""
    sizes = {1, 2, 3, 4, 6, 8, most}
    size = 8
    while size < most:
        sizes |= {size, size * 3 // 2}
        size *= 2
    return sorted(size for size in sizes if least <= size <= most)


def _decode_grid(stage: Stage, capacity: Capacity, config: ModelConfig, most_requests: int) -> Grid:
    """Return requests x mean context, limited to the pool's capacity, with at least two values each."""
    assert stage.tier is not None
    most_tokens = capacity(stage.tier)
    contexts = _axis(16, 4, min(config.max_context_tokens, most_tokens))
    requests = _axis(1, 4, min(most_requests, most_tokens // contexts[0]))
    points = [
        Point(stage, x, y)
        for x, y in product(requests, contexts)
        if x * y <= most_tokens or (x in requests[:2] and y in contexts[:2])
    ]
    return _grid(points, requests, contexts)


def _later_chunk_grid(most_context: int, most_tokens: int) -> Grid:
    """Return chunk tokens x context at the chunk's end. The product is the work: masking saves nothing."""
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
    """Divide the points of a grid into spanning points and others, each sorted by work.

    The smallest rectangle comes first: without time for more, its points are measured.
    """

    def spans(axis: Sequence[int], value: int) -> bool:
        i = axis.index(value)
        return i % 4 == 0 or i == len(axis) - 1 or (i == 1 and len(ys) > 1)  # a surface needs two per axis

    def order(point: Point) -> tuple[bool, int, int]:
        return point.x not in xs[:2] or point.y not in ys[:2], point.work, point.x

    points.sort(key=order)
    spanning = [point for point in points if spans(xs, point.x) and spans(ys, point.y)]
    return Grid(spanning, [point for point in points if point not in spanning])
