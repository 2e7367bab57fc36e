"""The profiler's tables are finite, never fall, and cover every size that the scheduler may use."""

import gc
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from expert_models import expert_model
from fallback_levels import KERNELS, Levels
from hypothesis import given
from hypothesis import strategies as st
from imitated_streams import NOTHING, ImitatedBackend, Operation
from pipeline_case import tiny_model

from neo_desktop.engine.batch import DeviceMemoryError
from neo_desktop.engine.execute.graphs import AnyProgram
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling import profiler
from neo_desktop.engine.profiling.grids import Grid, Point, Stage, stage_grids
from neo_desktop.engine.profiling.iteration_timer import IterationTimer
from neo_desktop.engine.profiling.profiler import measure, profile
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import OffloadedFormat
from neo_desktop.models.linear.shares import UNMEASURED
from neo_desktop.models.registry import random_model, stages_of
from neo_desktop.models.shapes import shape

CONFIG = shape("tiny")
CPU = torch.device("cpu")
LIMITS = SchedulerLimits(max_batch_tokens=64, max_batch_requests=16)
CURVES = ("linear", "head", "offload", "transfer", "first_chunk_attention")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_model(CONFIG, dtype=torch.float32, device=CPU)


def storage_of(**blocks: int) -> KVStorage:
    pools = {
        tier: KVPool(CONFIG, blocks[tier.name], BLOCK_SIZE, torch.float32, CPU)
        for tier in MEASURED_TIERS
        if tier.name in blocks
    }
    return KVStorage(pools)


def check(tables: TableCostModel) -> None:
    for name in CURVES:
        curve = getattr(tables, name)
        assert all(math.isfinite(ms) and ms >= 0 for ms in curve.ms)
        assert all(a <= b for a, b in pairwise(curve.ms)), name
    for name, surface in (("later chunks", tables.later_chunk_attention), *tables.attention.items()):
        assert all(math.isfinite(ms) and ms >= 0 for row in surface.ms for ms in row)
        for line in (*surface.ms, *zip(*surface.ms, strict=True)):
            assert all(a <= b for a, b in pairwise(line)), name


@pytest.mark.parametrize(
    "blocks",
    [
        {"device": 64, "host": 256},
        {"device": 4096, "host": 1},  # one tier all but empty
        {"device": 1, "host": 1},
        {"host": 32},  # fastdecode
        {"device": 32},
        {"device": 0, "host": 8},
    ],
    ids=str,
)
def test_tables_are_finite_and_never_fall_whatever_the_pools(
    decoder: Decoder, blocks: dict[str, int]
) -> None:
    tables = profile(decoder, storage_of(**blocks), LIMITS, seconds=0.1)
    check(tables)
    assert tables.num_layers == CONFIG.num_layers
    assert not tables.overlaps
    assert tables.iteration_ms > 0
    assert 0 < tables.linear_ms(1) <= tables.linear_ms(64)
    assert tables.attention_ms(KVTier.HOST, 1, 16) > 0


def test_more_work_is_predicted_to_take_longer(decoder: Decoder) -> None:
    tables = profile(decoder, storage_of(device=4096, host=4096), LIMITS, seconds=3.0)
    assert tables.attention_ms(KVTier.HOST, 16, 16 * 4000) > tables.attention_ms(KVTier.HOST, 1, 16)
    assert tables.linear_ms(64) > tables.linear_ms(1)


def test_limits_of_one_are_enough(decoder: Decoder) -> None:
    check(profile(decoder, storage_of(device=4, host=4), SchedulerLimits(1, 1), seconds=0.1))


def test_progress_runs_from_start_to_end(decoder: Decoder) -> None:
    shares: list[float] = []
    profile(
        decoder,
        storage_of(device=8, host=8),
        LIMITS,
        seconds=0.1,
        progress=lambda share, _: shares.append(share),
    )
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


CAPACITY = 1 << 16


def grids_of(config: ModelConfig, limits: SchedulerLimits, capacity: int = CAPACITY) -> dict[Stage, Grid]:
    return stage_grids(lambda _: capacity, config, limits, attends_alike=True, has_splits=False)


