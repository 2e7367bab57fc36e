"""Plans for weights beyond GPU memory: resident rows, and the division between CPU and bus."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.predict.offloaded_matmul import (
    Rates,
    product_time,
)
from neo_desktop.engine.predict.weight_plan import (
    WeightPlan,
    layer_matrices,
    least_gpu_bytes,
    plan_weights,
    weight_times,
)
from neo_desktop.models.experts_config import ExpertsConfig
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.shapes import shape

CONFIG, DTYPE = shape("llama-3.1-8b"), torch.float16
WEIGHTS = CONFIG.weight_bytes(DTYPE)
MATRICES = layer_matrices(CONFIG, DENSE, DTYPE)
# A desktop, in decimal units.
RATES = Rates(40e9, 8e11, 20e9, 300e9, 3e13, offload_ms=0.03)
GATE_UP = MATRICES["0.gate_up"]
UNIT = GATE_UP.unit

rates = st.builds(
    Rates,
    cpu_bytes_per_s=st.floats(1e9, 3e11),
    cpu_flops=st.floats(1e10, 1e13),
    bus_bytes_per_s=st.floats(1e9, 6e10),
    gpu_bytes_per_s=st.floats(5e10, 3e12),
    gpu_flops=st.floats(1e12, 1e15),
    offload_ms=st.floats(0, 0.2),
    host_bytes_per_s=st.floats(1e9, 5e11),
)


def share(machine: Rates, rows: int) -> float:
    return product_time(machine, GATE_UP, 0, rows).streamed_share


def test_for_one_row_bus_and_cpu_divide_the_weights_by_their_speed() -> None:
    """The paper's α = T_cpu / (T_cpu + T_trans)."""
    found = share(replace(RATES, offload_ms=0.0), 1)
    assert found == pytest.approx(20 / (20 + 40), rel=1e-3)
    assert found < share(RATES, 1) < 1.05 * found  # offloading takes time as well


@given(rates, st.integers(1, 4096), st.floats(0, 0.99))
def test_no_other_share_is_faster(machine: Rates, rows: int, resident: float) -> None:
    """Recompute the times of the CPU and of bus with GPU, for shares over the whole range."""
    sizes, others = GATE_UP, 1 - int(resident * GATE_UP.rows) / GATE_UP.rows
    nbytes, flop = others * sizes.host_bytes, 2 * others * sizes.parameters * rows
    on_gpu = [
        max(share * sizes.device_bytes / machine.gpu_bytes_per_s, share * flop / others / machine.gpu_flops)
        for share in (1 - others, others)
    ]
    unpacking_s = 2 * nbytes / machine.gpu_bytes_per_s
    handed = rows * (sizes.columns + others * sizes.rows) * 2
    offload_s = machine.offload_ms / 1e3 + handed / machine.bus_bytes_per_s

    def ms(share: float) -> float:
        cpu_s = (1 - share) * max(nbytes / machine.cpu_bytes_per_s, flop / machine.cpu_flops)
        return 1e3 * max(
            cpu_s + offload_s if share < 1 else 0.0,
            share * nbytes / machine.bus_bytes_per_s,
            on_gpu[0] + share * (on_gpu[1] + unpacking_s),
            nbytes / machine.host_bytes_per_s,
        )

    best = product_time(machine, sizes, sizes.rows - round(others * sizes.rows), rows)
    assert best.ms == pytest.approx(ms(best.streamed_share))
    assert best.ms <= min(ms(step / 200) for step in range(201)) * (1 + 1e-9)
    assert best.host_ms <= best.ms * (1 + 1e-9)


@given(rates, st.floats(0.15, 1.1))
def test_a_plan_keeps_its_budget_and_forgets_no_row(machine: Rates, share: float) -> None:
    plan = plan_weights(CONFIG, DENSE, DTYPE, int(share * WEIGHTS), machine)
    assert plan.gpu_bytes <= share * WEIGHTS
    assert plan.gpu_bytes + plan.host_bytes == pytest.approx(WEIGHTS, rel=1e-9)
    assert plan.resident_rows.keys() == MATRICES.keys()
    for name, rows in plan.resident_rows.items():
        assert rows == MATRICES[name].rows or (rows % UNIT == 0 and 0 <= rows < MATRICES[name].rows)


