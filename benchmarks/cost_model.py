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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from benchmarks.shown import model_arguments, progress, show
from neo_desktop.app.bench.section import Section, Table
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling.grids import NEAR, Grid, Point, Stage, stage_grids
from neo_desktop.engine.profiling.iteration_timer import IterationTimer
from neo_desktop.engine.profiling.profiler import profile, typical_ms
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.setup import set_up

TARGET = 0.1  # median error, at most
BEYOND = 1.25  # sizes reach beyond the grid by this factor
_PROFILE_SHARE = 0.4  # of the suite's progress


@dataclass(frozen=True, slots=True)
class CostModelOptions(EngineOptions):
    """Sizes and time limits of the measurement."""

    points: int = 24  # per table
    repeated: int = 6  # per table: points of the grid that are measured again
    rounds: int = 9  # repetitions of a point
    seconds: float = 60.0  # for all points together; each is measured at least once, after a warm-up
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CostModelCase:
    """One size that the tables had not seen."""

    table: str
    x: int  # tokens, rows or requests; see engine/profiling/grids.py
    y: int  # attention: context, on average; 1 elsewhere
    measured_ms: float
    predicted_ms: float
    error: float  # relative to what was measured


@dataclass(frozen=True, slots=True)
class TableErrors:
    """Errors of one table."""

    points: int
    median_error: float
    p90_error: float
    worst_error: float
    repeated_error: float  # median of points of the grid that were measured again


class _Row(NamedTuple):
    table: str
    errors: TableErrors


@dataclass(frozen=True, slots=True)
class CostModelReport:
    """Results of the suite."""

    model: str
    device: str
    dtype: str
    profile_seconds: float
    median_error: float  # over the tables' points
    target: float
    tables: dict[str, TableErrors]
    notes: tuple[str, ...]
    cases: tuple[CostModelCase, ...]
    repeated: tuple[CostModelCase, ...]  # points of the grid, measured again

    def section(self) -> Section:
        """Errors per table."""
        table = Table.of(
            "",
            [_Row(*each) for each in self.tables.items()],
            {
                "table": "table",
                "points": "errors.points",
                "median": "errors.median_error:.1%",
                "p90": "errors.p90_error:.1%",
                "worst": "errors.worst_error:.1%",
                "again": "errors.repeated_error:.1%",
            },
        )
        summary = (
            f"{self.model} on {self.device} in {self.dtype}: the median error of a prediction is "
            f"{self.median_error:.1%}, target {self.target:.0%}. Again: points of the tables."
        )
        return Section("Predictions of sizes without a measurement", summary, (table,), notes=self.notes)


def run_cost_model(options: CostModelOptions, progress: Progress) -> Iterator[CostModelReport]:
    """Measure tables and points, a report after each round; raises what the engine raises for a model."""
    progress(0.0, "loading the model")
    parts = set_up(options)
    decoder = parts.model.decoder
    started = time.perf_counter()
    tables = profile(
        decoder,
        parts.storage,
        parts.limits,
        progress=lambda share, what: progress(_PROFILE_SHARE * share, f"tables: {what}"),
        streams=parts.model.streams,
    )
    profile_seconds = time.perf_counter() - started

    wider = SchedulerLimits(
        math.ceil(parts.limits.max_batch_tokens * BEYOND),
        math.ceil(parts.limits.max_batch_requests * BEYOND),
    )
    timer = IterationTimer(decoder, parts.storage, wider, parts.model.streams)
    grids = stage_grids(
        timer.capacity_tokens,
        decoder.config,
        parts.limits,
        attends_alike=timer.attends_alike,
        has_splits=decoder.has_splits,
    )
    generator = random.Random(options.seed)
    held_out = {
        stage: _held_out(timer, grid, decoder.config.max_context_tokens, options.points, generator)
        for stage, grid in grids.items()
    }
    measured_before = {
        stage: generator.sample(grid.spanning, min(options.repeated, len(grid.spanning)))
        for stage, grid in grids.items()
    }
    points = list(chain(*held_out.values(), *measured_before.values()))
    for measured in _measure(timer, points, options, progress):
        cases = {point: _case(tables, point, ms) for point, ms in measured.items()}
        errors = {
            stage.value: _errors(
                *([cases[point].error for point in of[stage]] for of in (held_out, measured_before))
            )
            for stage in grids
            if held_out[stage]
        }
        seen = [cases[point] for each in held_out.values() for point in each]
        yield CostModelReport(
            model=parts.model.name,
            device=decoder.device.type,
            dtype=str(decoder.dtype).removeprefix("torch."),
            profile_seconds=profile_seconds,
            median_error=statistics.median(case.error for case in seen),
            target=TARGET,
            tables=errors,
            notes=_notes(timer, options),
            cases=tuple(seen),
            repeated=tuple(cases[point] for each in measured_before.values() for point in each),
        )
    progress(1.0, "done")


