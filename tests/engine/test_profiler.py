"""The profiler's tables are finite, never fall, and cover every size that the scheduler may use."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from fallback_levels import KERNELS, Levels
from hypothesis import given
from hypothesis import strategies as st
from imitated_streams import ImitatedBackend
from pipeline_case import tiny_model

from neo_desktop.engine.cuda.errors import StreamMemoryError
from neo_desktop.engine.execute.backend import AnyProgram
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling import profiler, stage_timer
from neo_desktop.engine.profiling.copy_timer import CopyTimer
from neo_desktop.engine.profiling.grids import stage_grids
from neo_desktop.engine.profiling.points import Point, Stage
from neo_desktop.engine.profiling.profiler import fill, measure, profile, rising
from neo_desktop.engine.profiling.stage_timer import MIN_ROWS, StageTimer
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import OffloadedFormat
from neo_desktop.models.linear.shares import UNMEASURED
from neo_desktop.models.registry import random_model
from neo_desktop.models.shapes import shape
from neo_desktop.native.relay import RelayStalledError

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
    tables = profile(decoder, storage_of(device=4096, host=4096), LIMITS, seconds=0.5)
    assert tables.attention_ms(KVTier.HOST, 16, 16 * 4000) > 2 * tables.attention_ms(KVTier.HOST, 1, 16)
    assert tables.linear_ms(64) > tables.linear_ms(1)


class FakeTimer(StageTimer):
    """A timer with a formula for times and its own clock."""

    capacity = 1 << 16

    def __init__(self, cost_ms: Callable[[Point], float], clock: list[float]) -> None:
        self.is_cuda, self.attends_alike = False, True
        self.cost_ms = cost_ms
        self.clock = clock
        self.calls: list[Point] = []
        self.copies = cast("CopyTimer", SimpleNamespace(duplex=lambda: 1.25))

    def capacity_tokens(self, tier: KVTier) -> int:
        return self.capacity

    def close(self) -> None:
        pass

    def time_ms(self, point: Point, turn: int) -> float:
        self.calls.append(point)
        ms = self.cost_ms(point)
        self.clock[0] += ms / 1e3
        return ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("ms_per_token", [0.001, 1.0, 30.0])
def test_measuring_keeps_to_its_time(clock: list[float], ms_per_token: float) -> None:
    timer = FakeTimer(lambda point: ms_per_token * point.work, clock)
    grids = stage_grids(timer, shape("llama-2-7b"), SchedulerLimits(2048, 256))
    for grid in grids.values():
        clock[0] = 0.0
        times = measure(timer, grid, 2.0, CONFIG)
        needed = sum(ms_per_token * point.work for point in grid.spanning[:4]) / 1e3
        assert clock[0] <= max(2.0, 3 * needed)
        assert len(times) >= 4
        assert all(ms == ms_per_token * point.work for point, ms in times.items())


def test_points_without_memory_are_left_out(clock: list[float]) -> None:
    def cost_ms(point: Point) -> float:
        if point.x > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0.01 * point.x

    timer = FakeTimer(cost_ms, clock)
    grid = stage_grids(timer, CONFIG, SchedulerLimits(2048, 256))[Stage.LINEAR]
    times = measure(timer, grid, 10.0, CONFIG)
    assert max(point.x for point in times) == 96


def test_no_memory_at_all_is_told(clock: list[float]) -> None:
    def cost_ms(point: Point) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    timer = FakeTimer(cost_ms, clock)
    grid = stage_grids(timer, CONFIG, SchedulerLimits(2048, 256))[Stage.LINEAR]
    with pytest.raises(MemoryError, match="close other programs"):
        measure(timer, grid, 10.0, CONFIG)


@given(
    max_batch_tokens=st.integers(1, 4096),
    capacity_blocks=st.integers(1, 4096),
    max_context=st.sampled_from((64, 512, 4096, 131_072)),
)
def test_later_chunks_always_follow_something_and_make_a_surface(
    max_batch_tokens: int, capacity_blocks: int, max_context: int
) -> None:
    timer = FakeTimer(lambda _: 1.0, [0.0])
    timer.capacity = capacity_blocks * BLOCK_SIZE
    config = replace(CONFIG, max_context_tokens=max_context)
    grid = stage_grids(timer, config, SchedulerLimits(max_batch_tokens, 1))[Stage.LATER_CHUNK_ATTENTION]
    assert all(1 < point.x < point.y for point in grid.points)
    assert len({point.x for point in grid.points}) >= 2
    assert len({point.y for point in grid.points}) >= 2
    most = max(max_batch_tokens, MIN_ROWS)
    assert max(point.x for point in grid.points) <= most


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_rising_never_falls_and_keeps_the_sum(values: list[float]) -> None:
    result = rising(values)
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(result))
    assert sum(result) == pytest.approx(sum(values), abs=1e-6)
    assert rising(sorted(values)) == sorted(values)


@given(
    constant=st.floats(0.001, 1),
    per_request=st.floats(0, 0.1),
    per_context_token=st.floats(0, 1e-4),
    per_token=st.floats(1e-6, 1e-3),
    capacity=st.integers(2_000, 200_000),
)
def test_missing_corners_follow_the_law_of_the_known_points(
    constant: float, per_request: float, per_context_token: float, per_token: float, capacity: int
) -> None:
    xs, ys = (1, 4, 16, 64, 256), (16, 128, 1024, 8192)

    def truth(x: int, y: int) -> float:
        return constant + per_request * x + per_context_token * y + per_token * x * y

    known = {(x, y): truth(x, y) for x in xs for y in ys if x * y <= capacity}
    for x, row in zip(xs, fill(xs, ys, known), strict=True):
        for y, ms in zip(ys, row, strict=True):
            assert ms == pytest.approx(truth(x, y), rel=1e-3)


@pytest.mark.parametrize("error", [StreamMemoryError("refused"), RelayStalledError("nothing came")])
def test_where_flags_fail_threads_hand_over(
    error: RuntimeError, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes_ms(point: Point) -> float:
        if point.stage is Stage.OFFLOAD and fallbacks.level("graphs") == "host-flags":
            raise error
        return 5.0 if point.stage is Stage.OFFLOAD else 1.0

    timer = FakeTimer(takes_ms, [0.0])
    monkeypatch.setattr(timer, "iteration_ms", lambda: 1.0, raising=False)
    monkeypatch.setattr(profiler, "StageTimer", lambda *_: timer)
    tables = profile(decoder, storage_of(device=64, host=64), LIMITS, seconds=1.0)
    assert fallbacks.level("graphs") == "device-only"
    assert (tables.offload_ms(4), tables.linear_ms(4)) == (5.0, 1.0)


class WallClock:
    """A CUDA event on the host's clock."""

    def __init__(self, *, in_graph: bool) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, end: "WallClock") -> float:
        return (end.at_s - self.at_s) * 1e3


