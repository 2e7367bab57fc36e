"""NEO's inequalities hold where they are asked for; the best split is never worse than the simple ones."""

from dataclasses import replace

import pytest
from cost_models import cost_models, machine
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.batch import GraphReach
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import CostModel, Curve, ZeroCostModel
from neo_desktop.engine.predict.estimate import Load, cpu_ms, device_attention_ms, iteration_ms
from neo_desktop.engine.schedule.balance import TOLERANCE, Balance, CpuQueue, Split, asymmetric, symmetric

contexts = st.lists(st.integers(1, 5000), max_size=40)
loads = st.builds(
    lambda decodes, context, prompt, prefill_ms: Load(
        decodes + prompt,
        decodes,
        prefill_ms if prompt else 0.0,
        gpu_requests=decodes,
        gpu_context_tokens=decodes * context,
    ),
    decodes=st.integers(0, 40),
    context=st.integers(1, 3000),
    prompt=st.sampled_from((0, 7, 300, 2000)),
    prefill_ms=st.sampled_from((0.0, 0.5, 20.0)),
)


def parts(split: Split, load: Load, queue: CpuQueue) -> tuple[Load, Load]:
    """The two sub-batches of a split."""

    def tokens(positions: tuple[int, ...]) -> int:
        return sum(queue.context_tokens[position] for position in positions)

    return (
        load.with_cpu_decodes(len(split.first), tokens(split.first)),
        Load().with_cpu_decodes(len(split.second), tokens(split.second)),
    )


def check(split: Split, load: Load, queue: CpuQueue, cost: CostModel) -> None:
    """Nobody is in two places, nothing is empty, and the prediction is that of the estimate."""
    positions = [*split.first, *split.second]
    assert len(set(positions)) == len(positions)
    assert set(positions) <= set(range(len(queue)))
    load_0, load_1 = parts(split, load, queue)
    assert split.is_double == bool(load_0.tokens and load_1.tokens)
    both = (load_0, load_1) if split.is_double else (load_0 if load_0.tokens else load_1, None)
    assert split.predicted_ms == pytest.approx(iteration_ms(cost, *both))


@given(cost=cost_models(), load=loads, queue=contexts.map(CpuQueue), data=st.data())
def test_the_cpu_hides_behind_the_device_in_neos_batches(
    cost: CostModel, load: Load, queue: CpuQueue, data: st.DataObject
) -> None:
    split = asymmetric(cost, load, queue, [False] * len(queue))
    check(split, load, queue, cost)
    load_0, load_1 = parts(split, load, queue)
    slack = 1 + 1e-9
    assert cpu_ms(cost, load_1) <= cost.linear_ms(load_0.tokens) * slack
    if split.first:
        limit_ms = cost.linear_ms(load_1.tokens) + device_attention_ms(cost, load_0)
        assert cpu_ms(cost, load_0) <= limit_ms * slack


@given(cost=cost_models(), load=loads, queue=contexts.map(CpuQueue), data=st.data())
def test_whoever_waited_too_long_joins_at_any_price(
    cost: CostModel, load: Load, queue: CpuQueue, data: st.DataObject
) -> None:
    is_due = data.draw(st.lists(st.booleans(), min_size=len(queue), max_size=len(queue)))
    split = asymmetric(cost, load, queue, is_due)
    check(split, load, queue, cost)
    joined = {*split.first, *split.second}
    assert {position for position, due in enumerate(is_due) if due} <= joined


@given(cost=cost_models(), load=loads, queue=contexts.map(CpuQueue))
def test_fastdecode_takes_everybody_in_two_halves(cost: CostModel, load: Load, queue: CpuQueue) -> None:
    if not load.tokens and not len(queue):
        return
    split = symmetric(cost, load, queue)
    check(split, load, queue, cost)
    assert len(split.first) + len(split.second) == len(queue)
    if len(queue) > 1:
        load_0, load_1 = parts(split, Load(), queue)
        difference = abs(load_0.cpu_context_tokens - load_1.cpu_context_tokens)
        assert difference <= 2 * max(queue.context_tokens)