class FakeTimer(IterationTimer):
    """A timer with a formula for times and its own clock."""

    def __init__(self, cost_ms: Callable[[Point], float], clock: list[float]) -> None:
        self.cost_ms = cost_ms
        self.clock = clock

    def time(self, point: Point, turn: int) -> dict[Point, float]:
        ms = self.cost_ms(point)
        self.clock[0] += ms / 1e3
        return {point: ms}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("ms_per_token", [0.001, 1.0, 30.0])
def test_measuring_keeps_to_its_time(clock: list[float], ms_per_token: float) -> None:
    timer = FakeTimer(lambda point: ms_per_token * point.work, clock)
    grids = grids_of(shape("qwen2.5-0.5b"), SchedulerLimits(2048, 256), capacity=8192)
    for grid in grids.values():
        clock[0] = 0.0
        times = measure(timer, grid, 2.0)
        needed = sum(ms_per_token * point.work for point in grid.spanning[:4]) / 1e3
        assert clock[0] <= max(2.0, 3 * needed)
        assert len(times) >= 4
        for axis in ("x", "y"):  # a surface has two sizes per axis
            of_grid = {getattr(point, axis) for point in grid.points}
            assert len({getattr(point, axis) for point in times}) >= min(2, len(of_grid))
        assert all(ms == ms_per_token * point.work for point, ms in times.items())


def test_short_time_costs_density_before_range(clock: list[float]) -> None:
    timer = FakeTimer(lambda point: 0.1 * point.x, clock)
    grid = grids_of(CONFIG, SchedulerLimits(512, 512))[Stage.LINEAR]
    times = measure(timer, grid, 0.15)
    assert Point(Stage.LINEAR, 512) in times
    assert len(times) < len(grid.points)


def test_what_costs_next_to_nothing_is_measured_all_the_same(clock: list[float]) -> None:
    """The corner points of a surface can take most of its time; the points between them can be cheap."""
    timer = FakeTimer(lambda point: 1e-5 * point.work, clock)
    grid = grids_of(shape("qwen2.5-0.5b"), SchedulerLimits(512, 256))[Stage.LATER_CHUNK_ATTENTION]
    seconds = sum(1e-8 * point.work for point in grid.spanning) / 0.6
    times = measure(timer, grid, seconds)
    assert set(grid.spanning) <= times.keys()
    assert {point for point in grid.between if 1e-8 * point.work < 0.01 * seconds} <= times.keys()
    assert len(times) < len(grid.points)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, DeviceMemoryError])
def test_points_without_memory_are_left_out(clock: list[float], error: type[Exception]) -> None:
    def cost_ms(point: Point) -> float:
        if point.x > 100:
            raise error("CUDA out of memory")
        return 0.01 * point.x

    timer = FakeTimer(cost_ms, clock)
    grid = grids_of(CONFIG, SchedulerLimits(2048, 256))[Stage.LINEAR]
    times = measure(timer, grid, 10.0)
    assert max(point.x for point in times) == 96


def test_no_memory_at_all_is_told(clock: list[float]) -> None:
    def cost_ms(point: Point) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    timer = FakeTimer(cost_ms, clock)
    grid = grids_of(CONFIG, SchedulerLimits(2048, 256))[Stage.LINEAR]
    with pytest.raises(MemoryError, match="close other programs"):
        measure(timer, grid, 10.0)


def test_one_disturbance_does_not_show(clock: list[float]) -> None:
    seen: list[Point] = []

    def cost_ms(point: Point) -> float:
        seen.append(point)
        return 1000.0 if len(seen) == 30 else 0.01 * point.x

    grid = grids_of(CONFIG, SchedulerLimits(512, 256))[Stage.LINEAR]
    times = measure(FakeTimer(cost_ms, clock), grid, 10.0)
    assert all(ms == 0.01 * point.x for point, ms in times.items())


