"""The suite `hardware` tells what was measured, on which processor, and what was not there."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from fake_gpu import BUS_BYTES_PER_S, FLOP_PER_S, LAUNCH_S, READ_BYTES_PER_S, UUID, FakeNvml, FakeTimer
from imitated_streams import ImitatedBackend, Operation
from matplotlib.figure import Figure

from neo_desktop import native
from neo_desktop.app.bench import computer
from neo_desktop.app.bench.computer import GpuState
from neo_desktop.app.bench.hardware import suite
from neo_desktop.app.bench.hardware.device import BOTH, SAMPLE_SECONDS, Way
from neo_desktop.app.bench.hardware.host import Host, native_dtypes
from neo_desktop.app.bench.hardware.report import HardwareReport
from neo_desktop.app.bench.hardware.suite import (
    LEAST_ROUNDS,
    HardwareOptions,
    Measurements,
    doubling,
    gpu_figures,
    run_hardware,
)
from neo_desktop.app.bench.section import Section, Spread, number, size
from neo_desktop.app.bench.words import say
from neo_desktop.engine.cuda.streams import WholeDevice
from neo_desktop.engine.execute.backend import Backend, ThreadBackend
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.profiling import hardware
from neo_desktop.engine.profiling.hand_off import CHAIN, HandOff
from neo_desktop.engine.profiling.hardware import find_gpus

MIB = 1 << 20
SMALL = HardwareOptions(
    seconds=0.01,
    threads=(1, 2),
    memory_bytes=8 * MIB,
    cpu_matrix_size=64,
    gpu_memory_bytes=64 * MIB,
    gpu_matrix_sizes=(256, 1024),
    transfer_bytes=(4096, 16 * MIB),
    hand_off_bytes=(4096,),
)


def ignore(share: float, what: str) -> None:
    assert 0 <= share <= 1
    assert what


@pytest.fixture(scope="module")
def reports() -> list[HardwareReport]:
    """Without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return list(run_hardware(SMALL, ignore))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(computer, "pynvml", fake)
    monkeypatch.setattr(hardware, "pynvml", fake)
    return fake


@pytest.fixture
def with_gpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(suite, "CudaTimer", FakeTimer)
    monkeypatch.setattr(suite, "fitting_sizes", lambda sizes: tuple(n for n in sizes if n <= 1024))
    monkeypatch.setattr(suite, "hand_off_of", lambda _, *, in_graph: hand_off(in_graph=in_graph))
    yield nvml
    assert nvml.num_open == 0


def text_of(section: Section) -> str:
    cells = [cell for table in section.tables for row in (table.columns, *table.rows) for cell in row]
    return "\n".join((section.title, section.summary, *section.notes, *cells))


def test_the_host_is_measured_with_every_number_of_threads(reports: list[HardwareReport]) -> None:
    report = reports[-1]
    assert [row.threads for row in report.host] == [1, 2]
    assert [row.dtype for row in report.matrices] == list(native_dtypes())
    for row in report.host:
        assert (row.bf16_gflop_per_s is not None) == ("bfloat16" in native_dtypes())
        for spread in (row.read_gb_per_s, row.copy_gb_per_s, row.fp32_gflop_per_s):
            assert 0 < spread.p10 <= spread.median <= spread.p90
            assert spread.samples == report.rounds == len(reports)
    assert all(row.gflop_per_s.median > 0 for row in report.matrices)
    assert report.memory_bytes == 8 * MIB


def test_every_round_brings_a_report(reports: list[HardwareReport]) -> None:
    assert [report.rounds for report in reports] == list(range(1, len(reports) + 1))
    assert len(reports) >= LEAST_ROUNDS


def test_progress_runs_from_start_to_end() -> None:
    shares: list[float] = []
    assert list(run_hardware(SMALL, lambda share, what: shares.append(share)))
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_without_a_gpu_the_report_says_so_and_why(reports: list[HardwareReport]) -> None:
    report, section = reports[-1], reports[-1].section()
    assert report.gpu is None
    assert section.summary.endswith("No NVIDIA GPU was found.")
    why = f"No GPU that torch can use: {find_gpus()[1]}."  # the library's words are for the details
    assert any(why in note and "not measured" in note for note in section.notes)
    assert [row.way for row in report.hand_off] == ["threads"]
    assert report.hand_off[0].us.median > 0
    assert "imitated by threads" in text_of(section)
    assert not any(".gpu_" in m.name or "hand_off_graph" in m.name for m in report.metrics())


