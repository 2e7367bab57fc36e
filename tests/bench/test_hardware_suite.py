"""The suite `hardware` names its measurements, their processor, and missing hardware."""

import threading
from collections.abc import Sequence

import pytest
import torch
from fake_gpu import BUS_BYTES_PER_S, FLOP_PER_S, LAUNCH_S, READ_BYTES_PER_S, FakeTimer
from imitated_streams import ImitatedBackend, Operation

from neo_desktop.app.bench import hardware as suite
from neo_desktop.app.bench.device_rates import Direction
from neo_desktop.app.bench.hardware import (
    HardwareReport,
    run_hardware,
)
from neo_desktop.app.bench.host_rates import Host, native_dtypes
from neo_desktop.app.bench.options import BenchOptions, HardwareOptions
from neo_desktop.app.bench.section import Section
from neo_desktop.engine.execute.backend import ThreadBackend
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.profiling.hardware import find_gpus
from neo_desktop.engine.profiling.offload import round_trip_s

CPU = torch.device("cpu")
MIB = 1 << 20
SMALL = BenchOptions(
    hardware=HardwareOptions(
        seconds=0.01,
        threads=(1, 2),
        memory_bytes=8 * MIB,
        cpu_matrix_size=64,
        gpu_memory_bytes=64 * MIB,
        gpu_matrix_sizes=(256, 1024),
        transfer_bytes=(4096, 16 * MIB),
        offload_bytes=(4096,),
    )
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
    backends = iter((ThreadBackend(None), ImitatedBackend()))  # of streams, and of a graph
    monkeypatch.setattr(suite, "open_backend", lambda _: next(backends))
    monkeypatch.setattr(suite, "round_trip_s", lambda _, *args, **named: round_trip_s(CPU, *args, **named))


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


def test_without_a_gpu_the_report_says_so_and_why(reports: list[HardwareReport]) -> None:
    report, section = reports[-1], reports[-1].section()
    assert section.summary.endswith("No NVIDIA GPU was found.")
    why = f"No GPU that torch can use: {find_gpus()[1]}."  # details come from the library
    assert any(why in note and "not measured" in note for note in section.notes)
    assert len(figures(report, "hand-off, imitated by threads")) == 1
    assert not any("GPU" in each.what for each in report.figures)


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


def test_a_hand_off_that_loses_data_is_an_error() -> None:
    class Lossy(ImitatedBackend):
        def enqueue(self, operations: Sequence[Operation]) -> None:
            first = next(o for o in operations if o.lane is Lane.TO_HOST and o.stage.name == "offload")
            first.work = lambda: None
            super().enqueue(operations)

    with pytest.raises(RuntimeError, match="lost data"):
        round_trip_s(CPU, Lossy(), 4096, in_graph=True)


def test_a_copy_copies_and_bytes_count_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(MIB)
    host._memory[: MIB // 2] = 7
    clock = iter((0.0, 0.001))
    monkeypatch.setattr("neo_desktop.app.bench.host_rates.time.perf_counter", lambda: next(clock))
    assert host.copy_gb_per_s(1) == pytest.approx(MIB / 0.001 / 1e9)
    assert bool((host._memory == 7).all())
