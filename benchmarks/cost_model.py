"""Prediction error of the cost tables at sizes that were not measured for them.

The tables are measured first. Then sizes are drawn at random (with a fixed seed), between the grid points of
a table and a little beyond the last ones. The error of a size is |predicted - measured| / measured. All sizes
are measured in turn, again and again, so that a disturbance affects single repetitions of many sizes. Some
grid points are measured again: their deviation from the first measurement is the machine's noise.
"""

import math
import random
import statistics
import time
from collections.abc import Sequence
from itertools import chain

from benchmarks.shown import model_arguments, print_table, progress
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling.grids import NEAR, Grid, Point, Stage, stage_grids
from neo_desktop.engine.profiling.iteration_timer import IterationTimer
from neo_desktop.engine.profiling.profiler import profile, typical_ms
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.setup import set_up

TARGET = 0.1  # median error, at most
BEYOND = 1.25  # sizes reach beyond the grid by this factor
POINTS = 24  # per table
REPEATED = 6  # per table: points of the grid that are measured again
ROUNDS = 9  # repetitions of a point
SECONDS = 60.0  # for all points together; each is measured at least once, after a warm-up


def main() -> None:
    """Measure tables and points, and print the errors per table."""
    given = model_arguments(__doc__).parse_args()
    parts = set_up(EngineOptions(device=given.device, shape=given.shape, dtype=given.dtype))
    decoder, limits = parts.model.decoder, parts.limits
    tables = profile(decoder, parts.storage, limits, progress=progress, streams=parts.model.streams)
    wider = SchedulerLimits(
        math.ceil(limits.max_batch_tokens * BEYOND), math.ceil(limits.max_batch_requests * BEYOND)
    )
    timer = IterationTimer(decoder, parts.storage, wider, parts.model.streams)
    grids = stage_grids(
        timer.capacity_tokens,
        decoder.config,
        limits,
        attends_alike=timer.attends_alike,
        has_splits=decoder.has_splits,
    )
    generator, most_tokens = random.Random(0), decoder.config.max_context_tokens
    new = {stage: held_out(timer, grid, most_tokens, generator) for stage, grid in grids.items()}
    again = {
        stage: generator.sample(grid.spanning, min(REPEATED, len(grid.spanning)))
        for stage, grid in grids.items()
    }
    measured_ms = measure(timer, list(chain(*new.values(), *again.values())))
    errors = {point: abs(predicted_ms(tables, point) / ms - 1) for point, ms in measured_ms.items()}
    rows = []
    for stage in grids:
        if found := sorted(errors[point] for point in new[stage]):
            middle, p90 = statistics.median(found), found[math.ceil(0.9 * len(found)) - 1]
            repeated = statistics.median(errors[point] for point in again[stage])
            rows.append((stage.value, len(found), *(f"{e:.1%}" for e in (middle, p90, found[-1], repeated))))
    print_table(("table", "points", "median", "p90", "worst", "again"), rows)
    median = statistics.median(errors[point] for point in chain(*new.values()))
    print(
        f"{parts.model.name} on {decoder.device.type} in {decoder.dtype}: the median error of a prediction "
        f"is {median:.1%}, target {TARGET:.0%}. Again: points of the tables."
    )
    if not timer.is_cuda:
        print("Without a GPU, both caches are in host memory and share the table of the CPU's attention.")


def held_out(
    timer: IterationTimer, grid: Grid, max_context_tokens: int, generator: random.Random
) -> list[Point]:
    """Draw sizes with evenly spread logarithms that can occur and are not grid points."""
    stage = grid.stage
    most_x, most_y = (max(sizes) for sizes in zip(*((p.x, p.y) for p in grid.points), strict=True))
    tier = stage.tier or NEAR
    most_context = min(max_context_tokens, timer.capacity_tokens(tier))

    def draw(most: int) -> int:
        return round(math.exp(generator.uniform(0, math.log(most * BEYOND))))

    found: dict[Point, None] = {}
    for _ in range(100 * POINTS):
        x, y = draw(most_x), 1
        if stage.is_prefill:
            is_first = stage is Stage.FIRST_CHUNK_ATTENTION
            y = x if is_first else x + BLOCK_SIZE * math.ceil(draw(most_y) / BLOCK_SIZE)
            is_possible = x > 1 and y <= most_context  # a single token would be a decode
        elif stage.is_attention:
            y = draw(most_y)
            is_possible = y <= max_context_tokens and x * y <= timer.capacity_tokens(tier)
        else:
            is_possible = True
        point = Point(stage, x, y)
        if is_possible and point not in grid.points:
            found[point] = None
        if len(found) == POINTS:
            break
    return list(found)


def measure(timer: IterationTimer, points: Sequence[Point]) -> dict[Point, float]:
    """Return the typical duration per point, in ms."""
    samples: dict[Point, list[float]] = {point: [] for point in points}
    for point in points:  # warm-up
        timer.time(point, 0)
    start = time.perf_counter()
    for turn in range(1, ROUNDS + 1):
        progress((turn - 1) / ROUNDS, "sizes that the tables have not seen")
        for point in points:
            if turn == 1 or time.perf_counter() - start < SECONDS:
                samples[point].append(timer.time(point, turn)[point])
    return {point: typical_ms(values) for point, values in samples.items()}


def predicted_ms(tables: TableCostModel, point: Point) -> float:
    if point.stage.is_prefill:
        return tables.prefill_attention_ms(point.x, point.y - point.x)
    if point.stage.tier is not None:
        return tables.attention_ms(point.stage.tier, point.x, point.x * point.y)
    table = getattr(tables, point.stage.value)
    return float(table(point.x))


if __name__ == "__main__":
    main()
