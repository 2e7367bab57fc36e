"""Experts are counted as they are chosen, and may lie in any order: no token depends on it."""

import random

import pytest
from expert_models import expert_model, experts_config
from graph_case import BLOCK_SIZE, decodes, make_executor, prompts
from imitated_streams import ImitatedBackend
from pipeline_case import RandomIterations, check_result
from split_models import WINDOWS

from neo_desktop.engine.batch import IterationPlan
from neo_desktop.engine.profiling.expert_use import ExpertUse
from neo_desktop.models.decoder import Decoder

pytestmark = pytest.mark.usefixtures("kernels")
EXPERTS = experts_config().experts
assert EXPERTS is not None
Order = tuple[tuple[int, ...], ...]


def any_order(seed: int) -> Order:
    rng = random.Random(seed)
    return tuple(tuple(rng.sample(range(6), 6)) for _ in range(3))


def by_number(model: Decoder) -> list[list[int]]:
    """How often experts were chosen, by the model's numbers."""
    assert model.expert_use is not None
    assert model.config.experts is not None
    found = []
    for layer in EXPERTS.layers:
        order = model.config.experts.order_of(layer)
        counts = dict(zip(order, model.expert_use[layer, :-1].tolist(), strict=True))
        found.append([counts[expert] for expert in range(6)])
    return found


def rows_of(plan: IterationPlan) -> int:
    return sum(len(sequence.token_ids) for sequence in plan.sequences)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_and_counts_are_the_same_in_any_order(seed: int) -> None:
    reference, counts = expert_model(), []
    for order in (None, any_order(seed)):
        model = expert_model(seed + 1, WINDOWS, order=order)
        executor, _ = make_executor(model, backend=ImitatedBackend(seed))
        iterations, num_rows = RandomIterations(seed, block_size=BLOCK_SIZE), 0
        for plan, context in iterations.plans(8):
            result = executor.execute(plan)
            check_result(reference, plan, context, result)
            iterations.take_in(result)
            num_rows += rows_of(plan)
        executor.close()
        counts.append(by_number(model))
        # Of the last layer only rows are computed that somebody needs.
        assert [sum(of_layer) for of_layer in counts[-1]][:-1] == [2 * num_rows] * 2
    assert counts[0] == counts[1]


def test_rows_of_graphs_that_are_nobodys_are_not_counted() -> None:
    model = expert_model(1, WINDOWS)
    executor, backend = make_executor(model)
    executor.execute(prompts("abcdef"))
    ExpertUse.begin(model)
    for step in range(3):
        executor.execute(decodes("abc", step=step))
    executor.close()
    assert backend.was_graph
    assert [sum(of_layer) for of_layer in by_number(model)] == [2 * 3 * 3] * 3