class Gpu(ImitatedBackend):
    """A launcher that records the mode of the last program."""

    way: tuple[bool, bool]  # ran as a graph, and signaled the CPU by flags

    def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
        is_first = super().start(program, with_flags=with_flags, with_graphs=with_graphs)
        self.way = self.num_graphs_launched > 0, with_flags
        return is_first


@pytest.fixture
def device_pool() -> KVPool:
    return KVPool(CONFIG, 64, BLOCK_SIZE, torch.float32, CPU, DeviceLayer)


@pytest.fixture
def host_pool() -> KVPool:
    return storage_of(host=64)[KVTier.HOST]


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def gpu_timer(
    levels: Levels, device_pool: KVPool, host_pool: KVPool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StageTimer]:
    """Return a timer on an imitated GPU, whose kernels are torch's operators."""
    monkeypatch.setattr(stage_timer, "timed_event", WallClock)
    levels(**dict.fromkeys(KERNELS, "torch"))
    model = tiny_model((None,) * CONFIG.num_layers, form=Dense(uses_tiles=False))
    storage = KVStorage({KVTier.DEVICE: device_pool, KVTier.HOST: host_pool})
    with closing(StageTimer(model, storage, LIMITS, gpu=gpu)) as timer:
        yield timer


@pytest.mark.parametrize(
    ("stage", "is_graph", "with_flags"),
    [
        (Stage.LINEAR, True, False),
        (Stage.GPU_ATTENTION, True, False),
        (Stage.OFFLOAD, True, True),
        (Stage.TRANSFER, False, True),
        (Stage.SWAP, False, False),
        (Stage.FIRST_CHUNK_ATTENTION, False, False),
        (Stage.LATER_CHUNK_ATTENTION, False, False),
    ],
)
def test_on_a_gpu_stages_run_as_iterations_run_them(
    gpu_timer: StageTimer, gpu: Gpu, levels: Levels, stage: Stage, is_graph: bool, with_flags: bool
) -> None:
    point = Point(stage, 8, 24)
    for turn in range(2):
        assert gpu_timer.time_ms(point, turn) > 0
        assert gpu.way == (is_graph, with_flags)
        assert not gpu.has_graphs  # no graph is kept
    levels(graphs="device-only")
    assert gpu_timer.time_ms(point, 2) > 0
    assert gpu.way == (is_graph and not with_flags, False)
    levels(graphs="eager")
    assert gpu_timer.time_ms(point, 3) > 0
    assert gpu.way == (False, False)


