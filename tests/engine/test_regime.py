"""What is best in the long run, on machines from datasheets, and what tokens are worth there."""

from dataclasses import replace

import pytest
import torch
from cost_models import machine
from hypothesis import given, settings
from hypothesis import strategies as st

from neo_desktop.engine.placement import Place
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.schedule.mix import EXPECTED_OUTPUT_TOKENS, Mix
from neo_desktop.engine.schedule.regime import WORTH_FILLING, Demand, Kind, Regime, RegimeFinder
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.models.shapes import shape

# Some of the OSC requests, and of the Azure conversations, on average.
SHORT = Demand(Place.DEVICE, Place.HOST, 6, 150, 372, 395, 8.3, 2048, 2000.0)
CHATS = Demand(Place.DEVICE, Place.HOST, 50, 200, 1000, 1100, 3.5, 2048, 2000.0)


def cost_of(gpu_name: str, model: str) -> TableCostModel:
    gpu = get_gpu(gpu_name)
    return analytic_cost_model(gpu, get_host(gpu.host), shape(model), torch.float16)


def best(cost: TableCostModel, demand: Demand) -> Regime:
    return RegimeFinder(cost).best(demand)


def test_prompts_in_both_sub_batches_where_there_are_many() -> None:
    """A T4 with eight prompt tokens for each output token: both readings of the weights are worthwhile."""
    regime = best(cost_of("t4", "llama-2-7b"), SHORT)
    assert regime.kind is Kind.PROMPTS_IN_BOTH
    assert regime.num_host > 50


def test_decodes_go_at_their_own_pace_beside_a_healthy_batch() -> None:
    """An RTX 4090 with conversations: reading the weights twice would not pay."""
    cost = cost_of("rtx-4090", "llama-3.1-8b")
    regime = best(cost, CHATS)
    assert regime.kind is Kind.ONE
    assert regime.num_staggered > 50
    assert (cost.num_layers + 1) * regime.ms <= CHATS.max_token_ms
    assert regime.rate > 1.05 * best(cost, replace(CHATS, most_on_host=0)).rate


@pytest.mark.parametrize(
    "demand",
    [
        replace(CHATS, max_token_ms=0.0),
        replace(CHATS, most_on_host=0),
        replace(CHATS, host=None, most_on_host=0),
    ],
)
def test_nobody_goes_at_his_own_pace_where_it_is_forbidden_or_nobody_is_there(demand: Demand) -> None:
    assert best(cost_of("rtx-4090", "llama-3.1-8b"), demand).num_staggered == 0


def test_a_cpu_that_is_the_device_itself_has_no_time_beside_it() -> None:
    assert best(machine(overlaps=False), CHATS).num_staggered == 0


def test_a_slow_bus_keeps_requests_on_the_device() -> None:
    cost = cost_of("rtx-4090", "llama-3.1-8b")
    slow = replace(cost, transfer=type(cost.transfer)((1, 2048), (1.0, 2048.0)))
    assert best(slow, CHATS).num_on_host < best(cost, CHATS).num_on_host


def test_a_bus_that_brings_much_beside_the_work_is_used_and_a_slow_one_is_not() -> None:
    cost = cost_of("gh200", "llama-2-7b")
    demand = replace(CHATS, most_on_host=0, most_swapped=30, most_elsewhere=30)
    regime, alone = best(cost, demand), best(cost, replace(demand, most_swapped=0))
    assert regime.num_swapped > 5
    assert regime.num_device == demand.most_on_device + regime.num_swapped
    assert regime.rate > 1.01 * alone.rate
    slow = replace(cost, swap=type(cost.swap)((1, 2048), (10.0, 20480.0)))
    assert best(slow, demand) == best(slow, replace(demand, most_swapped=0))


demands = st.builds(
    Demand,
    device=st.just(Place.DEVICE),
    host=st.just(Place.HOST),
    most_on_device=st.integers(0, 60),
    most_on_host=st.integers(0, 200),
    most_swapped=st.integers(0, 60),
    most_elsewhere=st.integers(200, 250),
    prompt_tokens=st.floats(1, 4000),
    context_tokens=st.floats(1, 4000),
    prompts_per_decode=st.floats(0, 100),
    max_chunk_tokens=st.sampled_from((64, 512, 2048)),
    max_token_ms=st.sampled_from((0.0, 500.0, 2000.0)),
)


@settings(deadline=None)
@given(
    demand=demands,
    weights_ms=st.sampled_from((0.05, 0.4, 2.0)),
    token_ms=st.sampled_from((0.0, 0.001, 0.05)),
    cpu_token_ms=st.sampled_from((1e-5, 1e-3, 0.05)),
)
def test_tokens_are_worth_what_the_iteration_takes_and_more_memory_never_harms(
    demand: Demand, weights_ms: float, token_ms: float, cpu_token_ms: float
) -> None:
    cost = machine(weights_ms=weights_ms, token_ms=token_ms, cpu_token_ms=cpu_token_ms)
    regime = best(cost, demand)
    assert regime.num_device == demand.most_on_device + regime.num_swapped
    assert regime.num_swapped <= demand.most_swapped
    assert regime.num_on_host <= demand.most_on_host
    assert regime.num_on_host + regime.num_swapped <= demand.most_elsewhere
    assert min(regime.prompt_ms, regime.decode_ms) >= 0
    if regime.num_decoded:
        worth = regime.chunk_tokens * regime.prompt_ms + regime.num_decoded * regime.decode_ms
        assert worth == pytest.approx(regime.ms)
        for less in (replace(demand, most_on_host=0), replace(demand, most_swapped=0)):
            assert regime.rate * WORTH_FILLING >= best(cost, less).rate * (1 - 1e-9)


def test_a_mix_is_what_came_and_the_latest_counts_more() -> None:
    mix = Mix()
    assert mix.output_tokens == EXPECTED_OUTPUT_TOKENS
    for prompt_tokens, output_tokens in ((100, 10), (1000, 50)):
        for _ in range(2000):
            mix.add(prompt_tokens)
            mix.count_tokens(output_tokens)
            mix.end()
        assert mix.prompt_tokens == pytest.approx(prompt_tokens, rel=0.1)
        assert mix.output_tokens == pytest.approx(output_tokens, rel=0.1)
        assert mix.context_tokens == mix.prompt_tokens + mix.output_tokens / 2