def test_grids_span_what_the_scheduler_may_ask_for() -> None:
    grids = grids_of(shape("llama-2-7b"), SchedulerLimits(2048, 256))
    assert Stage.GPU_ATTENTION not in grids  # no GPU in this test
    assert {grids[stage].points[0].x for stage in grids} <= {1, 2, 8}
    assert max(point.x for point in grids[Stage.LINEAR].points) == 256  # prompts show more rows
    assert max(point.x for point in grids[Stage.HEAD].points) == 256
    decode = grids[Stage.CPU_ATTENTION].points
    assert max(point.x for point in decode) == 256
    assert max(point.y for point in decode) == 4096
    assert all(point.x * point.y <= CAPACITY for point in decode)
    first, later = grids[Stage.FIRST_CHUNK_ATTENTION].points, grids[Stage.LATER_CHUNK_ATTENTION].points
    assert all(2 <= point.x == point.y for point in first)
    assert max(point.x for point in first) == max(point.x for point in later) == 2048
    assert all(point.x < point.y for point in later)
    assert max(point.y for point in later) == 4096
    for grid in grids.values():
        assert len(set(grid.points)) == len(grid.points)


@given(
    max_batch_tokens=st.integers(1, 4096),
    capacity_blocks=st.integers(1, 4096),
    max_context=st.sampled_from((64, 512, 4096, 131_072)),
)
def test_later_chunks_always_follow_something_and_make_a_surface(
    max_batch_tokens: int, capacity_blocks: int, max_context: int
) -> None:
    config = replace(CONFIG, max_context_tokens=max_context)
    limits, capacity = SchedulerLimits(max_batch_tokens, 1), capacity_blocks * BLOCK_SIZE
    grid = grids_of(config, limits, capacity)[Stage.LATER_CHUNK_ATTENTION]
    assert all(1 < point.x < point.y for point in grid.points)
    assert len({point.x for point in grid.points}) >= 2
    assert len({point.y for point in grid.points}) >= 2
    assert max(point.x for point in grid.points) <= max(max_batch_tokens, 32)


class Gpu(ImitatedBackend):
    """An imitated GPU with a timeline."""

    timeline: Timeline
    with_flags = False

    def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
        self.with_flags = with_flags
        return super().start(program, with_flags=with_flags, with_graphs=with_graphs)

    def _do(self, operation: Operation) -> None:
        start_ns = time.perf_counter_ns()
        super()._do(operation)
        if operation.stage is not NOTHING:
            self.timeline.add(operation.lane, operation.stage, start_ns, time.perf_counter_ns())


def on_gpu(gpu: Gpu, part: Decoder, storage: KVStorage, timeline: Timeline) -> ModelRunner:
    """Make a model runner for an imitated GPU, whose kernels are torch's operators."""
    gpu.timeline = timeline
    capacity = Capacity.of(64, 16, 1024, BLOCK_SIZE)
    stages = stages_of(part, dispatch)
    return ModelRunner(stages, storage, capacity, gpu, num_programs=8, uses_gpu=True, timeline=timeline)


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.OFFLOAD])
def test_on_a_gpu_stages_are_those_of_iterations(levels: Levels, stage: Stage) -> None:
    gpu, point = Gpu(), Point(stage, 8, 24 if stage.is_attention else 1)
    model = tiny_model((None,) * CONFIG.num_layers, form=Dense(uses_tiles=False))
    device_pool = KVPool(CONFIG, 64, BLOCK_SIZE, torch.float32, CPU, DeviceLayer)
    storage = KVStorage({KVTier.DEVICE: device_pool, KVTier.HOST: storage_of(host=64)[KVTier.HOST]})
    for graphs, turns in (("host-flags", 2), ("eager", 1)):
        levels(graphs=graphs, **dict.fromkeys(KERNELS, "torch"))
        with closing(IterationTimer(model, storage, LIMITS, build=partial(on_gpu, gpu))) as timer:
            for turn in range(turns):
                assert timer.time(point, turn)[point] > 0
                assert gpu.was_graph is gpu.with_flags is (graphs == "host-flags")


