"""NEO's inequalities hold where required; the best partition is never worse than the simple ones."""

import pytest
from cost_models import THIRD, cost_models, machine
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.predict.cost_model import ZERO, TableCostModel
from neo_desktop.engine.predict.estimate import (
    BatchShape,
    Decodes,
    IterationShape,
    device_attention_ms,
    iteration_ms,
    off_device_times,
)
from neo_desktop.engine.schedule.batch_builder import BatchBuilder, HostQueue, SchedulerLimits
from neo_desktop.engine.schedule.partition import TOLERANCE, CandidateGenerator, Objective, Partition

models = cost_models((*MEASURED_TIERS, THIRD))
queues = st.lists(st.tuples(st.sampled_from((KVTier.HOST, THIRD)), st.integers(1, 5000)), max_size=40).map(
    HostQueue
)


def on_device(decodes: int, context: int) -> BatchShape:
    return BatchShape().plus({KVTier.DEVICE: Decodes(decodes, decodes * context)} if decodes else {})


def with_prompt(shape: BatchShape, tokens: int, prefill_ms: float) -> BatchShape:
    return shape._replace(tokens=shape.tokens + tokens, prefill_ms=prefill_ms) if tokens else shape


def generator_of(
    cost: TableCostModel, shape: BatchShape, queue: HostQueue, num_starved: int = 0
) -> CandidateGenerator:
    limits = SchedulerLimits(max_batch_tokens=512, max_batch_requests=256)
    return CandidateGenerator(BatchBuilder(cost, limits, 0, shape, queue, num_starved))


def of_host(count: int, context: int) -> HostQueue:
    return HostQueue([(KVTier.HOST, context)] * count)


shapes = st.builds(
    with_prompt,
    st.builds(on_device, decodes=st.integers(0, 40), context=st.integers(1, 3000)),
    tokens=st.sampled_from((0, 7, 300, 2000)),
    prefill_ms=st.sampled_from((0.0, 0.5, 20.0)),
)


def parts(split: Partition, shape: BatchShape, queue: HostQueue) -> tuple[BatchShape, BatchShape]:
    """Return the two sub-batches of a partition, built decode by decode."""
    found = [shape, BatchShape()]
    for number, positions in enumerate((split.first, split.second)):
        for position in positions:
            tier, context_tokens = queue.contexts[position]
            found[number] = found[number].plus({tier: Decodes(1, context_tokens)})
    return found[0], found[1]


def check(split: Partition, shape: BatchShape, queue: HostQueue, cost: TableCostModel) -> None:
    """Check that sub-batches are disjoint and not empty, and the prediction equals the estimate."""
    positions = [*split.first, *split.second]
    assert len(set(positions)) == len(positions) == split.num_taken
    assert set(positions) <= set(range(len(queue)))
    shapes = parts(split, shape, queue)
    assert split.shape.batches == (shapes if all(each.tokens for each in shapes) else shapes[:1])
    assert split.predicted_ms == pytest.approx(iteration_ms(cost, split.shape))


@given(cost=models, shape=shapes, queue=queues)
def test_the_host_hides_behind_the_device_in_neos_batches(
    cost: TableCostModel, shape: BatchShape, queue: HostQueue
) -> None:
    split = generator_of(cost, shape, queue).hidden()
    if not split.shape.batches[0].tokens:  # without device work nothing can hide
        assert split.num_taken == 0
        return
    check(split, shape, queue, cost)
    load_0, load_1 = parts(split, shape, queue)
    slack = 1 + 1e-9
    assert off_device_times(cost, load_1.decodes).all <= cost.linear_ms(load_0.tokens) * slack
    if split.first:
        limit_ms = cost.linear_ms(load_1.tokens) + device_attention_ms(cost, load_0)
        assert off_device_times(cost, load_0.decodes).all <= limit_ms * slack


@given(cost=models, shape=shapes, queue=queues, data=st.data())
def test_whoever_waited_too_long_joins_at_any_price(
    cost: TableCostModel, shape: BatchShape, queue: HostQueue, data: st.DataObject
) -> None:
    num_starved = data.draw(st.integers(0, len(queue)))
    split = generator_of(cost, shape, queue, num_starved).hidden()
    assert set(range(num_starved)) <= {*split.first, *split.second}


@given(cost=models, shape=shapes, queue=queues)
def test_fastdecode_takes_everybody_in_two_halves(
    cost: TableCostModel, shape: BatchShape, queue: HostQueue
) -> None:
    if not shape.tokens and not len(queue):
        return
    split = generator_of(cost, shape, queue).halves()
    check(split, shape, queue, cost)
    assert split.num_taken == len(queue)
    if len(queue) > 1:
        load_0, load_1 = (
            sum(decodes.context_tokens for decodes in part.decodes.values())
            for part in parts(split, BatchShape(), queue)
        )
        assert abs(load_0 - load_1) <= 2 * max(tokens for _, tokens in queue.contexts)


@given(
    cost=models,
    shape=shapes,
    queue=queues,
    prefill_ms=st.sampled_from((0.0, 10.0, 500.0)),
    decode_ms=st.sampled_from((0.01, 1.0, 30.0)),
)
def test_the_best_split_is_not_worse_than_any_simple_one(
    cost: TableCostModel, shape: BatchShape, queue: HostQueue, prefill_ms: float, decode_ms: float
) -> None:
    if not shape.tokens and not len(queue):
        return
    generator = generator_of(cost, shape, queue)
    worth = Objective(decode_ms, shape.num_decodes * decode_ms + (prefill_ms if shape.tokens else 0.0))
    split = worth.best(generator.candidates())
    check(split, shape, queue, cost)
    if cost is ZERO:
        return
    simple = [generator.together()]
    if shape.tokens:
        simple.append(generator.front(0, 0))
    for other in simple:
        # Each candidate must beat its predecessor by the tolerance.
        assert worth.rate(split) >= worth.rate(other) * (1 - TOLERANCE) ** 6


def best(cost: TableCostModel, shape: BatchShape, queue: HostQueue, decode_ms: float) -> Partition:
    worth = Objective(decode_ms, shape.num_decodes * decode_ms)
    return worth.best(generator_of(cost, shape, queue).candidates())


def test_host_decodes_join_where_a_hand_off_is_cheap_and_wait_where_it_is_not() -> None:
    decodes = on_device(4, 2000)

    def num_joined(offload_ms: float) -> int:
        cost = machine(weights_ms=0.05, offload_ms=offload_ms)
        return best(
            cost, decodes, of_host(6, 200), iteration_ms(cost, IterationShape((decodes,))) / 4
        ).num_taken

    assert num_joined(0.001) > 0
    assert num_joined(5.0) == 0