@pytest.mark.parametrize("level", ["host-flags", "device-only"])
def test_transfers_that_are_measured_bring_blocks_to_the_host_and_back(
    gpu_timer: StageTimer, device_pool: KVPool, host_pool: KVPool, levels: Levels, level: str
) -> None:
    levels(graphs=level)

    def num_rows(pool: KVPool) -> list[int]:
        """Return the number of nonzero rows per layer."""
        slots = torch.arange(pool.num_blocks * BLOCK_SIZE)
        rows = torch.empty(2, len(slots), CONFIG.num_kv_heads, CONFIG.head_dim)
        counts = []
        for index in range(CONFIG.num_layers):
            pool.layer(index).read(slots, rows)
            counts.append(int(rows.flatten(2).any(dim=2).sum()))
        return counts

    for part in device_pool.parts:
        part.fill_(1)
    gpu_timer.time_ms(Point(Stage.TRANSFER, 32), 0)
    assert num_rows(host_pool) == [2 * 32] * CONFIG.num_layers
    for part in device_pool.parts:
        part.zero_()
    gpu_timer.time_ms(Point(Stage.TRANSFER, 64 * BLOCK_SIZE), 1)
    assert num_rows(device_pool) == [2 * 32] * CONFIG.num_layers


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
def test_a_model_with_weights_in_host_memory(
    is_gpu: bool, graphs: str, levels: Levels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured rates divide its matrices, and the tables describe that division."""
    levels(graphs=graphs, **dict.fromkeys(KERNELS, "torch"))
    monkeypatch.setattr(stage_timer, "timed_event", WallClock)
    names = {name: 64 for name, _ in CONFIG.each_matrix() if name != "head"}
    model = tiny_model(
        (None,) * CONFIG.num_layers, form=OffloadedFormat(Dense(uses_tiles=False), DENSE, names)
    )
    limits = SchedulerLimits(max_batch_tokens=16, max_batch_requests=4)
    storage = storage_of(device=16, host=16)
    backend = ImitatedBackend()
    with closing(StageTimer(model, storage, limits, gpu=backend if is_gpu else None)) as timer:
        ms = [timer.time_ms(Point(Stage.LINEAR, rows), 0) for rows in (1, 3, 16)]
        if is_gpu:  # no graph can hold the threads' work
            assert backend.was_graph is (graphs == "host-flags")
        assert all(each > 0 for each in ms)
        assert all(each > 0 for values in timer.host_linear_ms.values() for each in values)
        assert len(timer.host_linear_ms) == 3
    if not is_gpu:
        tables = profile(model, storage, limits, seconds=0.2)
        check(tables)
        assert tables.streamed_shares == model.streamed_shares != UNMEASURED
        assert tables.host_linear_ms(1) == 0  # without a GPU nothing overlaps
