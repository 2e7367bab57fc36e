"""The cost-model suite measures sizes that the tables have not seen, and says how far off they are."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from neo_desktop.app.bench import (
    CostModelOptions,
    Report,
    SuiteOptions,
    cost_model,
    run_cost_model,
    run_suites,
)
from neo_desktop.app.bench.cost_model import CostModelCase, CostModelReport
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


def ignore(share: float, what: str) -> None:
    pass


@pytest.fixture(scope="module")
def report() -> CostModelReport:
    return run_cost_model(SMALL, ignore)


def test_every_table_is_asked_for_sizes_that_can_occur(report: CostModelReport) -> None:
    assert {name: len(errors) for name, errors in report.by_table().items()} == dict.fromkeys(
        (
            "linear",
            "cpu_attention",
            "first_chunk_attention",
            "later_chunk_attention",
            "head",
            "transfer",
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


def test_the_error_is_that_of_the_prediction() -> None:
    assert CostModelCase("linear", 3, 1, measured_ms=2.0, predicted_ms=2.5).error == pytest.approx(0.25)
    assert CostModelCase("linear", 3, 1, measured_ms=2.0, predicted_ms=1.5).error == pytest.approx(0.25)


def test_wrong_tables_show_in_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, **more: object) -> TableCostModel:
        tables = right(*args, **more)
        data = tables.to_json()
        for name in ("linear", "head"):
            data[name]["ms"] = [100 * ms for ms in data[name]["ms"]]
        return TableCostModel.from_json(data)

    right = cost_model.profile
    monkeypatch.setattr(cost_model, "profile", wrong)
    errors = run_cost_model(SMALL, ignore).by_table()
    assert min(errors["linear"][0], errors["head"][0]) > 5


@pytest.mark.parametrize(("error", "verdict"), [(0.08, "within the target"), (0.12, "ABOVE the target")])
def test_the_verdict_is_plain(report: CostModelReport, error: float, verdict: str) -> None:
    cases = tuple(replace(case, predicted_ms=case.measured_ms * (1 + error)) for case in report.cases)
    console = Console(width=80, record=True)
    console.print(replace(report, cases=cases).render())
    assert f"{error:.1%}, {verdict} of 10%" in console.export_text()


def test_the_same_seed_draws_the_same_sizes(report: CostModelReport) -> None:
    def linear(seed: int) -> list[int]:
        cases = run_cost_model(replace(SMALL, seed=seed), ignore).cases
        return [case.x for case in cases if case.table == "linear"]

    assert linear(0) == [case.x for case in report.cases if case.table == "linear"]
    assert linear(1) != linear(0)


def test_report_as_table_and_json(tmp_path: Path) -> None:
    report: Report = run_suites(["cost-model"], ignore, SuiteOptions(cost_model=SMALL))
    console = Console(width=80, record=True)
    report.print(console)
    text = console.export_text()
    assert "…" not in text  # everything fits into a narrow terminal
    assert "tiny (random weights)" in text
    report.write_json(tmp_path / "report.json")
    (suite,) = json.loads((tmp_path / "report.json").read_text())["suites"]
    assert suite["suite"] == "cost-model"
    assert suite["within_target"] == (suite["median_error"] <= suite["target"])
    assert suite["tables"]["linear"].keys() == {
        "median_error",
        "p90_error",
        "worst_error",
        "repeated_error",
    }
    assert suite["cases"][0].keys() >= {"table", "x", "y", "measured_ms", "predicted_ms", "error"}
