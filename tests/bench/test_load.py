"""The load suite from options to page: one rate after the other, and the text about them."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from neo_desktop.app.bench import load as suite
from neo_desktop.app.bench.load import LoadCurve, LoadReport, run_load
from neo_desktop.app.bench.options import BenchOptions
from neo_desktop.app.bench.workload import OUT_OF_TIME, run
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.sampling_params import SamplingParams

SMALL = BenchOptions(
    shape="tiny",
    device="cpu",
    dtype="float32",
    gpu_cache_tokens=512,
    cpu_cache_tokens=2048,
    input_tokens=20,
    output_tokens=6,
    num_requests=10,
    seconds=0.1,
    drain_seconds=60.0,  # a busy machine must not lose requests
)


def ignore(share: float, what: str) -> None:
    pass


def last(options: BenchOptions) -> LoadReport:
    return list(run_load(options, ignore))[-1]


@pytest.fixture(scope="module", autouse=True)
def _two_rates() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "LOAD_SHARES", (0.5, 1.0))
        yield


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
        assert (first.rate_per_s, first.title) == (second.rate_per_s, second.title)
        for point in (first, second):
            assert point.metrics.requests == point.metrics.finished == 10
        assert first.metrics.output_tokens == second.metrics.output_tokens


@pytest.mark.sample(0)
def test_divided_models_are_loaded_for_each_policy() -> None:
    report = last(replace(SMALL, tensor_parallel=2, policies=["fastdecode", "gpu-only"]))
    assert [curve.name for curve in report.curves] == ["fastdecode", "gpu-only"]
    for curve in report.curves:
        assert [point.metrics.finished for point in curve.points] == [10, 10]


@pytest.fixture
def engine() -> Any:
    settings: dict[str, Any] = {"shape": "tiny", "device": "cpu", "policy": "gpu-only"}
    with Engine.from_pretrained(**settings, gpu_cache_tokens=512) as made:
        yield made
        assert made.stats().num_running == made.stats().num_waiting == 0
        assert all(pool.num_used_blocks == 0 for pool in made.stats().pools.values())


def greedy(count: int, tokens: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)] * count


def test_requests_are_sent_when_they_are_due(engine: Engine) -> None:
    arrivals = [0.0, 20.0, 40.0]
    found = run(engine, [[5] * 20] * 3, greedy(3, 4), lambda share: None, arrivals)
    for record, arrival_ms in zip(found.records, arrivals, strict=True):
        assert record.arrival_ms == arrival_ms
        assert len(record.answer) == 4
        assert record.ttft_ms > 0
    assert found.seconds >= 0.04


def test_requests_out_of_time_are_ended_and_counted(engine: Engine) -> None:
    found = run(engine, [[5] * 20] * 20, greedy(20, 200), lambda share: None, drain_s=0.01)
    assert OUT_OF_TIME in {record.error for record in found.records}


@pytest.mark.sample(1)
@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_an_interrupt_keeps_what_was_measured(stop_after: int) -> None:
    kept: list[LoadReport] = []
    pressed: list[str] = []

    def interrupt(share: float, what: str) -> None:
        if len(kept) == stop_after and not pressed:
            pressed.append(what)
            signal.raise_signal(signal.SIGINT)  # Ctrl-C, also while requests run

    def keep() -> None:
        for report in run_load(replace(SMALL, policies=["auto"]), interrupt):
            kept.append(report)

    with pytest.raises(KeyboardInterrupt):
        keep()
    assert len(kept) == stop_after
    assert kept[-1].section().tables


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
    found = curve_with(report, shares).sustained
    assert (None if found is None else found.rate_per_s) == sustained
