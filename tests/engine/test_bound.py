"""The simulator's closed bound against hand arithmetic."""

from dataclasses import replace

import pytest
import torch
from cost_models import flat_cost
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import Curve, Surface, TableCostModel
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.bound import Bound, Room
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.engine.simulation.workload import WorkloadRequest
from neo_desktop.models.shapes import shape


def test_the_bound_equals_the_formula_of_the_roofline() -> None:
    """Each term has a closed form for equal requests and linear costs."""
    requests = [WorkloadRequest(0.0, 100, 11)] * 10
    cost = TableCostModel(
        2,
        True,
        0.0,
        linear=Curve((1, 10, 100), (5.0, 5.0, 50.0)),  # 5 ms to read the weights, 0.5 ms a token
        head=Curve((1, 2), (0, 0)),
        offload=Curve((1, 2), (0, 0)),
        transfer=Curve((1, 2), (0, 0)),
        first_chunk_attention=Curve((1, 2), (0, 0)),
        later_chunk_attention=Surface((1, 2), (1, 2), ((0, 0), (0, 0))),
        attention={
            KVTier.DEVICE: Surface((1, 2), (1, 2), ((0.01, 0.02), (0.02, 0.04))),
            KVTier.HOST: Surface((1, 2), (1, 2), ((0.1, 0.2), (0.2, 0.4))),
        },
    )
    context = 10 * sum(range(101, 111))  # decodes only: the first token comes with the prompt
    tokens = 10 * (100 + 10)
    gpu_tokens, room = 150, Room(150, 10_000)

    def at(x: float) -> float:
        linear = max(2 * 0.5 * tokens, (1 - x) * context / gpu_tokens * 2 * 5.0)
        return max(linear + 2 * 0.01 * (1 - x) * context, 2 * 0.1 * x * context)

    expected = min(at(step / 10_000) for step in range(10_001))
    assert Bound(cost, requests, room).makespan_ms() == pytest.approx(expected, rel=2e-3)
    assert Bound(cost, requests, room).makespan_ms() <= expected
    assert Bound(cost, requests, room).makespan_ms(0, 0) == pytest.approx(at(0))
    shared = replace(cost, overlaps=False)
    assert Bound(shared, requests, room).makespan_ms(1, 1) == pytest.approx(
        2 * 0.5 * tokens + 2 * 0.1 * context
    )


def test_the_bound_knows_what_an_iteration_costs_and_holds() -> None:
    """One limit after the other, by hand: 1 ms per iteration, and 4 ms to read the weights."""
    cost = flat_cost(4.0, iteration_ms=1.0)

    def least(count: int, output_tokens: int, room: Room, *shares: float) -> float:
        return Bound(cost, [WorkloadRequest(0.0, 60, output_tokens)] * count, room).makespan_ms(*shares)

    assert least(1, 5, Room(1000, 1000)) == pytest.approx(5 * 5.0)  # token by token
    context = 8 * (61 + 62 + 63 + 64)
    assert least(8, 5, Room(64, 0)) == pytest.approx(context / 64 * 5.0)  # one decode at a time
    assert least(8, 5, Room(0, 128)) == pytest.approx(context / 128 * 5.0)
    assert least(8, 5, Room(64, 128)) == pytest.approx(context / (64 + 128) * 5.0, rel=0.01)
    assert least(8, 5, Room(64, 128), 0.0, 0.0) == least(8, 5, Room(64, 0))
    assert least(8, 5, Room(10_000, 10_000, requests=2)) == pytest.approx(8 * 4 / 2 * 5.0)


@given(chunks=st.lists(st.integers(1, 2048), min_size=1, max_size=6))
def test_no_way_to_cut_a_prompt_is_cheaper_than_the_bound_says(chunks: list[int]) -> None:
    gpu = get_gpu("t4")
    cost = analytic_cost_model(gpu, get_host(gpu.host), shape("llama-2-7b"), torch.float16)
    cost = replace(cost, iteration_ms=0.0)
    ms, start = cost.head_ms(1), 0
    for tokens in chunks:
        ms += cost.num_layers * (cost.linear_ms(tokens) + cost.prefill_attention_ms(tokens, start))
        start += tokens
    assert Bound(cost, [WorkloadRequest(0.0, start, 1)], Room(3008, 0)).makespan_ms() <= ms * (1 + 1e-9)
