"""The suite `hardware` names its measurements, their processor, and missing hardware."""

import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from fake_gpu import BUS_BYTES_PER_S, FLOP_PER_S, LAUNCH_S, READ_BYTES_PER_S, FakeTimer
from imitated_streams import ImitatedBackend, Operation

from neo_desktop import native
from neo_desktop.app.bench.hardware import suite
from neo_desktop.app.bench.hardware.report import HardwareReport
from neo_desktop.app.bench.hardware.suite import (
    LEAST_ROUNDS,
    Measurement,
    doubling,
    rounds,
    run_hardware,
)
from neo_desktop.app.bench.options import HardwareOptions
from neo_desktop.app.bench.section import Section, Spread
from neo_desktop.app.words import binary_size, number
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.backend import Backend, ThreadBackend
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.profiling.device_rates import BOTH, SAMPLE_SECONDS, Direction
from neo_desktop.engine.profiling.hardware import find_gpus
from neo_desktop.engine.profiling.host_rates import Host, native_dtypes
from neo_desktop.engine.profiling.offload import CHAIN, OffloadTimer

MIB = 1 << 20
SMALL = HardwareOptions(
    seconds=0.01,
    threads=(1, 2),
    memory_bytes=8 * MIB,
    cpu_matrix_size=64,
    gpu_memory_bytes=64 * MIB,
    gpu_matrix_sizes=(256, 1024),
    transfer_bytes=(4096, 16 * MIB),
    offload_bytes=(4096,),
)


def ignore(share: float, what: str) -> None:
    assert 0 <= share <= 1
    assert what


