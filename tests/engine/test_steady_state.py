"""Best steady states on machines from datasheets, and the value of their tokens."""

from dataclasses import replace

import pytest
import torch
from cost_models import machine
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.schedule.steady_state import (
    WORTH_FILLING,
    Kind,
    SteadyState,
    SteadyStateFinder,
    Workload,
)
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.models.shapes import shape

CHATS = Workload(KVTier.DEVICE, KVTier.HOST, 50, 200, 1000, 1100, 3.5, 2048, 2000.0)


def cost_of(gpu_name: str, model: str) -> TableCostModel:
    gpu = get_gpu(gpu_name)
    return analytic_cost_model(gpu, get_host(gpu.host), shape(model), torch.float16)


def best(cost: TableCostModel, workload: Workload) -> SteadyState:
    return SteadyStateFinder(cost).best(workload)


def test_decodes_go_at_their_own_pace_beside_a_healthy_batch() -> None:
    """An RTX 4090 with conversations: a second reading of the weights would not pay."""
    cost = cost_of("rtx-4090", "llama-3.1-8b")
    steady_state = best(cost, CHATS)
    assert steady_state.kind is Kind.ONE
    assert steady_state.num_async > 50
    assert (cost.num_layers + 1) * steady_state.ms <= CHATS.max_token_ms
    assert steady_state.rate > 1.03 * best(cost, replace(CHATS, most_on_host=0)).rate


@pytest.mark.parametrize(
    "workload",
    [
        replace(CHATS, max_token_ms=0.0),
        replace(CHATS, most_on_host=0),
        replace(CHATS, host=None, most_on_host=0),
    ],
)
def test_nobody_goes_at_his_own_pace_where_it_is_forbidden_or_nobody_is_there(workload: Workload) -> None:
    assert best(cost_of("rtx-4090", "llama-3.1-8b"), workload).num_async == 0


def test_a_bus_that_brings_much_beside_the_work_is_used_and_a_slow_one_is_not() -> None:
    cost = cost_of("gh200", "llama-2-7b")
    workload = replace(CHATS, most_on_host=0, most_streamed=30, most_elsewhere=30)
    steady_state, alone = best(cost, workload), best(cost, replace(workload, most_streamed=0))
    assert steady_state.num_streamed > 5
    assert steady_state.num_device == workload.most_on_device + steady_state.num_streamed
    assert steady_state.rate > 1.01 * alone.rate
    slow = replace(cost, swap=type(cost.swap)((1, 2048), (10.0, 20480.0)))
    assert best(slow, workload) == best(slow, replace(workload, most_streamed=0))


demands = st.builds(
    Workload,
    device=st.just(KVTier.DEVICE),
    host=st.just(KVTier.HOST),
    most_on_device=st.integers(0, 60),
    most_on_host=st.integers(0, 200),
    most_streamed=st.integers(0, 60),
    most_elsewhere=st.integers(200, 250),
    prompt_tokens=st.floats(1, 4000),
    context_tokens=st.floats(1, 4000),
    prompts_per_decode=st.floats(0, 100),
    max_chunk_tokens=st.sampled_from((64, 512, 2048)),
    max_token_ms=st.sampled_from((0.0, 500.0, 2000.0)),
)


@given(
    workload=demands,
    weights_ms=st.sampled_from((0.05, 0.4, 2.0)),
    token_ms=st.sampled_from((0.0, 0.001, 0.05)),
    cpu_token_ms=st.sampled_from((1e-5, 1e-3, 0.05)),
)
def test_tokens_are_worth_what_the_iteration_takes_and_more_memory_never_harms(
    workload: Workload, weights_ms: float, token_ms: float, cpu_token_ms: float
) -> None:
    cost = machine(weights_ms=weights_ms, token_ms=token_ms, cpu_token_ms=cpu_token_ms)
    steady_state = best(cost, workload)
    assert steady_state.num_device == workload.most_on_device + steady_state.num_streamed
    assert steady_state.num_streamed <= workload.most_streamed
    assert steady_state.num_on_host <= workload.most_on_host
    assert steady_state.num_on_host + steady_state.num_streamed <= workload.most_elsewhere
    assert min(steady_state.prompt_ms, steady_state.decode_ms) >= 0
    if steady_state.num_decoded:
        worth = (
            steady_state.chunk_tokens * steady_state.prompt_ms
            + steady_state.num_decoded * steady_state.decode_ms
        )
        assert worth == pytest.approx(steady_state.ms)
        for less in (replace(workload, most_on_host=0), replace(workload, most_streamed=0)):
            assert steady_state.rate * WORTH_FILLING >= best(cost, less).rate * (1 - 1e-9)