def test_the_summary_tells_the_best_rate_and_that_of_one_thread(reports: list[HardwareReport]) -> None:
    def rate(value: float) -> Spread:
        return Spread(value, value, value, 3)

    one, two = reports[-1].host
    host = (replace(one, read_gb_per_s=rate(22.0)), replace(two, read_gb_per_s=rate(37.04)))
    report = replace(reports[-1], host=host)
    assert report.section().summary.startswith(
        "This computer reads its memory at 37.0 GB/s with 2 threads (22.0 with 1 thread)."
    )
    assert report.metrics()[0].value == 37.04


def test_a_buffer_that_caches_could_hold_is_told(reports: list[HardwareReport]) -> None:
    def told(last_level: int) -> bool:
        notes = replace(reports[-1], last_level_cache_bytes=last_level).section().notes
        return any("last-level cache" in note for note in notes)

    assert told(4 * MIB)
    assert not told(MIB)
    assert not told(0)


def test_a_gpu_is_measured_and_named(with_gpu: FakeNvml) -> None:
    report = list(run_hardware(SMALL, ignore))[-1]
    gpu = report.gpu
    assert gpu is not None
    assert report.gpu_note == ""
    assert [(row.dtype, row.size) for row in gpu.matrices] == [
        (dtype, n) for dtype in FakeTimer.dtypes for n in (256, 1024)
    ]
    for row in gpu.matrices:
        expected = 2 * row.size**3 / (LAUNCH_S + 2 * row.size**3 / FLOP_PER_S) / 1e9
        assert row.gflop_per_s.median == pytest.approx(expected)
    assert gpu.read_gb_per_s.median == pytest.approx(
        64 * MIB / (LAUNCH_S + 64 * MIB / READ_BYTES_PER_S) / 1e9
    )
    assert gpu.copy_gb_per_s.median < gpu.read_gb_per_s.median
    small, large = gpu.transfers
    assert small.to_device_us.median == pytest.approx((LAUNCH_S + 4096 / 24e9) * 1e6)
    assert large.to_device_gb_per_s == pytest.approx(BUS_BYTES_PER_S[Way.TO_DEVICE] / 1e9, rel=0.01)
    assert large.to_host_gb_per_s == pytest.approx(BUS_BYTES_PER_S[Way.TO_HOST] / 1e9, rel=0.01)
    # Both ways count, and the slower one decides when both have ended.
    assert large.both_ways_gb_per_s == pytest.approx(2 * large.to_host_gb_per_s)
    assert [row.way for row in report.hand_off] == ["streams", "graph"]
    assert all(row.us.median > 0 for row in report.hand_off)
    section = report.section()
    assert "Fake RTX" in section.summary
    assert "No GPU" not in text_of(section)
    assert [plot.name for plot in section.plots] == ["hardware-host-memory", "hardware-transfers"]
    names = [metric.name for metric in report.metrics()]
    assert len(set(names)) == len(names)
    assert "hardware.gpu_matrix_bfloat16_gflop_per_s" in names


def test_a_busy_gpu_and_who_uses_it_are_told_by_name(with_gpu: FakeNvml) -> None:
    report = next(run_hardware(SMALL, ignore))
    text = text_of(report.section())
    assert "busy before the run (utilisation 43%)" in text
    other = psutil.Process(os.getppid()).name()
    assert f"Other programs held memory of the Fake RTX: {other} (process {os.getppid()}, 2.1 GB)." in text
    assert f"process {os.getpid()}" not in text
    assert report.gpu is not None
    state = report.gpu.state
    assert state is not None
    assert (state.power_w, state.power_limit_w, state.temperature_c) == (95.5, 200.0, 61.0)
    assert (state.sm_clock_mhz, state.max_sm_clock_mhz, state.memory_clock_mhz) == (1800, 2100, 7000)


