"""The cost-model suite measures sizes that the tables have not seen, and says how far off they are."""

import statistics
from dataclasses import replace

import pytest
from suites import ignore, last, shown

from neo_desktop.app.bench import cost_model
from neo_desktop.app.bench.cost_model import CostModelOptions, CostModelReport, run_cost_model
from neo_desktop.engine.predict.cost_model import TableCostModel

SMALL = CostModelOptions(
    shape="tiny",
    device="cpu",
    dtype="float32",
    gpu_cache_tokens=256,
    cpu_cache_tokens=4096,
    points=5,
    repeated=2,
    rounds=2,
    seconds=1.0,
)


@pytest.fixture(scope="module")
def report() -> CostModelReport:
    return last(run_cost_model(SMALL, ignore))


def test_every_table_is_asked_for_sizes_that_can_occur(report: CostModelReport) -> None:
    assert {name: errors.points for name, errors in report.tables.items()} == dict.fromkeys(
        (
            "linear",
            "cpu_attention",
            "first_chunk_attention",
            "later_chunk_attention",
            "head",
            "transfer",
            "swap",
            "hand_off",
        ),
        5,
    )
    for case in report.cases:
        assert min(case.measured_ms, case.predicted_ms) > 0
        if case.table == "cpu_attention":
            assert case.x * case.y <= 4096
        if case.table == "first_chunk_attention":
            assert 1 < case.x == case.y <= 256
        if case.table == "later_chunk_attention":
            start = case.y - case.x
            assert start > 0
            assert start % 16 == 0
            assert 1 < case.x < case.y <= 256


def test_no_size_is_one_of_those_that_the_tables_were_measured_on(report: CostModelReport) -> None:
    held_out = {(case.table, case.x, case.y) for case in report.cases}
    again = {(case.table, case.x, case.y) for case in report.repeated}
    assert again
    assert not held_out & again


def test_the_error_is_that_of_the_prediction(report: CostModelReport) -> None:
    for case in (*report.cases, *report.repeated):
        assert case.error == pytest.approx(abs(case.predicted_ms / case.measured_ms - 1))
    errors = sorted(case.error for case in report.cases if case.table == "linear")
    found = report.tables["linear"]
    assert (found.median_error, found.worst_error) == (errors[2], errors[4])
    assert report.median_error == statistics.median(case.error for case in report.cases)


def test_wrong_tables_show_in_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, **more: object) -> TableCostModel:
        tables = right(*args, **more)
        data = tables.to_json()
        for name in ("linear", "head"):
            data[name]["ms"] = [1e6 * ms for ms in data[name]["ms"]]
        return TableCostModel.from_json(data)

    right = cost_model.profile
    monkeypatch.setattr(cost_model, "profile", wrong)
    report = last(run_cost_model(SMALL, ignore))
    assert all(case.error > 5 for case in report.cases if case.table in ("linear", "head"))


@pytest.mark.parametrize(("error", "verdict"), [(0.08, "within the target"), (0.12, "ABOVE the target")])
def test_the_verdict_is_plain(report: CostModelReport, error: float, verdict: str) -> None:
    assert f"{error:.1%}, {verdict} of 10%" in replace(report, median_error=error).section().summary


def test_the_same_seed_draws_the_same_sizes(report: CostModelReport) -> None:
    def linear(seed: int) -> list[int]:
        cases = last(run_cost_model(replace(SMALL, seed=seed), ignore)).cases
        return [case.x for case in cases if case.table == "linear"]

    assert linear(0) == [case.x for case in report.cases if case.table == "linear"]
    assert linear(1) != linear(0)


def test_the_table_fits_into_a_narrow_terminal(report: CostModelReport) -> None:
    text = shown(report.section())
    assert "…" not in text
    assert "tiny (random weights)" in text
    assert "later_chunk_attention" in text


def test_what_was_measured_before_an_interruption_is_there() -> None:
    first = next(iter(run_cost_model(SMALL, ignore)))
    assert all(case.measured_ms > 0 for case in first.cases)
    assert first.tables.keys() >= {"linear", "head"}
