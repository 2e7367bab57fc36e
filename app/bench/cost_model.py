"""Suite `cost-model`: how well the tables predict what was not measured for them.

The tables are measured afresh. Then every table is asked for sizes drawn at random (with a fixed seed),
between the points of its grid and a little beyond the last ones, and the same sizes are measured: the error
of a point is |predicted - measured| / measured. All points are measured in turn, again and again, so that a
disturbance hits single repetitions of many points and not all repetitions of one. Some points of the tables
are among them once more: how far they are from their first measurement is the machine's doing.
"""

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from neo_desktop.app.bench.report import Progress
from neo_desktop.app.model_options import ModelOptions
from neo_desktop.engine.placement import Place
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling.budget import BLOCK_SIZE
from neo_desktop.engine.profiling.profiler import Grid, profile, stage_grids, typical_ms
from neo_desktop.engine.profiling.stage_timer import Point, Stage, StageTimer
from neo_desktop.engine.schedule.scheduler import SchedulerLimits

TARGET = 0.1  # median error that the tables are meant to keep
BEYOND = 1.25  # how far beyond the grid sizes are drawn, as a factor
_PROFILE_SHARE = 0.4  # of the suite's progress


@dataclass(frozen=True, slots=True)
class CostModelOptions(ModelOptions):
    """What to measure and how much time to take."""

    points: int = 24  # per table
    repeated: int = 6  # per table: points of the grid that are measured again
    rounds: int = 9  # repetitions of each point
    seconds: float = 60.0  # for all points together; each is measured at least once, after a warm-up
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CostModelCase:
    """One size that the tables had not seen."""

    table: str
    x: int  # tokens, rows or requests; see engine/profiling/stage_timer.py
    y: int  # attention: context, on average; 1 elsewhere
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return abs(self.predicted_ms - self.measured_ms) / self.measured_ms


@dataclass(frozen=True, slots=True)
class CostModelReport:
    """What the suite found."""

    model: str
    device: str
    dtype: str
    profile_seconds: float
    notes: tuple[str, ...]
    cases: tuple[CostModelCase, ...]
    repeated: tuple[CostModelCase, ...]  # points of the grid, measured again

    @property
    def median_error(self) -> float:
        """Over all points of all tables."""
        return statistics.median(case.error for case in self.cases)

    def by_table(self) -> dict[str, list[float]]:
        """Return `table -> errors of its points, rising`."""
        return _by_table(self.cases)

    def render(self) -> RenderableType:
        """A table, and what its reader should know."""
        title = f"Cost model: {self.model} on {self.device}, {self.dtype}; error on sizes it has not seen"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
        table.add_column("table")
        for heading in ("points", "median", "p90", "worst", "again"):
            table.add_column(heading, justify="right")
        again = _by_table(self.repeated)
        for name, errors in self.by_table().items():
            figures = (*_summary(errors), statistics.median(again[name]))
            table.add_row(name, str(len(errors)), *(f"{value:.1%}" for value in figures))
        verdict = "within" if self.median_error <= TARGET else "ABOVE"
        return Group(
            table,
            f"Median error over all points: {self.median_error:.1%}, {verdict} the target of {TARGET:.0%}.",
            f"Measuring the tables took {self.profile_seconds:.1f} s.",
            "again: by how much points of the tables differ when they are measured again (median).",
            *self.notes,
        )

    def to_json(self) -> dict[str, Any]:
        """The suite's name, its settings, its notes, errors per table, one object per point."""
        again = _by_table(self.repeated)
        summaries = {
            name: dict(zip(("median_error", "p90_error", "worst_error"), _summary(errors), strict=True))
            | {"repeated_error": statistics.median(again[name])}
            for name, errors in self.by_table().items()
        }
        return {
            "suite": "cost-model",
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "profile_seconds": self.profile_seconds,
            "median_error": self.median_error,
            "target": TARGET,
            "within_target": self.median_error <= TARGET,
            "notes": list(self.notes),
            "tables": summaries,
            "cases": [asdict(case) | {"error": case.error} for case in self.cases],
        }


