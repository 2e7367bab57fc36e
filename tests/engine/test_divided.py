"""Divided weights on machines from datasheets: as fast as the bound allows, and like others where all fit."""

import pytest
import torch

from neo_desktop.engine.predict.weight_plan import (
    WeightPlan,
    layer_matrices,
    plan_weights,
    weight_times,
)
from neo_desktop.engine.simulation.analytic import analytic_cost_model, bytes_read
from neo_desktop.engine.simulation.divided import DividedWeights, machine_rates
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.shapes import shape

CONFIG, DTYPE = shape("llama-2-13b"), torch.float16
MACHINES = ("t4", "rtx-3060", "rtx-4090")


def divided(gpu_name: str, share: float) -> DividedWeights:
    gpu = get_gpu(gpu_name)
    rates = machine_rates(gpu, get_host(gpu.host))
    plan = plan_weights(CONFIG, DENSE, DTYPE, int(share * CONFIG.weight_bytes(DTYPE)), rates)
    return DividedWeights.of(plan, rates, CONFIG, DENSE, DTYPE)


@pytest.mark.parametrize("name", MACHINES)
def test_one_chat_reaches_nine_tenths_of_what_cpu_and_bus_can_read(name: str) -> None:
    for share in (0.06, 0.2, 0.4, 0.6):
        weights = divided(name, share)
        ms = weight_times(weights.matrices, weights.plan, weights.rates, 1).ms
        assert 0.9 <= 1e3 / ms / weights.bound_tokens_per_s <= 1 + 1e-9


@pytest.mark.parametrize("name", MACHINES)
def test_tables_know_what_the_cpu_has_to_do(name: str) -> None:
    gpu = get_gpu(name)
    weights = divided(name, 0.5)
    read = bytes_read(CONFIG, DTYPE, DENSE)
    cost = analytic_cost_model(gpu, get_host(gpu.host), CONFIG, DTYPE, read, weights)
    for tokens in (1, 7, 64, 2048):
        assert 0 < cost.host_linear_ms(tokens) <= cost.linear_ms(tokens)
    whole = analytic_cost_model(gpu, get_host(gpu.host), CONFIG, DTYPE, read)
    assert whole.host_linear_ms(1) == 0
    assert whole.linear_ms(1) < cost.linear_ms(1)
    # Between the points of a curve it errs by little.
    exact = weight_times(weights.matrices, weights.plan, weights.rates, 333).ms / CONFIG.num_layers
    assert cost.linear_ms(333) == pytest.approx(exact, rel=0.05)


def test_weights_of_which_all_are_resident_cost_what_they_cost_undivided() -> None:
    gpu = get_gpu("rtx-4090")
    host = get_host(gpu.host)
    rates = machine_rates(gpu, host)
    config = shape("qwen2.5-0.5b")
    everything = {name: sizes.rows for name, sizes in layer_matrices(config, DENSE, DTYPE).items()}
    plan = WeightPlan(everything, config.weight_bytes(DTYPE), 0)
    all_there = DividedWeights.of(plan, rates, config, DENSE, DTYPE)
    for tokens in (1, 100, 2048):
        with_plan = analytic_cost_model(gpu, host, config, DTYPE, None, all_there).linear_ms(tokens)
        assert with_plan == pytest.approx(
            analytic_cost_model(gpu, host, config, DTYPE).linear_ms(tokens), rel=0.05
        )
