"""Published speeds beside the cost model: well-formed rows, shares that the fit gives, one model of time."""

from dataclasses import replace

import pytest
import torch

from benchmarks import world
from benchmarks.world_rows import load, reads
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms
from neo_desktop.engine.simulation.analytic import ITERATION_MS, analytic_cost_model
from neo_desktop.models.linear.dense import DENSE

CASES = world.cases()
FITTED = world.stored()


def test_every_row_has_a_source_and_can_be_modelled_or_says_why_not() -> None:
    for row in load():
        assert row["tps"] > 0, row.title
        assert row["model"], row.title
        assert row["program"], row.title
        assert row["trust"] in ("A", "B", "C"), row.title
        assert row.source, row.title
        if row["skip"]:
            continue
        assert row.source.startswith("https://"), row.title
        read = reads(row)
        assert read.card + read.host + read.host_experts > 1e8, row.title
        assert min(read) >= 0, row.title


def test_the_stored_shares_are_those_of_the_fit() -> None:
    assert world.fit(CASES) == FITTED


def test_no_series_is_in_both_halves() -> None:
    first, second = world.halves(CASES)
    assert not {case.series for case in first} & {case.series for case in second}


def test_predictions_agree_with_rows_that_were_not_fitted() -> None:
    _, checked = world.halves(CASES)
    each = sorted(abs(case.error(FITTED)) for case in checked)
    assert each[len(each) // 2] <= 0.15
    assert sum(error <= world.WITHIN for error in each) >= 0.9 * len(each)


@pytest.mark.parametrize("context", [128, 16_384])
def test_the_formula_of_the_fit_is_that_of_the_simulator(context: int) -> None:
    """A model of 16 bits on a card: the same time but for the time per iteration, sampling and the head."""
    (case,) = (each for each in CASES if (each.row["card"], each.row["quant"]) == ("rtx-4090", "F16"))
    row = replace(case.row, values=case.row.values | {"context": context})
    assert row.gpu is not None
    cost = analytic_cost_model(row.gpu, row.host, row.config, torch.float16)
    decode = BatchShape().plus({KVTier.DEVICE: Decodes(1, context)})
    simulated_ms = iteration_ms(cost, IterationShape((decode,))) - ITERATION_MS
    fitted_ms = world.Case(row, reads(row)).seconds(FITTED | {("all", "token_us"): 0}) * 1e3
    assert row.config.weight_bytes(torch.float16, DENSE) > 15e9
    assert simulated_ms == pytest.approx(fitted_ms, rel=0.02)