def run_cost_model(options: CostModelOptions, progress: Progress) -> CostModelReport:
    """Measure tables and points; raises what `Engine.from_pretrained` raises for a model or memory."""
    progress(0.0, "loading the model")
    setup = options.set_up()
    decoder = setup.model.decoder
    started = time.perf_counter()
    tables = profile(
        decoder,
        setup.storage,
        setup.limits,
        progress=lambda share, what: progress(_PROFILE_SHARE * share, f"tables: {what}"),
    )
    profile_seconds = time.perf_counter() - started

    wider = SchedulerLimits(
        math.ceil(setup.limits.max_batch_tokens * BEYOND),
        math.ceil(setup.limits.max_batch_requests * BEYOND),
    )
    timer = StageTimer(decoder, setup.storage, wider)
    grids = stage_grids(timer, decoder.config, setup.limits)
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
    cases = {
        point: CostModelCase(point.stage.value, point.x, point.y, ms, _predicted_ms(tables, point))
        for point, ms in _measure(timer, points, options, progress).items()
    }
    progress(1.0, "done")
    return CostModelReport(
        model=setup.model.name,
        device=decoder.device.type,
        dtype=str(decoder.dtype).removeprefix("torch."),
        profile_seconds=profile_seconds,
        notes=_notes(timer, options),
        cases=tuple(cases[point] for each in held_out.values() for point in each),
        repeated=tuple(cases[point] for each in measured_before.values() for point in each),
    )


def _held_out(
    timer: StageTimer, grid: Grid, max_context_tokens: int, count: int, generator: random.Random
) -> list[Point]:
    """Draw sizes with evenly spread logarithms; only such as can occur, and none of the grid."""
    stage = grid.stage
    most_x, most_y = (max(sizes) for sizes in zip(*((p.x, p.y) for p in grid.points), strict=True))
    place = Place.HOST if stage is Stage.CPU_ATTENTION else Place.DEVICE
    most_context = min(max_context_tokens, timer.capacity_tokens(place))

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
            is_possible = y <= max_context_tokens and x * y <= timer.capacity_tokens(place)
        else:
            is_possible = True
        point = Point(stage, x, y)
        if is_possible and point not in grid.points:
            found[point] = None
        if len(found) == count:
            break
    return list(found)


def _measure(
    timer: StageTimer, points: Sequence[Point], options: CostModelOptions, progress: Progress
) -> dict[Point, float]:
    samples: dict[Point, list[float]] = {point: [] for point in points}
    for point in points:  # to warm up
        timer.time_ms(point, 0)
    start = time.perf_counter()
    for turn in range(1, options.rounds + 1):
        for done, point in enumerate(points):
            share = (turn - 1 + done / len(points)) / options.rounds
            progress(_PROFILE_SHARE + (1 - _PROFILE_SHARE) * share, "sizes that the tables have not seen")
            if turn == 1 or time.perf_counter() - start < options.seconds:
                samples[point].append(timer.time_ms(point, turn))
    return {point: typical_ms(values) for point, values in samples.items()}


def _predicted_ms(tables: TableCostModel, point: Point) -> float:
    if point.stage.is_prefill:
        return tables.prefill_attention_ms(point.x, point.y - point.x)
    table = getattr(tables, point.stage.value)
    return float(table(point.x, point.y) if point.stage.is_attention else table(point.x))


def _notes(timer: StageTimer, options: CostModelOptions) -> tuple[str, ...]:
    if options.cpu_cache_dtype != "auto":
        return (f"CPU-cache in {options.cpu_cache_dtype}.",)
    if timer.is_cuda:
        return ()
    return ("Without a GPU, both caches lie in host memory and share the table of the CPU's attention.",)


def _by_table(cases: Sequence[CostModelCase]) -> dict[str, list[float]]:
    tables = dict.fromkeys(case.table for case in cases)
    return {table: sorted(case.error for case in cases if case.table == table) for table in tables}


def _summary(errors: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(errors), errors[math.ceil(0.9 * len(errors)) - 1], errors[-1]