@given(
    cost=cost_models(),
    load=loads,
    queue=contexts.map(CpuQueue),
    prefill_ms=st.sampled_from((0.0, 10.0, 500.0)),
    decode_ms=st.sampled_from((0.01, 1.0, 30.0)),
)
def test_the_best_split_is_not_worse_than_any_simple_one(
    cost: CostModel, load: Load, queue: CpuQueue, prefill_ms: float, decode_ms: float
) -> None:
    if not load.tokens and not len(queue):
        return
    split, rate = Balance(cost, decode_ms).best(load, prefill_ms if load.tokens else 0.0, queue)
    check(split, load, queue, cost)
    if isinstance(cost, ZeroCostModel):
        return

    def rate_of(other: Split) -> float:
        num_decodes = load.gpu_requests + len(other.first) + len(other.second)
        return (num_decodes * decode_ms + (prefill_ms if load.tokens else 0.0)) / other.predicted_ms

    n = len(queue)
    everybody = load.with_cpu_decodes(n, queue.tokens(0, n))
    simple = [Split((), tuple(range(n)), iteration_ms(cost, everybody), False)]
    if load.tokens:
        simple.append(Split((), (), iteration_ms(cost, load), False))
    for other in simple:
        # Each of a handful of candidates must beat the one before by the tolerance.
        assert rate >= rate_of(other) * (1 - TOLERANCE) ** 6


def test_many_cpu_decodes_ride_along_where_the_device_reads_weights_anyway() -> None:
    """Llama-2-7B on a small card: two decodes take the device as long as sixty tokens."""
    load = Load(2, 2, gpu_requests=2, gpu_context_tokens=800)
    split, _ = Balance(machine(), decode_ms=6.0).best(load, 0.0, CpuQueue([400] * 20))
    assert split.is_double
    assert len(split.first) + len(split.second) >= 10


def test_the_device_works_alone_where_the_cpu_is_hopelessly_slow() -> None:
    load = Load(30, 30, gpu_requests=30, gpu_context_tokens=12_000)
    split, _ = Balance(machine(cpu_token_ms=0.1), decode_ms=0.5).best(load, 0.0, CpuQueue([400] * 20))
    assert not split.first
    assert not split.second


def test_a_few_cpu_decodes_share_one_batch_where_weights_would_be_read_twice_for_them() -> None:
    load = Load(40, 40, gpu_requests=40, gpu_context_tokens=40_000)
    split, _ = Balance(machine(), decode_ms=0.5).best(load, 0.0, CpuQueue([400] * 2))
    assert not split.is_double
    assert len(split.first) == 2


def test_cpu_decodes_join_where_a_hand_off_is_cheap_and_wait_where_it_is_not() -> None:
    """Cheap in a graph alone: not beside a prompt, nor once graphs have fallen."""
    tables = replace(
        machine(weights_ms=0.05),
        hand_off=Curve((1, 256), (5.0, 5.0)),
        graph_rows=256,
        graph_hand_off=Curve((1, 256), (0.001, 0.001)),
    )
    queue = CpuQueue([200] * 6)
    decodes = Load(4, 4, gpu_requests=4, gpu_context_tokens=8000)
    beside_prompt = Load(104, 4, prefill_ms=0.1, gpu_requests=4, gpu_context_tokens=8000)

    def num_joined(cost: CostModel, load: Load) -> int:
        alone = Load(4, 4, gpu_requests=4, gpu_context_tokens=8000)
        split, _ = Balance(cost, iteration_ms(cost, alone) / 4).best(load, 0.0, queue)
        return len(split.first) + len(split.second)

    assert num_joined(tables, decodes) > 0
    assert num_joined(tables, beside_prompt) == 0
    for fallen in (GraphReach(), GraphReach(256, with_cpu=False)):
        assert num_joined(CorrectedCostModel(tables, lambda reach=fallen: reach), decodes) == 0
