"""The load suite from options to page: engines and servers, rate after rate, and what is said of them."""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_openai_server import Behaviour, fake_openai_server
from fake_target import FakeTarget
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from neo_desktop.app.bench.load import suite
from neo_desktop.app.bench.load.metrics import LoadCurve, LoadMetrics
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.load.suite import LoadOptions, run_load
from neo_desktop.app.bench.load.target import TargetError
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
            ((metrics, engine),) = ((run.metrics, run.engine) for run in point.runs)
            assert metrics.requests == metrics.finished == 10
            assert engine is not None
            assert engine.iterations > 0
            assert engine.mean_batch > 0
        ours, theirs = first.runs[0].metrics, second.runs[0].metrics
        assert (ours.prompt_tokens, ours.output_tokens) == (theirs.prompt_tokens, theirs.output_tokens)
    assert {point.runs[0].engine.cpu_share for point in gpu_only.points if point.runs[0].engine} == {0.0}


def test_divided_models_are_loaded_for_each_policy() -> None:
    report = last(replace(SMALL, tensor_parallel=2, policies=("fastdecode", "gpu-only"), rates=(20.0,)))
    assert [curve.name for curve in report.curves] == ["fastdecode", "gpu-only"]
    for curve in report.curves:
        ((point,),) = (curve.points,)
        assert point.runs[0].metrics.finished == 10


def test_every_step_adds_to_the_report_before(reports: list[LoadReport]) -> None:
    def size(report: LoadReport) -> int:
        return len(report.section().tables) + len(str(report))

    sizes = [size(report) for report in reports]
    assert sizes == sorted(sizes)
    assert len(reports) == 2 * (1 + 1 + 2)  # per policy: alone, capacity, two rates
    for early in reports:
        assert early.section().summary


def test_metrics_have_names_that_do_not_depend_on_the_machine(report: LoadReport) -> None:
    metrics = {metric.name: metric for metric in report.metrics()}
    assert metrics.keys() == {
        f"load.{policy}.{name}"
        for policy in ("auto", "gpu-only")
        for name in (
            "capacity_requests_per_s",
            "capacity_output_tokens_per_s",
            "sustained_requests_per_s",
            *(
                f"at_{share}_percent.{figure}"
                for share in (50, 100)
                for figure in ("ttft_p50_ms", "tpot_p50_ms")
            ),
        )
    }
    assert not metrics["load.auto.at_50_percent.ttft_p50_ms"].higher_is_better
    assert metrics["load.auto.capacity_requests_per_s"].value > 0


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


def test_plots_show_something(report: LoadReport) -> None:
    plots = report.section().plots
    assert len(plots) == 2
    for plot in plots:
        figure = Figure(figsize=plot.inches)
        plot.draw(figure)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        lines = [line for axes in figure.axes for line in axes.lines if len(line.get_xdata()) == 2]
        assert len(lines) >= 4 * len(figure.axes)  # two policies, two percentiles
        assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
        texts = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
        assert texts >= {"auto p50", "auto p90", "gpu-only p50", "gpu-only p90"}


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


def test_a_server_is_measured_without_an_engine() -> None:
    behaviour = Behaviour()
    with fake_openai_server(behaviour) as url:
        report = last(
            LoadOptions(url=url, rates=(50.0, 100.0), num_requests=8, drain_seconds=60.0, repeats=2)
        )
    (curve,) = report.curves
    assert (curve.name, curve.model, curve.capacity) == ("server", "first", None)
    assert report.subject == f"{url}/v1"
    assert [point.label for point in curve.points] == ["at_50_per_s", "at_100_per_s"]
    for point in curve.points:
        assert [run.metrics.finished for run in point.runs] == [8, 8]
        assert {run.engine for run in point.runs} == {None}
    section = report.section()
    assert len(section.tables) == 2
    assert "medians of 2 repeats" in " ".join(section.notes)


def test_failures_are_counted_and_told() -> None:
    def measured(behaviour: Behaviour) -> Iterator[LoadReport]:
        with fake_openai_server(behaviour) as url:
            for report in run_load(LoadOptions(url=url, rates=(100.0,), num_requests=10), ignore):
                yield report
                behaviour.status = 503  # from the first report on: all went well until then

    report = list(measured(Behaviour()))[-1]
    (point,) = report.curves[0].points
    metrics = point.runs[0].metrics
    assert (metrics.requests, metrics.refused, metrics.finished) == (10, 10, 0)
    assert report.curves[0].sustained_per_s is None
    section = report.section()
    assert "10 refused (HTTP 503). The first:" in " ".join(section.notes)
    assert "at no measured rate" in section.summary
    assert section.plots == ()


def test_a_server_that_answers_nothing_ends_the_suite_with_the_reason() -> None:
    with (
        fake_openai_server(Behaviour(status=500)) as url,
        pytest.raises(TargetError, match=r"no request was answered.*HTTP 500"),
    ):
        last(LoadOptions(url=url))


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
    assert curve.points[0].runs[0].metrics.unfinished == 10
    assert "10 unfinished 0.1 s after the last arrival" in " ".join(report.section().notes)


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
            runs=(replace(template.runs[0], metrics=replace(template.runs[0].metrics, good_share=share)),),
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
