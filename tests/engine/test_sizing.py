"""Simulated attention workers against closed forms: bandwidth, link, memory, number of workers wanted."""

from dataclasses import replace
from math import ceil, inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.predict.cost_model import Curve, TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.analytic import KVBudget, analytic_cost_model, host_attention_ms
from neo_desktop.engine.simulation.divided import CPU_CALL_MS
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.engine.simulation.simulator import simulate
from neo_desktop.engine.simulation.workload import WorkloadRequest
from neo_desktop.models.shapes import shape
from research.worker_machines import (
    WORKERS,
    Link,
    SteadyLoad,
    Workers,
    device_ms,
    in_turn,
    with_workers,
    workers_ms,
    workers_wanted,
)

CONFIG, DTYPE = shape("llama-2-7b"), torch.float16
KIND = replace(get_host("ddr4-server"), memory_bytes=64 * 2**30)
GPU = get_gpu("a10g")
COST = analytic_cost_model(GPU, get_host(GPU.host), CONFIG, DTYPE)
IDEAL = Link(inf, 0.0)
LIMITS = SchedulerLimits(max_batch_tokens=2048, max_batch_requests=256)
LOAD = SteadyLoad(128, 500, 500)


def tables(count: int, link: Link = IDEAL, cost: TableCostModel = COST) -> TableCostModel:
    return with_workers(cost, Workers(count, KIND, link), CONFIG, DTYPE)


def rate(cost: TableCostModel, requests: int = 64, policy: str = "fastdecode") -> float:
    """Return decoded tokens per second of requests that arrive at once."""
    work = [WorkloadRequest(0.0, 16, 400)] * requests
    blocks = KVBudget(4096, 500 * requests).num_blocks(WORKERS)
    where = POLICIES[policy].with_tiers([WORKERS])
    return simulate(work, where, cost, blocks, BLOCK_SIZE, LIMITS).output_tokens_per_s


def without_device(cost: TableCostModel) -> TableCostModel:
    """Return costs with a free GPU, so only workers and link count."""
    none = Curve((1, 2048), (0, 0))
    cost = replace(cost, iteration_ms=0.0, linear=none, head=none, first_chunk_attention=none)
    return replace(cost, offload=none, networks={})


@pytest.mark.parametrize("count", [2, 5, 8])
def test_on_an_ideal_link_workers_read_as_much_as_one_so_many_times_as_fast(count: int) -> None:
    one, all_of_them = tables(1), tables(count)
    for requests in (count, 37 * count, 10_000):
        alone = one.attention_ms(WORKERS, requests, requests * 700) - CPU_CALL_MS
        shared = all_of_them.attention_ms(WORKERS, requests, requests * 700) - CPU_CALL_MS
        assert shared == pytest.approx(alone / count)


@pytest.mark.parametrize("count", [1, 8])
def test_a_request_belongs_to_one_worker(count: int) -> None:
    ms = tables(count).attention_ms(WORKERS, 1, 700)
    assert ms == pytest.approx(CPU_CALL_MS + 700 * host_attention_ms(KIND, CONFIG, DTYPE))


def test_throughput_grows_with_workers_where_nothing_else_counts() -> None:
    rates = {count: rate(without_device(tables(count))) for count in (1, 4, 8)}
    for count in (4, 8):
        assert rates[count] == pytest.approx(count * rates[1], rel=0.05)


def test_a_long_way_is_all_that_counts() -> None:
    """Both sub-batches are in flight at once, and each waits for its own answer in each layer."""
    round_trip_ms = 50.0
    found = rate(tables(8, Link(inf, round_trip_ms)))
    predicted = 64 / (CONFIG.num_layers * round_trip_ms) * 1e3
    assert 0.9 * predicted < found < predicted


def test_a_slow_link_brings_so_many_rows() -> None:
    """A row of Llama-2-7B sends q, k and v and receives its output: 4 x 4096 numbers of two bytes.

    One sub-batch's rows leave while the output of the other one returns.
    """
    link = Link(1e8, 0.0)
    row_ms = 4 * 4096 * 2 / 1e8 * 1e3
    assert tables(8, link).network_ms(WORKERS, 64).all == pytest.approx(64 * row_ms)
    found = rate(tables(8, link))
    assert 0.85 < found / (1e3 / (CONFIG.num_layers * row_ms * 3 / 4)) < 1
    # Prompts' KV takes as long as the slower of bus and link.
    assert tables(8, link).transfer_ms(1000) == pytest.approx(1000 * 2 * 4096 * 2 / 1e8 * 1e3)
    assert tables(8).transfer_ms(1000) == COST.transfer_ms(1000)