def test_an_idle_gpu_needs_no_note() -> None:
    state = GpuState("Fake RTX", 0.1, None, None, None, None, None, None, ())
    assert say("gpu-state", state=state) == ()
    assert "not measured" in say("gpu-state", state=None)[0]


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_the_driver_s_answer_the_gpu_is_measured_all_the_same(
    with_gpu: FakeNvml, refused: str
) -> None:
    with_gpu.refuse = (refused,)
    report = next(run_hardware(SMALL, ignore))
    assert report.gpu is not None
    assert report.gpu.state is None
    assert "driver could not be asked" in text_of(report.section())


def test_what_the_driver_does_not_tell_is_not_measured(with_gpu: FakeNvml) -> None:
    with_gpu.refuse = ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetUtilizationRates")
    report = next(run_hardware(SMALL, ignore))
    assert report.gpu is not None
    assert report.gpu.state is not None
    assert report.gpu.state.power_limit_w is None
    assert "not measured" in text_of(report.section())


def test_matrices_too_large_for_the_gpu_are_left_out_with_a_note(with_gpu: FakeNvml) -> None:
    report = next(run_hardware(replace(SMALL, gpu_matrix_sizes=(256, 8192)), ignore))
    assert report.gpu is not None
    assert {row.size for row in report.gpu.matrices} == {256}
    assert "8192 x 8192 were left out" in text_of(report.section())


def test_short_work_is_repeated_until_the_clock_can_see_it() -> None:
    timer = FakeTimer(WholeDevice(torch.device("cuda")), 64 * MIB, 1024, 16 * MIB)
    measurements = Measurements()
    gpu_figures(timer, None, (256, 1024), (4096, 16 * MIB), measurements)  # type: ignore[arg-type]
    for _ in range(2):
        for each in measurements:
            each.measure()
    matrix = [call[-1] for call in timer.calls if call[:2] == ("matrix", 256)]
    assert max(matrix) > 100
    large = [call for call in timer.calls if call[:3] == ("transfer", 16 * MIB, BOTH)]
    seconds = LAUNCH_S + 16 * MIB / 20e9
    assert large[-1][-1] * seconds >= SAMPLE_SECONDS
    assert (large[-1][-1] - 1) * seconds < SAMPLE_SECONDS


def test_measurements_take_turns() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    each = Measurements()
    spreads = {name: each(name, lambda name=name: measure(name)) for name in "ab"}
    assert list(each.rounds(1e-9, ignore)) == [1, 2, 3]
    assert order == ["a", "b"] * (1 + LEAST_ROUNDS)
    assert [one.samples for one in each] == [[3.0, 5.0, 7.0], [4.0, 6.0, 8.0]]  # the first round warms up
    assert {name: spread().median for name, spread in spreads.items()} == {"a": 5.0, "b": 6.0}


def test_ctrl_c_keeps_what_was_measured_and_ends_the_threads() -> None:
    kept: list[HardwareReport] = []
    threads_before, lanes_before = torch.get_num_threads(), lane_threads()

    def interrupt(share: float, what: str) -> None:
        if kept and what == "hand-off":
            raise KeyboardInterrupt

    def measure() -> None:
        for report in run_hardware(SMALL, interrupt):
            kept.append(report)

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert [report.rounds for report in kept] == [1]
    assert kept[0].section().tables
    assert torch.get_num_threads() == threads_before
    assert lane_threads() == lanes_before


def lane_threads() -> int:
    return sum(thread.name.startswith("neo-desktop") for thread in threading.enumerate())


def test_plots_show_every_measurement(with_gpu: FakeNvml) -> None:
    report = next(run_hardware(SMALL, ignore))
    for plot, points, series in zip(report.section().plots, (2, 2), (2, 3), strict=True):
        figure = Figure(figsize=plot.inches)
        plot.draw(figure)
        (axes,) = figure.axes
        assert axes.get_xlabel()
        assert "GB/s" in axes.get_ylabel()
        legend = axes.get_legend()
        assert legend is not None
        assert len(legend.get_texts()) == series
        lines = [line for line in axes.lines if line.get_linestyle() != "None"]
        assert [len(line.get_xdata()) for line in lines] == [points] * series  # type: ignore[arg-type]
        assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == series
        figure.canvas.draw()


