"""The suite `weights` sets ways to run what is larger than GPU memory side by side, at the same memory."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from suites import count_colour, drawn, ignore, last, shown

from neo_desktop.app.bench.charts import BLUE, GREEN, ORANGE
from neo_desktop.app.bench.weights import suite
from neo_desktop.app.bench.weights.report import WeightsReport
from neo_desktop.app.bench.weights.suite import WeightsOptions, measure, run_weights
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.predict.weight_plan import least_gpu_bytes, plan_layers
from neo_desktop.engine.profiling.hardware import HostMemory
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.shapes import shape

SMALL = WeightsOptions(
    shape="tiny", device="cpu", dtype="float32", shares=(0.2, 0.6), prompt_tokens=20, tokens=3, seconds=600.0
)


@pytest.fixture(scope="module")
def reports() -> Sequence[WeightsReport]:
    """On a device that is imitated: threads, and host memory for all."""
    return list(measure(SMALL, ignore))


def test_each_way_is_measured_with_the_same_memory(reports: Sequence[WeightsReport]) -> None:
    report = reports[-1]
    ways = ["divided", "streaming", "layer split"]
    assert [(case.share, case.way) for case in report.cases] == [(s, way) for s in (0.2, 0.6) for way in ways]
    assert report.sides is not None
    together = min(report.sides.cpu_gb_per_s + report.sides.bus_gb_per_s, report.sides.host_gb_per_s)
    config = shape("tiny")
    always = least_gpu_bytes(config, DENSE, torch.float32)
    for case in report.cases:
        assert case.tokens_per_s.samples == 3
        assert case.gpu_bytes <= always + case.share * report.layers_bytes
        assert case.gpu_bytes + case.host_bytes == always + report.layers_bytes
        assert case.bound_share == pytest.approx(case.tokens_per_s.median / case.bound_tokens_per_s)
        divided = report.of("divided", case.share)
        assert divided is not None
        assert case.bound_tokens_per_s == divided.bound_tokens_per_s
        assert case.bound_tokens_per_s <= 1.001 * together * 1e9 / divided.host_bytes
    streamed = {case.way: case.streamed_share for case in report.cases}
    assert (streamed["streaming"], streamed["layer split"]) == (1, 0)


def test_there_is_a_report_after_each_placement(reports: Sequence[WeightsReport]) -> None:
    assert [len(report.cases) for report in reports] == [1, 3, 4, 6, 6]


def test_what_was_found_is_shown(reports: Sequence[WeightsReport]) -> None:
    report = reports[-1]
    text = " ".join(shown(report.section(), 120).split())
    for words in ("tiny (random weights)", "dividing each product is", "layer split", "60%"):
        assert words in text
    (plot,) = report.section().plots
    pixels = drawn(plot)
    assert all(count_colour(pixels, colour) > 50 for colour in (BLUE, GREEN, ORANGE))
    names = [metric.name for metric in report.metrics()]
    assert len(set(names)) == 6
    assert "weights.60%.layer_split.tokens_per_s" in names


def test_without_a_gpu_it_says_why_there_is_nothing() -> None:
    report = last(run_weights(SMALL, ignore))
    assert not report.cases
    assert not report.metrics()
    section = report.section()
    assert section.summary.startswith("The CPU was asked for, so this part was left out")
    assert not section.tables


def test_the_time_is_kept_and_told() -> None:
    report = last(measure(replace(SMALL, seconds=1e-3), ignore))
    assert {case.share for case in report.cases} == {0.6}  # nearest to the middle
    assert report.notes == ("Left out for want of time: 20% of the layers' weights on the GPU.",)


def test_what_finds_no_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "host_memory", lambda: HostMemory(1 << 20, 1 << 10, None))
    with pytest.raises(MemoryError, match=r"GB of weights do not fit into the 0\.0 GB of host memory"):
        last(measure(SMALL, ignore))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"shares": (0.5, 1.0)}, "shares must be at least 0 and less than 1"),
        ({"shares": ()}, "shares must hold at least one value"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"seconds": 0.0}, "seconds must be above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(SMALL, **wrong)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_as_many_first_layers_as_fit(share: float) -> None:
    config = shape("llama-3.2-1b")
    always = least_gpu_bytes(config, DENSE, torch.float16)
    layers_bytes = config.weight_bytes(torch.float16) - always
    plan = plan_layers(config, DENSE, torch.float16, always + int(share * layers_bytes))
    rows = {name: matrix.rows for name, matrix in config.each_matrix() if name != "head"}
    whole = [name for name, resident in plan.resident_rows.items() if resident]
    assert all(plan.resident_rows[name] == rows[name] for name in whole)
    assert {int(name.split(".")[0]) for name in whole} == set(range(int(share * config.num_layers)))
    assert plan.gpu_bytes + plan.host_bytes == always + layers_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_all_ways_are_measured() -> None:
    assert choose_device("auto").type == "cuda"
    report = last(run_weights(replace(SMALL, device="cuda", shares=(0.5,)), ignore))
    assert [case.way for case in report.cases] == ["divided", "streaming", "layer split"]
    assert not report.notes
