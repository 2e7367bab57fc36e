"""The load suite from options to page: rate after rate, and what is said of them."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_target import FakeTarget

from neo_desktop.app.bench.load import suite
from neo_desktop.app.bench.load.metrics import LoadCurve, LoadMetrics
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.load.suite import LoadOptions, run_load
from neo_desktop.engine.simulation.workload import WorkloadRequest

SMALL = LoadOptions(
    shape="tiny",
    device="cpu",
    dtype="float32",
    gpu_cache_tokens=512,
    cpu_cache_tokens=2048,
    input_tokens=20,
    output_tokens=6,
    num_requests=10,
    seconds=0.1,
    load_shares=(0.5, 1.0),
    drain_seconds=60.0,  # a machine that is busy with other tests must not lose requests
    warm_up=1,
)


def ignore(share: float, what: str) -> None:
    pass


def last(options: LoadOptions) -> LoadReport:
    return list(run_load(options, ignore))[-1]


@pytest.fixture(scope="module")
def reports() -> list[LoadReport]:
    return list(run_load(SMALL, ignore))


@pytest.fixture(scope="module")
def report(reports: list[LoadReport]) -> LoadReport:
    return reports[-1]


def test_policies_see_the_same_requests_at_the_same_rates(report: LoadReport) -> None:
    auto, gpu_only = report.curves
    assert (auto.name, gpu_only.name) == ("auto", "gpu-only")
    assert auto.capacity is not None
    per_s = auto.capacity.metrics.finished_per_s
    assert [point.rate_per_s for point in auto.points] == pytest.approx([0.5 * per_s, per_s])
    for first, second in zip(auto.points, gpu_only.points, strict=True):
        assert (first.rate_per_s, first.load_share) == (second.rate_per_s, second.load_share)
        for point in (first, second):
            metrics, engine = point.metrics, point.engine
            assert metrics.requests == metrics.finished == 10
            assert engine is not None
            assert engine.iterations > 0
            assert engine.mean_batch > 0
        ours, theirs = first.metrics, second.metrics
        assert (ours.prompt_tokens, ours.output_tokens) == (theirs.prompt_tokens, theirs.output_tokens)
    assert {point.engine.cpu_share for point in gpu_only.points if point.engine} == {0.0}


def test_divided_models_are_loaded_for_each_policy() -> None:
    report = last(replace(SMALL, tensor_parallel=2, policies=("fastdecode", "gpu-only"), rates=(20.0,)))
    assert [curve.name for curve in report.curves] == ["fastdecode", "gpu-only"]
    for curve in report.curves:
        ((point,),) = (curve.points,)
        assert point.metrics.finished == 10


def test_every_step_adds_to_the_report_before(reports: list[LoadReport]) -> None:
    def size(report: LoadReport) -> int:
        return len(report.section().tables) + len(str(report))

    sizes = [size(report) for report in reports]
    assert sizes == sorted(sizes)
    assert len(reports) == 2 * (1 + 1 + 2)  # per policy: alone, capacity, two rates
    for early in reports:
        assert early.section().summary


def test_the_section_names_limits_subjects_and_every_figure(report: LoadReport) -> None:
    section = report.section()
    assert "TTFT within 2000 ms and TPOT within 200 ms for 90% of the requests" in section.summary
    assert "neo-desktop on cpu, float32" in section.title
    assert len(section.tables) == 6
    for table in section.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    notes = " ".join(section.notes)
    for word in ("TTFT:", "TPOT:", "ITL:", "p99", "Good:", "Mean batch:", "20 tokens in and 6 out"):
        assert word in notes
    assert notes.count("engine's process") == 1  # said once for both policies


def test_plots_have_a_curve_for_each_policy_and_percentile(report: LoadReport) -> None:
    for plot in report.section().plots:
        assert plot.svg.count("<polyline") == 4
        for name in ("auto p50", "auto p90", "gpu-only p50", "gpu-only p90", "requests per second"):
            assert f">{name}</text>" in plot.svg


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("auto", "gpu-only")),
        ({"gpu_cache_tokens": None}, ("auto",)),
        ({"cpu_cache_tokens": 0}, ("auto",)),
        ({"gpu_cache_tokens": 0}, ("auto",)),
        ({"policies": ("neo", "fastdecode")}, ("neo", "fastdecode")),
    ],
)
def test_policies_are_compared_where_they_differ(given: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert suite.policies(replace(SMALL, **given)) == expected


def test_an_eight_bit_cpu_cache_does_not_stop_the_policy_without_one() -> None:
    options = replace(SMALL, cpu_cache_dtype="int8", policies=("gpu-only",), rates=(200.0,))
    assert [curve.name for curve in last(options).curves] == ["gpu-only"]


def fake(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[FakeTarget]:
    """Let the suite measure fake targets; gives the list that they are put into."""
    made: list[FakeTarget] = []

    def open_fake(*_: object) -> tuple[FakeTarget, str]:
        made.append(FakeTarget(**settings))
        return made[-1], "a fake"

    monkeypatch.setattr(suite, "_open", open_fake)
    return made


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_an_interrupt_keeps_what_was_measured_and_closes_the_target(
    monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    made = fake(monkeypatch)
    kept: list[LoadReport] = []
    pressed: list[str] = []

    def interrupt(share: float, what: str) -> None:
        if len(kept) == stop_after and not pressed:  # pressed again and again, it would also end the closing
            pressed.append(what)
            signal.raise_signal(signal.SIGINT)  # what Ctrl-C does, also while requests are under way

    def keep() -> None:
        for report in run_load(replace(SMALL, policies=("auto",)), interrupt):
            kept.append(report)

    with pytest.raises(KeyboardInterrupt):
        keep()
    assert len(kept) == stop_after
    assert kept[-1].section().tables
    assert [(target.num_closed, target.open) for target in made] == [(1, set())]


def test_an_interrupt_while_requests_are_open_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake(monkeypatch, gap_s=0.02)
    open_then: list[int] = []

    def interrupt(share: float, what: str) -> None:
        if what.endswith("requests/s") and made[0].open and not open_then:
            open_then.append(len(made[0].open))
            signal.raise_signal(signal.SIGINT)

    options = replace(SMALL, policies=("auto",), rates=(100.0,))
    with pytest.raises(KeyboardInterrupt):
        list(run_load(options, interrupt))
    assert open_then[0] > 0
    assert [(target.num_closed, target.open) for target in made] == [(1, set())]


def test_leaving_the_generator_closes_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake(monkeypatch)
    running = run_load(SMALL, ignore)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert [target.num_closed for target in made] == [1]


def test_requests_still_open_at_the_end_of_the_drain_are_in_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake(monkeypatch, gap_s=0.05)
    report = last(replace(SMALL, policies=("auto",), rates=(1000.0,), drain_seconds=0.1))
    (curve,) = report.curves
    assert curve.points[0].metrics.lost == 10
    assert "10 without an answer (out of time)" in " ".join(report.section().notes)


def test_bursts_grow_until_they_bring_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, gap_s=0.001)
    (curve,) = last(replace(SMALL, policies=("auto",), seconds=5.0, num_requests=4)).curves
    assert curve.capacity is not None
    assert curve.capacity.burst >= 8  # the fake answers any number in the same time
    assert curve.capacity.metrics.requests == curve.capacity.burst


def test_the_capacity_is_the_middle_of_several_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is disturbed is neither the capacity nor what the rates follow."""
    rates: list[float] = []
    original = suite._Measurement._answered

    def noted(self: suite._Measurement, requests: Sequence[WorkloadRequest]) -> LoadMetrics:
        metrics = original(self, requests)
        if len(requests) > 1:
            rates.append(metrics.finished_per_s)
        return metrics

    monkeypatch.setattr(suite._Measurement, "_answered", noted)
    fake(monkeypatch, gap_s=0.001)
    (curve,) = last(replace(SMALL, policies=("auto",), seconds=5.0, num_requests=4)).curves
    assert curve.capacity is not None
    of_this_size = [max(rates[: -suite.CAPACITY_RUNS + 1]), *rates[-suite.CAPACITY_RUNS + 1 :]]
    assert curve.capacity.metrics.finished_per_s == sorted(of_this_size)[suite.CAPACITY_RUNS // 2]


def curve_with(report: LoadReport, shares: list[float]) -> LoadCurve:
    template = report.curves[0].points[0]
    points = [
        replace(
            template,
            rate_per_s=float(rate),
            metrics=replace(template.metrics, good_share=share),
        )
        for rate, share in enumerate(shares, start=1)
    ]
    return replace(report.curves[0], points=tuple(points))


@pytest.mark.parametrize(
    ("shares", "sustained"),
    [([1.0, 0.9, 0.89], 2.0), ([1.0, 1.0], 2.0), ([0.5, 1.0], None), ([1.0, 0.5, 1.0], 1.0), ([], None)],
)
def test_a_rate_is_sustained_if_it_and_all_below_keep_the_limits(
    report: LoadReport, shares: list[float], sustained: float | None
) -> None:
    assert curve_with(report, shares).sustained_per_s == sustained