@pytest.fixture(scope="module")
def reports() -> list[HardwareReport]:
    """Reports of a computer without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return list(run_hardware(SMALL, ignore))


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(suite, "CudaTimer", FakeTimer)
    monkeypatch.setattr(suite, "fitting_sizes", lambda sizes: tuple(n for n in sizes if n <= 1024))
    monkeypatch.setattr(suite, "offload_of", lambda _, *, in_graph: offload(in_graph=in_graph))


def figures(report: HardwareReport, what: str) -> list[float]:
    return [each.value.median for each in report.figures if each.what == what]


def text_of(section: Section) -> str:
    cells = [cell for table in section.tables for row in (table.columns, *table.rows) for cell in row]
    return "\n".join((section.title, section.summary, *section.notes, *cells))


def test_the_host_is_measured_with_every_number_of_threads(reports: list[HardwareReport]) -> None:
    report = reports[-1]
    for what in ("host reads", "host copies", *(f"CPU multiply-adds, {name}" for name in native_dtypes())):
        assert [each.of for each in report.figures if each.what == what] == ["1 thread", "2 threads"]
    assert all(len(figures(report, f"CPU matrix products, {name}")) == 1 for name in native_dtypes())
    for each in report.figures:
        assert 0 < each.value.p10 <= each.value.median <= each.value.p90
        assert each.value.samples == report.rounds == len(reports)
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
    assert section.summary.endswith("No NVIDIA GPU was found.")
    why = f"No GPU that torch can use: {find_gpus()[1]}."  # details come from the library
    assert any(why in note and "not measured" in note for note in section.notes)
    assert len(figures(report, "hand-off, imitated by threads")) == 1
    assert not any("GPU" in each.what for each in report.figures)


def test_the_summary_tells_the_best_rate_and_that_of_one_thread(reports: list[HardwareReport]) -> None:
    def rate(value: float) -> Spread:
        return Spread(value, value, value, 3)

    speeds = {"1 thread": rate(22.0), "2 threads": rate(37.04)}
    found = [replace(each, value=speeds.get(each.of, each.value)) for each in reports[-1].figures]
    assert (
        replace(reports[-1], figures=tuple(found))
        .section()
        .summary.startswith(
            "This computer reads its memory at 37.0 GB/s with 2 threads (22.0 with 1 thread)."
        )
    )


def test_a_buffer_that_caches_could_hold_is_told(reports: list[HardwareReport]) -> None:
    def told(last_level: int) -> bool:
        notes = replace(reports[-1], last_level_cache_bytes=last_level).section().notes
        return any("last-level cache" in note for note in notes)

    assert told(4 * MIB)
    assert not told(MIB)
    assert not told(0)


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_is_measured_and_named() -> None:
    report = list(run_hardware(SMALL, ignore))[-1]
    assert report.gpu_note == ""
    for dtype in FakeTimer.dtypes:
        found = figures(report, f"GPU matrix products, {dtype}")
        expected = [2 * n**3 / (LAUNCH_S + 2 * n**3 / FLOP_PER_S) / 1e9 for n in (256, 1024)]
        assert found == pytest.approx(expected)
    (read,), (copy,) = (figures(report, what) for what in ("GPU reads", "GPU copies"))
    assert read == pytest.approx(64 * MIB / (LAUNCH_S + 64 * MIB / READ_BYTES_PER_S) / 1e9)
    assert copy < read
    small, large = figures(report, "host to GPU")
    assert small == pytest.approx(4096 / (LAUNCH_S + 4096 / 24e9) / 1e9)
    assert large == pytest.approx(BUS_BYTES_PER_S[Direction.TO_DEVICE] / 1e9, rel=0.01)
    to_host = figures(report, "GPU to host")[-1]
    assert to_host == pytest.approx(BUS_BYTES_PER_S[Direction.TO_HOST] / 1e9, rel=0.01)
    # Both directions count; the slower one determines the end.
    assert figures(report, "both ways together")[-1] == pytest.approx(2 * to_host)
    for way in ("in a graph (decodes)", "on streams (with prompts)"):
        assert figures(report, f"hand-off {way}")[0] > 0
    section = report.section()
    assert "Fake RTX" in section.summary
    assert "No GPU" not in text_of(section)
    assert [plot.svg.count("<polyline") for plot in section.plots] == [2, 3]
    assert ">16 MiB</text>" in section.plots[1].svg


@pytest.mark.usefixtures("with_gpu")
def test_matrices_too_large_for_the_gpu_are_left_out_with_a_note() -> None:
    report = next(run_hardware(replace(SMALL, gpu_matrix_sizes=(256, 8192)), ignore))
    assert len(figures(report, "GPU matrix products, float16")) == 1
    assert "8192 x 8192 were left out" in text_of(report.section())


def test_short_work_is_repeated_until_the_clock_can_see_it() -> None:
    timer = FakeTimer(Streams(torch.device("cuda")), 64 * MIB, 1024, 16 * MIB)
    measurements = list(suite._of_gpu(timer, (256, 1024), (4096, 16 * MIB)))  # type: ignore[arg-type]
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

    work = [Measurement(name, "", 0, "", lambda name=name: measure(name)) for name in "ab"]
    assert list(rounds(work, 1e-9, ignore)) == [1, 2, 3]
    assert order == ["a", "b"] * (1 + LEAST_ROUNDS)
    assert [one.samples for one in work] == [[3.0, 5.0, 7.0], [4.0, 6.0, 8.0]]  # the first round warms up


def test_ctrl_c_keeps_what_was_measured_and_ends_the_threads() -> None:
    kept: list[HardwareReport] = []
    threads_before, lanes_before = torch.get_num_threads(), lane_threads()

    def interrupt(share: float, what: str) -> None:
        if kept and what.startswith("hand-off"):
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


def offload(*, in_graph: bool = True, backend: Backend | None = None) -> OffloadTimer:
    made = backend or (ImitatedBackend() if in_graph else ThreadBackend(None))
    return OffloadTimer(torch.device("cpu"), made, in_graph=in_graph)


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_hand_off_takes_time(in_graph: bool) -> None:
    with closing(offload(in_graph=in_graph)) as made:
        assert made.seconds(4096) > 0


def test_a_hand_off_that_loses_data_is_an_error() -> None:
    class Lossy(ImitatedBackend):
        def enqueue(self, operations: Sequence[Operation]) -> None:
            first = next(o for o in operations if o.lane is Lane.DEVICE and o.stage.name == "offload")
            work = first.work
            first.work = lambda: (work(), work())  # sends twice
            super().enqueue(operations)

    with pytest.raises(RuntimeError, match="lost data"):
        offload(backend=Lossy()).seconds(4096)


@pytest.mark.parametrize("num_queues", [None, 1, 2, 3, 8])
def test_a_hand_off_in_a_graph_does_not_hang_on_a_gpu_with_few_queues(num_queues: int | None) -> None:
    class Kept(ImitatedBackend):
        def forget(self) -> None:
            assert self.check_flags() == CHAIN

    offload(backend=Kept(num_queues=num_queues)).seconds(4096)


def test_a_copy_copies_and_bytes_count_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(MIB)
    host._memory[: MIB // 2] = 7
    clock = iter((0.0, 0.001))
    monkeypatch.setattr("neo_desktop.engine.profiling.host_rates.time.perf_counter", lambda: next(clock))
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
    monkeypatch.setattr("neo_desktop.engine.profiling.host_rates.time.perf_counter", lambda: next(clock))
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


def test_a_spread_is_the_middle_and_where_most_lie() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, pytest.approx(1.2), pytest.approx(2.8), 3)
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 1)
    assert Spread.of(range(101)) == Spread(50.0, 10.0, 90.0, 101)
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_figures_have_about_three_digits() -> None:
    assert [number(value) for value in (0.01234, 1.234, 12.34, 1234.5)] == ["0.0123", "1.23", "12.3", "1,234"]
    assert [binary_size(nbytes) for nbytes in (512, 4096, 64 * MIB, 1020 * MIB, 3 << 30, 1010 << 30)] == [
        "512 B",
        "4 KiB",
        "64 MiB",
        "0.996 GiB",
        "3 GiB",
        "0.986 TiB",
    ]