def _case(tables: TableCostModel, point: Point, measured_ms: float) -> CostModelCase:
    predicted_ms = _predicted_ms(tables, point)
    error = abs(predicted_ms - measured_ms) / measured_ms
    return CostModelCase(point.stage.value, point.x, point.y, measured_ms, predicted_ms, error)


def _errors(held_out: list[float], repeated: list[float]) -> TableErrors:
    held_out = sorted(held_out)
    return TableErrors(
        points=len(held_out),
        median_error=statistics.median(held_out),
        p90_error=held_out[math.ceil(0.9 * len(held_out)) - 1],
        worst_error=held_out[-1],
        repeated_error=statistics.median(repeated),
    )


def _held_out(
    timer: IterationTimer, grid: Grid, max_context_tokens: int, count: int, generator: random.Random
) -> list[Point]:
    """Draw sizes with evenly spread logarithms that can occur and are not grid points."""
    stage = grid.stage
    most_x, most_y = (max(sizes) for sizes in zip(*((p.x, p.y) for p in grid.points), strict=True))
    tier = stage.tier or NEAR
    most_context = min(max_context_tokens, timer.capacity_tokens(tier))

    def draw(most: int) -> int:
        return round(math.exp(generator.uniform(0, math.log(most * BEYOND))))

    found: dict[Point, None] = {}
    for _ in range(100 * count):
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
        if len(found) == count:
            break
    return list(found)


def _measure(
    timer: IterationTimer, points: Sequence[Point], options: CostModelOptions, progress: Progress
) -> Iterator[dict[Point, float]]:
    """Yield the typical duration per point, after each round."""
    samples: dict[Point, list[float]] = {point: [] for point in points}
    for point in points:  # warm-up
        timer.time(point, 0)
    start = time.perf_counter()
    for turn in range(1, options.rounds + 1):
        for done, point in enumerate(points):
            share = (turn - 1 + done / len(points)) / options.rounds
            progress(_PROFILE_SHARE + (1 - _PROFILE_SHARE) * share, "sizes that the tables have not seen")
            if turn == 1 or time.perf_counter() - start < options.seconds:
                samples[point].append(timer.time(point, turn)[point])
        yield {point: typical_ms(values) for point, values in samples.items()}


def _predicted_ms(tables: TableCostModel, point: Point) -> float:
    if point.stage.is_prefill:
        return tables.prefill_attention_ms(point.x, point.y - point.x)
    if point.stage.tier is not None:
        return tables.attention_ms(point.stage.tier, point.x, point.x * point.y)
    table = getattr(tables, point.stage.value)
    return float(table(point.x))


def _notes(timer: IterationTimer, options: CostModelOptions) -> tuple[str, ...]:
    if options.cpu_cache_dtype != "auto":
        return (f"CPU-cache in {options.cpu_cache_dtype}.",)
    if timer.is_cuda:
        return ()
    return ("Without a GPU, both caches lie in host memory and share the table of the CPU's attention.",)


if __name__ == "__main__":
    given = model_arguments(__doc__).parse_args()
    options = CostModelOptions(device=given.device, shape=given.shape, dtype=given.dtype)
    show(run_cost_model(options, progress), given.json)