def test_attention_of_the_cpu_shows_what_its_rows_cost_on_the_way(decoder: Decoder) -> None:
    storage = storage_of(device=64, host=64)
    with closing(IterationTimer(decoder, storage, LIMITS)) as timer:
        times = timer.time(Point(Stage.CPU_ATTENTION, 8, 24), 0)
    assert {point.stage for point in times} == {Stage.CPU_ATTENTION, Stage.OFFLOAD, Stage.LINEAR}
    assert {point.x for point in times} == {8}


def test_a_sliding_window_counts_in_its_layers_alone() -> None:
    """One layer in four attends to all tokens."""
    windows = (16, 16, 16, None)
    model = tiny_model(windows)
    pools = {t: KVPool(model.config, 512, BLOCK_SIZE, torch.float32, CPU) for t in MEASURED_TIERS}
    with closing(IterationTimer(model, KVStorage(pools), LIMITS)) as timer:
        layers = timer._layers_for(Point(Stage.HEAD, 1))
        assert {windows[layer] for layer in layers[:-1]} == set(windows)
        assert timer._mean_of(layers, {0: 1.0, 1: 9.0}) == pytest.approx(3.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_every_stage_is_measured_and_keeps_no_memory() -> None:
    device = torch.device("cuda")
    model = random_model(CONFIG, dtype=torch.float16, device=device)
    pools = {
        tier: KVPool(CONFIG, 8, BLOCK_SIZE, torch.float16, memory)
        for tier, memory in ((KVTier.DEVICE, device), (KVTier.HOST, CPU))
    }
    taken = []
    for _ in range(3):
        tables = profile(model, KVStorage(pools), SchedulerLimits(16, 4), seconds=0.1)
        check(tables)
        assert tables.linear_ms(1) > 0
        assert tables.iteration_ms > 0
        gc.collect()
        taken.append(torch.cuda.memory_allocated())
    assert taken[2] <= taken[1]


@pytest.mark.parametrize(
    ("is_gpu", "graphs"),
    [(False, "host-flags"), (True, "host-flags"), (True, "device-only"), (True, "eager")],
)
def test_a_model_with_weights_in_host_memory(is_gpu: bool, graphs: str, levels: Levels) -> None:
    """Measured rates divide its matrices, and the tables describe that division."""
    levels(graphs=graphs, **dict.fromkeys(KERNELS, "torch"))
    names = {name: 64 for name, _ in CONFIG.each_matrix() if name != "head"}
    model = tiny_model(
        (None,) * CONFIG.num_layers, form=OffloadedFormat(Dense(uses_tiles=False), DENSE, names)
    )
    limits = SchedulerLimits(max_batch_tokens=16, max_batch_requests=4)
    storage, gpu = storage_of(device=16, host=16), Gpu()
    with closing(
        IterationTimer(model, storage, limits, build=partial(on_gpu, gpu) if is_gpu else None)
    ) as timer:
        for rows in (1, 3, 4):
            point = Point(Stage.LINEAR, rows)
            assert timer.time(point, 0)[point] > 0
            if is_gpu:  # no graph can hold the threads' work
                assert gpu.was_graph is (graphs == "host-flags")
        assert all(each > 0 for values in timer.host_linear_ms.values() for each in values)
        assert len(timer.host_linear_ms) == 3
    if not is_gpu:
        tables = profile(model, storage, limits, seconds=0.2)
        check(tables)
        assert tables.streamed_shares == model.streamed_shares != UNMEASURED
        assert tables.host_linear_ms(1) == 0  # without a GPU nothing overlaps


def test_a_model_with_experts_in_host_memory(levels: Levels) -> None:
    """The streamed share of experts has its own measurement."""
    levels(**dict.fromkeys(KERNELS, "torch"))
    model = expert_model(3)
    model.streamed_shares = model.streamed_experts = UNMEASURED
    limits = SchedulerLimits(max_batch_tokens=64, max_batch_requests=4)
    pools = {tier: KVPool(model.config, 16, BLOCK_SIZE, torch.float32, CPU) for tier in MEASURED_TIERS}
    tables = profile(model, KVStorage(pools), limits, seconds=0.2)
    assert tables.streamed_experts == model.streamed_experts != UNMEASURED
    assert TableCostModel.from_json(tables.to_json()).streamed_experts == tables.streamed_experts
