"""NEO's inequalities hold where they are asked for; the best split is never worse than the simple ones."""

import pytest
from cost_models import THIRD, cost_models, machine
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.placement import PLACES, Place
from neo_desktop.engine.predict.cost_model import CostModel, ZeroCostModel
from neo_desktop.engine.predict.estimate import Decodes, Load, device_attention_ms, host_ms, iteration_ms
from neo_desktop.engine.schedule.draft import HostQueue
from neo_desktop.engine.schedule.split import TOLERANCE, Outlook, Split, Worth

models = cost_models((*PLACES, THIRD))
queues = st.lists(st.tuples(st.sampled_from((Place.HOST, THIRD)), st.integers(1, 5000)), max_size=40).map(
    HostQueue
)


def on_device(decodes: int, context: int) -> Load:
    return Load().plus({Place.DEVICE: Decodes(decodes, decodes * context)} if decodes else {})


def with_prompt(load: Load, tokens: int, prefill_ms: float) -> Load:
    return load._replace(tokens=load.tokens + tokens, prefill_ms=prefill_ms) if tokens else load


def of_host(count: int, context: int) -> HostQueue:
    return HostQueue([(Place.HOST, context)] * count)


loads = st.builds(
    with_prompt,
    st.builds(on_device, decodes=st.integers(0, 40), context=st.integers(1, 3000)),
    tokens=st.sampled_from((0, 7, 300, 2000)),
    prefill_ms=st.sampled_from((0.0, 0.5, 20.0)),
)


def parts(split: Split, load: Load, queue: HostQueue) -> tuple[Load, Load]:
    """The two sub-batches of a split, decode by decode."""
    found = [load, Load()]
    for number, positions in enumerate((split.first, split.second)):
        for position in positions:
            place, context_tokens = queue.contexts[position]
            found[number] = found[number].plus({place: Decodes(1, context_tokens)})
    return found[0], found[1]


def check(split: Split, load: Load, queue: HostQueue, cost: CostModel) -> None:
    """Nobody is in two sub-batches, none is empty, and the prediction is that of the estimate."""
    positions = [*split.first, *split.second]
    assert len(set(positions)) == len(positions) == split.num_taken
    assert set(positions) <= set(range(len(queue)))
    loads = parts(split, load, queue)
    assert split.loads == (loads if all(each.tokens for each in loads) else loads[:1])
    assert split.predicted_ms == pytest.approx(iteration_ms(cost, *split.loads))


@given(cost=models, load=loads, queue=queues)
def test_the_host_hides_behind_the_device_in_neos_batches(
    cost: CostModel, load: Load, queue: HostQueue
) -> None:
    split = Outlook(cost, load, queue).hidden()
    if not split.loads[0].tokens:  # nothing hides behind nothing
        assert split.num_taken == 0
        return
    check(split, load, queue, cost)
    load_0, load_1 = parts(split, load, queue)
    slack = 1 + 1e-9
    assert host_ms(cost, load_1.decodes) <= cost.linear_ms(load_0.tokens) * slack
    if split.first:
        limit_ms = cost.linear_ms(load_1.tokens) + device_attention_ms(cost, load_0)
        assert host_ms(cost, load_0.decodes) <= limit_ms * slack


@given(cost=models, load=loads, queue=queues, data=st.data())
def test_whoever_waited_too_long_joins_at_any_price(
    cost: CostModel, load: Load, queue: HostQueue, data: st.DataObject
) -> None:
    num_due = data.draw(st.integers(0, len(queue)))
    split = Outlook(cost, load, queue).hidden(num_due)
    assert set(range(num_due)) <= {*split.first, *split.second}


@given(cost=models, load=loads, queue=queues)
def test_fastdecode_takes_everybody_in_two_halves(cost: CostModel, load: Load, queue: HostQueue) -> None:
    if not load.tokens and not len(queue):
        return
    split = Outlook(cost, load, queue).halves()
    check(split, load, queue, cost)
    assert split.num_taken == len(queue)
    if len(queue) > 1:
        load_0, load_1 = (
            sum(decodes.context_tokens for decodes in part.decodes.values())
            for part in parts(split, Load(), queue)
        )
        assert abs(load_0 - load_1) <= 2 * max(tokens for _, tokens in queue.contexts)


@given(
    cost=models,
    load=loads,
    queue=queues,
    prefill_ms=st.sampled_from((0.0, 10.0, 500.0)),
    decode_ms=st.sampled_from((0.01, 1.0, 30.0)),
)
def test_the_best_split_is_not_worse_than_any_simple_one(
    cost: CostModel, load: Load, queue: HostQueue, prefill_ms: float, decode_ms: float
) -> None:
    if not load.tokens and not len(queue):
        return
    outlook = Outlook(cost, load, queue)
    worth = Worth(decode_ms, load.num_decodes * decode_ms + (prefill_ms if load.tokens else 0.0))
    split, rate = worth.best(outlook.candidates())
    check(split, load, queue, cost)
    if isinstance(cost, ZeroCostModel):
        return
    simple = [outlook.together()]
    if load.tokens:
        simple.append(outlook.front(0, 0))
    for other in simple:
        # Each of a handful of candidates must beat the one before by the tolerance.
        assert rate >= worth.rate(other) * (1 - TOLERANCE) ** 6


def best(cost: CostModel, load: Load, queue: HostQueue, decode_ms: float) -> Split:
    worth = Worth(decode_ms, load.num_decodes * decode_ms)
    return worth.best(Outlook(cost, load, queue).candidates())[0]


def test_many_host_decodes_ride_along_where_the_device_reads_weights_anyway() -> None:
    """Llama-2-7B on a small card: two decodes take the device as long as sixty tokens."""
    split = best(machine(), on_device(2, 400), of_host(20, 400), decode_ms=6.0)
    assert len(split.loads) == 2
    assert split.num_taken >= 10


def test_the_device_works_alone_where_the_host_is_hopelessly_slow() -> None:
    split = best(machine(cpu_token_ms=0.1), on_device(30, 400), of_host(20, 400), decode_ms=0.5)
    assert split.num_taken == 0


def test_a_few_host_decodes_share_one_batch_where_weights_would_be_read_twice_for_them() -> None:
    split = best(machine(), on_device(40, 1000), of_host(2, 400), decode_ms=0.5)
    assert len(split.loads) == 1
    assert len(split.first) == 2


def test_host_decodes_join_where_a_hand_off_is_cheap_and_wait_where_it_is_not() -> None:
    decodes = on_device(4, 2000)

    def num_joined(hand_off_ms: float) -> int:
        cost = machine(weights_ms=0.05, hand_off_ms=hand_off_ms)
        return best(cost, decodes, of_host(6, 200), iteration_ms(cost, decodes) / 4).num_taken

    assert num_joined(0.001) > 0
    assert num_joined(5.0) == 0