def layer_ms(cost: TableCostModel, rows: int, context_tokens: int) -> float:
    """Return the time of a layer with two sub-batches of `rows` decodes on workers."""
    load = BatchShape(rows, rows, decodes={WORKERS: Decodes(rows, context_tokens)})
    rest_ms = cost.head_ms(2 * rows) + cost.iteration_ms
    return (iteration_ms(cost, IterationShape((load, load))) - rest_ms) / cost.num_layers


@given(
    count=st.integers(1, 8),
    rows=st.integers(8, 256),
    context=st.integers(1, 2000),
    gbit=st.floats(1, 400),
    round_trip_ms=st.floats(0, 2),
)
def test_the_way_of_one_sub_batch_hides_behind_the_attention_for_the_other(
    count: int, rows: int, context: int, gbit: float, round_trip_ms: float
) -> None:
    """The longest counts: the GPU's work, the attention, a sub-batch's own chain, or the sending."""
    link = Link(gbit * 1e9 / 8, round_trip_ms)
    cost = tables(count, link)
    linear, way = cost.linear_ms(rows), cost.network_ms(WORKERS, rows).all
    chain = linear + cost.attention_ms(WORKERS, rows, rows * context) + cost.offload_ms(rows) + way
    attention = cost.attention_ms(WORKERS, rows, rows * context)
    sending = 2 * rows * 3 * 4096 * 2 / link.bytes_per_s * 1e3
    expected = max(2 * linear, 2 * attention, chain, sending)
    assert layer_ms(cost, rows, rows * context) == pytest.approx(expected)
    behind = layer_ms(in_turn(cost), rows, rows * context)
    assert behind == pytest.approx(max(2 * linear, 2 * (attention + way), chain))
    assert max(2 * linear, 2 * attention, chain) <= behind * (1 + 1e-9)


def test_the_gpu_wants_as_many_as_the_closed_formula_says() -> None:
    link = Link(25e9 / 8, 0.05)
    rows = LOAD.requests // 2
    one = tables(1, link)
    left_ms = device_ms(COST, LOAD) - one.offload_ms(rows) - one.network_ms(WORKERS, rows).all - CPU_CALL_MS
    reading_ms = rows * LOAD.context_tokens * host_attention_ms(KIND, CONFIG, DTYPE)
    wanted = workers_wanted(COST, KIND, link, CONFIG, DTYPE, LOAD)
    assert wanted == ceil(reading_ms / left_ms) > 1
    assert workers_ms(tables(wanted, link), LOAD) <= device_ms(COST, LOAD)
    assert workers_ms(tables(wanted - 1, link), LOAD) > device_ms(COST, LOAD)


def test_more_memory_is_a_reason_for_more_workers() -> None:
    small = replace(KIND, memory_bytes=8 * 2**30)
    wanted = workers_wanted(COST, small, IDEAL, CONFIG, DTYPE, LOAD)
    assert wanted is not None
    held = Workers(wanted, small, IDEAL).kv_tokens(CONFIG, DTYPE)
    assert held >= 128 * 1000 > held * (wanted - 1) / wanted


@pytest.mark.parametrize("link", [Link(inf, 100.0), Link(1e6, 0.0)])
def test_no_number_makes_up_for_such_a_link(link: Link) -> None:
    assert workers_wanted(COST, KIND, link, CONFIG, DTYPE, LOAD) is None


def test_more_workers_than_wanted_bring_little() -> None:
    """The last wanted worker still helps; twice the wanted number adds next to nothing."""
    load = SteadyLoad(64, 16, 400)
    wanted = workers_wanted(COST, KIND, IDEAL, CONFIG, DTYPE, load)
    assert wanted is not None
    few, enough, many = (rate(tables(count)) for count in (max(wanted // 2, 1), wanted, 2 * wanted))
    assert enough > 1.15 * few
    assert many < 1.15 * enough
