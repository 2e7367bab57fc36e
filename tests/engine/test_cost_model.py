"""Tables interpolate linear costs exactly, never fall where the truth grows, and learn from iterations."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from cost_models import cost_models, machine
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.batch import Contents, IterationTiming
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import (
    Curve,
    MemoryShares,
    Surface,
    TableCostModel,
)
from neo_desktop.engine.predict.estimate import (
    BatchShape,
    Decodes,
    IterationShape,
    copy_wait_ms,
    iteration_ms,
    predict,
    swap_both_ms,
)
from neo_desktop.models.linear.shares import StreamedShares

times = st.floats(0, 1e3, allow_nan=False)


def test_a_curve_is_exact_for_lines_and_level_before_its_first_point() -> None:
    curve = Curve([4, 8, 64, 512], [1 + 0.5 * x for x in (4, 8, 64, 512)])
    for x in (4, 5, 63, 100, 512, 10_000):
        assert curve(x) == pytest.approx(1 + 0.5 * x)
    assert curve(1) == curve(4) == 3.0
    assert curve(0) == 0.0


def test_a_surface_is_exact_for_attention() -> None:
    """a + b·requests + c·tokens, with tokens = requests · context, is bilinear."""

    def truth(requests: float, context: float) -> float:
        return 2 + 0.25 * requests + 0.125 * requests * context

    xs, ys = [1, 8, 64], [16, 128, 4096]
    surface = Surface(xs, ys, [[truth(x, y) for y in ys] for x in xs])
    for x, y in ((1, 16), (5, 77), (64, 4096), (100, 50), (3, 9000), (300, 10_000)):
        assert surface(x, y) == pytest.approx(truth(x, y))
    assert surface(0, 100) == 0.0


@given(
    ms=st.lists(times, min_size=4, max_size=4),
    a=st.floats(0, 5000, allow_nan=False),
    b=st.floats(0, 5000, allow_nan=False),
)
def test_a_curve_never_falls_whatever_noise_it_was_made_from(ms: list[float], a: float, b: float) -> None:
    curve = Curve([1, 10, 100, 1000], ms)
    low, high = sorted((a, b))
    assert 0 <= curve(low) <= curve(high) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(
    ("x", "ms", "message"),
    [
        ([], [], "positive and rising"),
        ([0, 1], [1, 2], "positive and rising"),
        ([2, 1], [1, 2], "positive and rising"),
        ([1, 2], [1], "one time for each"),
        ([1, 2], [1, float("nan")], "at least 0 and finite"),
        ([1, 2], [-1, 2], "at least 0 and finite"),
    ],
)
def test_damaged_measurements_are_refused(x: list[float], ms: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(x, ms)


def test_tables_survive_a_file(tmp_path: Path) -> None:
    shares = StreamedShares((1, 64), (0.2, 1.0))
    tables = replace(machine(), host_linear=Curve((1, 8), (0.5, 0.75)), streamed_shares=shares)
    again = TableCostModel.from_json(json.loads(json.dumps(tables.to_json())))
    assert again.to_json() == tables.to_json()
    assert again.attention_ms(KVTier.HOST, 7, 3000) == tables.attention_ms(KVTier.HOST, 7, 3000)
    assert again.streamed_shares == shares


@pytest.mark.parametrize(
    "change", [{"version": 99}, {"version": 2}, {"linear": None}, {"linear": {"x": [1]}}]
)
def test_foreign_or_damaged_tables_are_refused(change: dict[str, object]) -> None:
    data = json.loads(json.dumps(machine().to_json())) | change
    with pytest.raises(ValueError, match="cost tables"):
        TableCostModel.from_json(data)


def test_first_and_later_chunks_have_a_cost_of_their_own() -> None:
    """The chunks differ by a step of 2 ms and a factor of three in time per token."""
    sizes, contexts = (2, 64, 512), (16, 512, 4096)
    cost = replace(
        machine(),
        first_chunk_attention=Curve(sizes, [1 + 0.25 * n for n in sizes]),
        later_chunk_attention=Surface(
            sizes, contexts, [[3 + 0.75 * n + n * context / 64 for context in contexts] for n in sizes]
        ),
    )
    for tokens in (2, 10, 64, 100, 512):
        assert cost.prefill_attention_ms(tokens, 0) == pytest.approx(1 + 0.25 * tokens)
        for start in (16, 400, 3000):
            expected = 3 + 0.75 * tokens + tokens * (start + tokens) / 64
            assert cost.prefill_attention_ms(tokens, start) == pytest.approx(expected)
            corrected = CorrectedCostModel.of(cost)
            corrected.correction.device = 2.0
            assert corrected.prefill_attention_ms(tokens, start) == pytest.approx(2 * expected)


@given(
    first=st.lists(times, min_size=3, max_size=3),
    later=st.lists(st.lists(times, min_size=3, max_size=3), min_size=3, max_size=3),
    tokens=st.integers(8, 512),
    more_tokens=st.integers(0, 200),
    start=st.integers(0, 2000),
    more_start=st.integers(0, 1000),
)
def test_a_longer_chunk_or_more_before_it_never_costs_less_whatever_the_noise(
    first: list[float],
    later: list[list[float]],
    tokens: int,
    more_tokens: int,
    start: int,
    more_start: int,
) -> None:
    sizes, contexts = (8, 64, 512), (16, 512, 4096)
    cost = replace(
        machine(),
        first_chunk_attention=Curve(sizes, first),
        later_chunk_attention=Surface(sizes, contexts, later),
    )
    here = cost.prefill_attention_ms(tokens, start)
    longer = cost.prefill_attention_ms(min(tokens + more_tokens, 512), start)
    assert 0 <= here <= longer * (1 + 1e-9) + 1e-9
    assert here <= cost.prefill_attention_ms(tokens, start + more_start) * (1 + 1e-9) + 1e-9


@given(
    cost=cost_models(),
    requests=st.integers(1, 300),
    context=st.integers(1, 5000),
    tokens=st.integers(1, 3000),
)
def test_nothing_costs_nothing_and_more_never_costs_less(
    cost: TableCostModel, requests: int, context: int, tokens: int
) -> None:
    assert cost.linear_ms(0) == 0
    assert all(cost.attention_ms(tier, 0, 0) == 0 for tier in MEASURED_TIERS)
    assert cost.offload_ms(0) == cost.head_ms(0) == cost.transfer_ms(0) == 0
    load = BatchShape(tokens, requests, 0.0, {KVTier.DEVICE: Decodes(requests, requests * context)})
    more = load.plus({KVTier.HOST: Decodes(1, context)})
    assert ms(cost, load) <= ms(cost, more) * (1 + 1e-9) + 1e-9


def ms(cost: TableCostModel, *batches: BatchShape) -> float:
    """Return the predicted time of an iteration."""
    return iteration_ms(cost, IterationShape(batches))


def timing_of(cost: TableCostModel, batch: BatchShape) -> IterationTiming:
    return predict(cost, IterationShape((batch,)))


def test_two_sub_batches_take_what_the_papers_formula_says() -> None:
    """T = L · (max{T_l0, T_ca1} + max{T_l1 + T_ga0, T_ca0}), NEO section 3.2."""
    cost = machine(offload_ms=0.0)
    load_0 = BatchShape(200, 8, 0.3, {KVTier.DEVICE: Decodes(6, 5000)}).plus({KVTier.HOST: Decodes(2, 900)})
    load_1 = BatchShape().plus({KVTier.HOST: Decodes(20, 9000)})
    expected = 32 * (
        max(cost.linear_ms(202), cost.attention_ms(KVTier.HOST, 20, 9000))
        + max(
            cost.linear_ms(20) + cost.attention_ms(KVTier.DEVICE, 6, 5000) + 0.3,
            cost.attention_ms(KVTier.HOST, 2, 900),
        )
    )
    extra = cost.head_ms(30) + cost.iteration_ms
    assert ms(cost, load_0, load_1) == pytest.approx(expected + extra)


def test_the_hosts_attention_does_not_hide_behind_its_own_products() -> None:
    """The host works in order: attention for one sub-batch, then linear layers for the other."""
    products = Curve((1, 64), (0.3, 0.5))
    cost = replace(machine(offload_ms=0.0), host_linear=products)
    load_0 = BatchShape().plus({KVTier.DEVICE: Decodes(6, 5000)})
    load_1 = BatchShape().plus({KVTier.HOST: Decodes(2, 900)})
    expected = 32 * (
        max(cost.linear_ms(6), cost.attention_ms(KVTier.HOST, 2, 900) + products(6))
        + max(cost.linear_ms(2) + cost.attention_ms(KVTier.DEVICE, 6, 5000), products(2))
    )
    extra = cost.head_ms(8) + cost.iteration_ms
    assert ms(cost, load_0, load_1) == pytest.approx(expected + extra)
    assert ms(cost, load_0) == ms(replace(cost, host_linear=Curve((1,), (0,))), load_0)


@given(
    cost=cost_models(),
    requests=st.integers(1, 300),
    context=st.integers(1, 5000),
    crossing=st.integers(0, 5000),
)
def test_swapped_decodes_cost_what_the_devices_do_or_as_long_as_their_kv_takes_to_come(
    cost: TableCostModel, requests: int, context: int, crossing: int
) -> None:
    decodes = Decodes(requests, requests * context)
    streamed, resident = (BatchShape().plus({tier: decodes}) for tier in (KVTier.STREAMED, KVTier.DEVICE))
    here = ms(cost, resident)
    shape = IterationShape((streamed,), crossing)
    there = iteration_ms(cost, shape)
    swap_ms = cost.num_layers * cost.swap_ms(decodes.context_tokens)
    on_bus_ms = swap_ms + cost.num_layers * cost.transfer_ms(crossing)
    extra = cost.head_ms(requests) + cost.iteration_ms
    expected = max(here, on_bus_ms + extra) if cost.overlaps else here + on_bus_ms
    assert there == pytest.approx(expected)
    assert copy_wait_ms(cost, shape) == pytest.approx(expected - here, abs=1e-6)
    timing = predict(cost, shape)
    assert (timing.total_ms, timing.copies_ms) == (pytest.approx(expected), pytest.approx(swap_ms))
    more = streamed.plus({KVTier.STREAMED: Decodes(1, context)})
    assert there <= iteration_ms(cost, IterationShape((more,), crossing)) * (1 + 1e-9) + 1e-9


@given(
    fetched=st.integers(0, 5000),
    stored=st.integers(0, 5000),
    more=st.integers(0, 100),
    duplex=st.floats(1.0, 2.0),
)
def test_copies_both_ways_take_between_the_longer_and_both_in_turn(
    fetched: int, stored: int, more: int, duplex: float
) -> None:
    cost = machine(duplex=duplex)
    one, other = cost.swap_ms(fetched), cost.swap_ms(stored)
    both = swap_both_ms(cost, fetched, stored)
    assert max(one, other) <= both <= one + other + 1e-9
    assert both == swap_both_ms(cost, stored, fetched)
    assert both <= swap_both_ms(cost, fetched + more, stored) + 1e-9
    assert swap_both_ms(cost, fetched, fetched) == pytest.approx(duplex * one)
    assert swap_both_ms(machine(duplex=1.0), fetched, stored) == max(one, other)
    assert swap_both_ms(machine(duplex=2.0), fetched, stored) == pytest.approx(one + other)


def test_what_copies_and_the_cpus_attention_read_together_is_what_memory_gives() -> None:
    """Each alone hides behind the device; together they need 1.5 times the memory bandwidth."""
    cost = machine(offload_ms=0.0, memory_shares=MemoryShares(0.8, 0.7))
    first = BatchShape().plus({KVTier.DEVICE: Decodes(30, 3000), KVTier.STREAMED: Decodes(1, 400)})
    second = BatchShape().plus({KVTier.HOST: Decodes(2, 2600)})
    on_bus_ms, on_host_ms = cost.swap_ms(400), cost.attention_ms(KVTier.HOST, 2, 2600)
    extra = cost.head_ms(33) + cost.iteration_ms
    alone = ms(replace(cost, memory_shares=MemoryShares()), first, second)
    slow = replace(cost, memory_shares=MemoryShares(8.0, 7.0))
    shared = 32 * (8.0 * on_bus_ms + 7.0 * on_host_ms) + extra
    assert ms(slow, first, second) == pytest.approx(shared)
    assert shared > alone
    assert ms(cost, first, second) == pytest.approx(
        max(alone, 32 * (0.8 * on_bus_ms + 0.7 * on_host_ms) + extra)
    )
    no_copies = first._replace(decodes={KVTier.DEVICE: Decodes(31, 3400)})
    assert ms(slow, no_copies, second) == ms(cost, no_copies, second)


def test_shares_are_those_of_the_next_larger_number_of_rows() -> None:
    shares = StreamedShares((1, 4, 64), (0.1, 0.25, 1.0))
    assert [shares.of(rows) for rows in (1, 2, 4, 5, 64, 1000)] == [0.1, 0.25, 0.25, 1.0, 1.0, 1.0]
    for rows, each in (((), ()), ((0,), (0.5,)), ((2, 2), (0.1, 0.1)), ((1,), (1.5,)), ((1, 2), (0.1,))):
        with pytest.raises(ValueError, match=r"rows|shares"):
            StreamedShares(rows, each)


def test_predictions_follow_a_machine_that_became_slower() -> None:
    """The GPU throttles to half its speed, and other programs load the CPU."""
    corrected = CorrectedCostModel.of(machine())
    for _ in range(300):
        device_ms = 32 * corrected.linear_ms(100)
        corrected.learn(
            IterationTiming(device_ms, 0.0), IterationTiming(2 * 32 * machine().linear_ms(100), 0.0)
        )
        cpu_ms = 32 * corrected.attention_ms(KVTier.HOST, 10, 5000)
        true_ms = 3 * 32 * machine().attention_ms(KVTier.HOST, 10, 5000)
        corrected.learn(IterationTiming(cpu_ms, cpu_ms), IterationTiming(cpu_ms, true_ms))
    assert corrected.linear_ms(500) == pytest.approx(2 * machine().linear_ms(500), rel=0.05)
    assert corrected.attention_ms(KVTier.HOST, 50, 9000) == pytest.approx(
        3 * machine().attention_ms(KVTier.HOST, 50, 9000), rel=0.05
    )


@pytest.mark.parametrize("loss", [0.0, 0.5, 1.5])
def test_predictions_follow_a_machine_on_which_overlapping_loses_time(loss: float) -> None:
    """Every stage takes the predicted time, but the iteration takes longer."""
    corrected, true = CorrectedCostModel.of(machine()), CorrectedCostModel.of(machine())
    true.correction.excess = Contents(attention=loss)
    alone = BatchShape().plus({KVTier.DEVICE: Decodes(20, 9000)})
    both = alone.plus({KVTier.HOST: Decodes(30, 12_000)})
    for _ in range(200):
        for load in (alone, both):
            corrected.learn(timing_of(corrected, load), timing_of(true, load))
    assert timing_of(corrected, both).total_ms == pytest.approx(timing_of(true, both).total_ms, rel=0.05)
    assert timing_of(corrected, alone).total_ms == pytest.approx(timing_of(machine(), alone).total_ms)
    assert (timing_of(true, both).total_ms > timing_of(machine(), both).total_ms) == (loss > 0)


@given(slowdown=st.floats(0.3, 3.9), seed=st.integers(0, 99))
def test_a_bus_that_became_slower_is_noticed_soon_and_nothing_swings(slowdown: float, seed: int) -> None:
    """Copies are the longest part of an iteration and take a multiple of the predicted time."""
    corrected, base = CorrectedCostModel.of(machine()), machine()
    load = BatchShape().plus({KVTier.STREAMED: Decodes(20, 9000)})
    measured = 32 * base.swap_ms(9000) * slowdown
    alone_ms = ms(base, BatchShape().plus({KVTier.DEVICE: Decodes(20, 9000)}))
    total_ms = max(measured, alone_ms)
    factors, noise = [], random.Random(seed)
    for _ in range(400):
        truly = noise.lognormvariate(0.0, 0.05)
        timing = IterationTiming(
            total_ms * truly,
            0.0,
            copies_ms=measured * truly,
            copy_wait_ms=(total_ms - alone_ms) * truly,
            copied_tokens=9000,
        )
        corrected.learn(timing_of(corrected, load), timing)
        factors.append(corrected.correction.bus)
    if slowdown > 1:
        assert factors[15] > 0.9 * slowdown
    assert all(0.92 * slowdown < factor < 1.25 * slowdown for factor in factors[200:])
    assert corrected.correction.device < 1.2
    assert corrected.swap_ms(100) == pytest.approx(base.swap_ms(100) * corrected.correction.bus)


@given(
    slowdown=st.floats(0.5, 2.0),
    waits=st.floats(0.0, 1.0),
    tokens=st.integers(100, 20_000),
    seed=st.integers(0, 9),
)
def test_what_the_device_waits_for_copies_is_not_taken_for_its_own_time(
    slowdown: float, waits: float, tokens: int, seed: int
) -> None:
    """Some layers are resident, so copies can be short although the iteration waits for them."""
    corrected, base = CorrectedCostModel.of(machine()), machine()
    load = BatchShape().plus({KVTier.DEVICE: Decodes(20, 9000), KVTier.STREAMED: Decodes(20, tokens)})
    alone = timing_of(base, load)
    busy_ms = (alone.total_ms - alone.copy_wait_ms) * slowdown
    plain = BatchShape().plus({KVTier.DEVICE: Decodes(20, 9000)})
    plain_ms = timing_of(base, plain).total_ms * slowdown
    noise = random.Random(seed)
    for _ in range(300):
        truly = noise.lognormvariate(0.0, 0.02)
        corrected.learn(timing_of(corrected, plain), IterationTiming(plain_ms * truly, 0.0))
        wait_ms = waits * busy_ms
        measured = IterationTiming(
            (busy_ms + wait_ms) * truly,
            0.0,
            copies_ms=0.5 * busy_ms * truly,
            copy_wait_ms=wait_ms * truly,
            copied_tokens=tokens,
        )
        corrected.learn(timing_of(corrected, load), measured)
    assert corrected.correction.device == pytest.approx(slowdown, rel=0.1)


def test_nothing_is_learned_from_the_first_iteration_of_its_sizes() -> None:
    corrected = CorrectedCostModel.of(machine())
    corrected.learn(IterationTiming(10.0, 6.0), IterationTiming(20.0, 12.0, is_first=True))
    corrected.learn(IterationTiming(10.0, 1.0), IterationTiming(20.0, 2.0, is_first=True))
    assert (corrected.correction.device, corrected.correction.host) == (1.0, 1.0)