def test_matrices_become_wholly_resident_where_a_hand_off_costs_more_than_rows_save() -> None:
    """A few whole matrices at even distances are resident, instead of some rows of every matrix."""
    config = shape("qwen2.5-0.5b")
    slow = replace(RATES, offload_ms=0.3)
    always = least_gpu_bytes(config, DENSE, DTYPE)
    budget = always + (config.weight_bytes(DTYPE) - always) * 2 // 3
    plan = plan_weights(config, DENSE, DTYPE, budget, slow)
    rows = layer_matrices(config, DENSE, DTYPE)["0.gate_up"].rows
    whole = [
        layer for layer in range(config.num_layers) if plan.resident_rows[f"{layer}.gate_up"] > 0.9 * rows
    ]
    assert 6 <= len(whole) <= 14
    assert max(b - a for a, b in pairwise(whole)) <= 4


def test_what_the_cpu_does_faster_beside_the_gpu_stays_with_it() -> None:
    """A server CPU beside a slow card: with all weights on the card, the work would take longer."""
    equal = Rates(200e9, 4e12, 20e9, 220e9, 3e13, offload_ms=0.01)
    plan = plan_weights(CONFIG, DENSE, DTYPE, 2 * WEIGHTS, equal)
    assert 0.3 * WEIGHTS < plan.host_bytes < 0.6 * WEIGHTS
    on_gpu = WeightPlan({name: sizes.rows for name, sizes in MATRICES.items()}, WEIGHTS, 0)
    assert weight_times(MATRICES, plan, equal, 1).ms < 0.7 * weight_times(MATRICES, on_gpu, equal, 1).ms


def test_what_must_be_on_the_gpu_is_told_when_it_does_not_fit() -> None:
    least = least_gpu_bytes(CONFIG, DENSE, DTYPE)
    assert plan_weights(CONFIG, DENSE, DTYPE, least, RATES).gpu_bytes == least
    with pytest.raises(
        MemoryError, match=r"embeddings, head and norms of this model take 2\.10 GB .* smaller"
    ):
        plan_weights(CONFIG, DENSE, DTYPE, least - 1, RATES)


MOE = replace(
    shape("qwen3-4b"),
    num_layers=6,
    experts=ExpertsConfig(count=64, per_token=4, intermediate_size=768, layers=tuple(range(6))),
)


def test_what_every_token_needs_comes_to_the_gpu_before_experts() -> None:
    matrices = layer_matrices(MOE, DENSE, DTYPE)
    least = least_gpu_bytes(MOE, DENSE, DTYPE)
    needed = sum(sizes.device_bytes for sizes in matrices.values() if sizes.used_share == 1)
    plan = plan_weights(MOE, DENSE, DTYPE, least + needed, RATES)
    for layer in range(6):
        for name in ("qkv", "output"):
            assert plan.resident_rows[f"{layer}.{name}"] > 0.8 * matrices[f"{layer}.{name}"].rows


def test_of_experts_whole_ones_are_resident_as_many_in_each_layer() -> None:
    plan = plan_weights(MOE, DENSE, DTYPE, MOE.weight_bytes(DTYPE) // 2, RATES)
    counts = [plan.resident_rows[f"{layer}.experts"] for layer in range(6)]
    assert max(counts) - min(counts) <= 1
    assert 10 < counts[0] < 64
    for layer, count in enumerate(counts):
        assert plan.resident_rows[f"{layer}.experts_gate"] == count * 768
        assert plan.resident_rows[f"{layer}.experts_up"] == count * 768
        assert plan.resident_rows[f"{layer}.experts_down"] == count * MOE.hidden_size
    assert "0.router" not in plan.resident_rows
    assert plan.gpu_bytes + plan.host_bytes == pytest.approx(MOE.weight_bytes(DTYPE), rel=1e-6)


@pytest.mark.parametrize("host_bytes_per_s", [inf, 45e9])
@pytest.mark.parametrize("rows", [1, 3, 10, 40, 1000])
def test_no_other_share_of_experts_takes_less(rows: int, host_bytes_per_s: float) -> None:
    rates = replace(RATES, host_bytes_per_s=host_bytes_per_s)
    experts = layer_matrices(MOE, DENSE, DTYPE)["0.experts"]
    for resident in (0, 20, 63):
        best = product_time(rates, experts, resident, rows).ms
        others = [product_time(rates, experts, resident, rows, step / 64).ms for step in range(65)]
        assert best <= min(others) * (1 + 1e-9)
