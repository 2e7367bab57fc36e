"""Divided weights on machines from datasheets reach the bound, and match other plans if all weights fit."""

import pytest
import torch

from neo_desktop.engine.predict.weight_plan import (
    WeightPlan,
    layer_matrices,
    plan_weights,
    weight_times,
)
from neo_desktop.engine.simulation.analytic import (
    KERNEL_MS,
    LINEAR_KERNELS,
    analytic_cost_model,
    bytes_read,
)
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
    weights = DividedWeights.of(plan, rates, CONFIG, DENSE, DTYPE)
    assert weights is not None
    return weights


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
    # Between the points of a curve, interpolation errs by little.
    exact = weight_times(weights.matrices, weights.plan, weights.rates, 333).ms / CONFIG.num_layers
    assert cost.linear_ms(333) == pytest.approx(exact, rel=0.05)


def test_weights_of_which_all_are_resident_cost_what_they_cost_undivided() -> None:
    gpu = get_gpu("rtx-4090")
    host, config = get_host(gpu.host), shape("qwen2.5-0.5b")
    rates = machine_rates(gpu, host)
    assert DividedWeights.of(None, rates, config, DENSE, DTYPE) is None
    rows = {name: sizes.rows for name, sizes in layer_matrices(config, DENSE, DTYPE).items()}
    all_there = DividedWeights.of(WeightPlan(rows, 0, 0), rates, config, DENSE, DTYPE)
    for tokens in (1, 100, 2048):
        ms = analytic_cost_model(gpu, host, config, DTYPE, None, all_there).linear_ms(tokens)
        assert ms == pytest.approx(analytic_cost_model(gpu, host, config, DTYPE).linear_ms(tokens), rel=0.05)


def test_a_mixture_of_experts_reads_what_its_tokens_need() -> None:
    """One token of Qwen3-30B-A3B uses 3 of 30 billion weights; a prompt uses nearly all 30 billion."""
    config = shape("qwen3-30b-a3b")
    assert config.num_parameters == pytest.approx(30.5e9, rel=0.01)
    gpu = get_gpu("a100-80gb")
    host = get_host(gpu.host)
    rates = machine_rates(gpu, host)
    weights = DividedWeights.of(None, rates, config, DENSE, DTYPE)
    cost = analytic_cost_model(gpu, host, config, DTYPE, bytes_read(config, DTYPE, DENSE), weights)
    assert cost.host_linear_ms(64) == 0
    one_ms, prompt_ms = (cost.num_layers * cost.linear_ms(tokens) for tokens in (1, 512))
    fixed_ms = cost.num_layers * LINEAR_KERNELS * KERNEL_MS
    layers = config.active_parameters - 2 * config.vocab_size * config.hidden_size
    assert one_ms - fixed_ms == pytest.approx(2e3 * layers / rates.gpu_bytes_per_s, rel=0.05)
    assert prompt_ms > 5 * one_ms