def hand_off(*, in_graph: bool = True, backend: Backend | None = None) -> HandOff:
    made = backend or (ImitatedBackend() if in_graph else ThreadBackend(None))
    return HandOff(torch.device("cpu"), made, in_graph=in_graph)


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_hand_off_takes_time(in_graph: bool) -> None:
    with closing(hand_off(in_graph=in_graph)) as made:
        assert made.seconds(4096) > 0


def test_a_hand_off_that_loses_data_is_an_error() -> None:
    class Lossy(ImitatedBackend):
        def enqueue(self, operations: Sequence[Operation]) -> None:
            first = next(o for o in operations if o.lane is Lane.DEVICE and o.stage.name == "hand-off")
            work = first.work
            first.work = lambda: (work(), work())  # once more than was sent
            super().enqueue(operations)

    with pytest.raises(RuntimeError, match="lost data"):
        hand_off(backend=Lossy()).seconds(4096)


@pytest.mark.parametrize("num_queues", [None, 1, 2, 3, 8])
def test_a_hand_off_in_a_graph_does_not_hang_on_a_gpu_with_few_queues(num_queues: int | None) -> None:
    class Kept(ImitatedBackend):
        def forget(self) -> None:
            assert self.check_flags() == CHAIN

    hand_off(backend=Kept(num_queues=num_queues)).seconds(4096)


def test_a_copy_copies_and_bytes_count_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(MIB)
    host._memory[: MIB // 2] = 7
    clock = iter((0.0, 0.001))
    monkeypatch.setattr("neo_desktop.app.bench.hardware.host.time.perf_counter", lambda: next(clock))
    assert host.copy_gb_per_s(1) == pytest.approx(MIB / 0.001 / 1e9)
    assert bool((host._memory == 7).all())


def test_rates_count_all_operations_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(2 * MIB)
    monkeypatch.setattr(native, "read_seconds", lambda part, threads: len(part) * 1e-9 / threads)
    assert host.read_gb_per_s(2) == pytest.approx(2.0)
    assert host.read_gb_per_s(1, MIB) == pytest.approx(1.0)
    monkeypatch.setattr(native, "fma_rate", lambda seconds, threads, dtype: 1e9 * threads)
    assert host.multiply_add_gflop_per_s(3, "float32") == pytest.approx(6.0)
    clock = iter((0.0, 0.5))
    monkeypatch.setattr("neo_desktop.app.bench.hardware.host.time.perf_counter", lambda: next(clock))
    assert host.matrix_gflop_per_s(100, "float32") == pytest.approx(2 * 100**3 / 0.5 / 1e9)


def test_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> Host:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(suite, "Host", refuse)
    with pytest.raises(MemoryError, match=r"8 MiB of host memory .* close other programs"):
        next(run_hardware(SMALL, ignore))


def test_thread_counts_double_up_to_all_cores() -> None:
    assert doubling(1) == (1,)
    assert doubling(2) == (1, 2)
    assert doubling(6) == (1, 2, 4, 6)
    assert doubling(16) == (1, 2, 4, 8, 16)
    assert HardwareOptions().thread_counts[-1] == native.num_usable_cpus()


def test_a_spread_is_the_middle_and_where_most_lie() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, pytest.approx(1.2), pytest.approx(2.8), 3)
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 1)
    assert Spread.of(range(101)) == Spread(50.0, 10.0, 90.0, 101)
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_figures_have_about_three_digits() -> None:
    assert [number(value) for value in (0.01234, 1.234, 12.34, 1234.5)] == ["0.0123", "1.23", "12.3", "1,234"]
    assert [size(nbytes) for nbytes in (512, 4096, 64 * MIB, 1020 * MIB, 3 << 30, 1010 << 30)] == [
        "512 B",
        "4 KiB",
        "64 MiB",
        "0.996 GiB",
        "3 GiB",
        "0.986 TiB",
    ]
