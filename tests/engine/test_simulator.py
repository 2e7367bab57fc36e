"""The simulator's clock, accounting and figures against hand arithmetic and a closed bound."""

import random
from math import inf

import pytest
import torch
from cost_models import flat_cost
from hypothesis import given
from hypothesis import strategies as st
from seeds import seeds

from neo_desktop.engine.batch import Contents, IterationTiming
from neo_desktop.engine.kv.states import SLOTS_PER_REQUEST
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling.budget import activation_bytes
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.policies import POLICIES, Policy
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.analytic import RESIDENT_LAYERS, KVBudget, analytic_cost_model, kv_budget
from neo_desktop.engine.simulation.bound import Bound, Room
from neo_desktop.engine.simulation.metrics import FinishedRequest, SimulationResult
from neo_desktop.engine.simulation.presets import GPUS, HOSTS, get_gpu, get_host
from neo_desktop.engine.simulation.simulator import SimulatedRequest, simulate
from neo_desktop.engine.simulation.workload import WorkloadRequest, synthetic, with_rate
from neo_desktop.models.shapes import shape
from research.mismatch import Mismatch, simulate_on

BLOCK_SIZE = 16
LIMITS = SchedulerLimits(max_batch_tokens=2048, max_batch_requests=256)
SHARES_OF_CPU = dict.fromkeys(POLICIES, (0.0, 1.0)) | {
    "gpu-only": (0.0, 0.0),
    "fastdecode": (1.0, 1.0),
    "pie": (0.0, 0.0),
}

STREAMED_TOKENS = 2000
MISJUDGED = (  # machines and GPU-caches with which tables predict a gain
    ("h100", "llama-2-7b", 3008),
    ("rtx-4090", "llama-2-7b", 4000),
    ("a10g", "llama-3.1-8b", 8000),
)


def machine(gpu: str = "t4", model: str = "llama-2-7b") -> TableCostModel:
    return analytic_cost_model(get_gpu(gpu), get_host(get_gpu(gpu).host), shape(model), torch.float16)


def run(
    requests: list[WorkloadRequest],
    policy: str,
    cost: TableCostModel,
    gpu_tokens: int,
    cpu_tokens: int = 65_536,
    max_context_tokens: int | None = None,
) -> SimulationResult:
    blocks = KVBudget(gpu_tokens, cpu_tokens, STREAMED_TOKENS).num_blocks()
    return simulate(
        requests, POLICIES[policy], cost, blocks, BLOCK_SIZE, LIMITS, max_context_tokens=max_context_tokens
    )


# ---- the clock ----


def test_a_lone_request_gets_a_token_per_iteration() -> None:
    """Prompt: 1 iteration of 3 ms, then 4 more tokens."""
    result = run([WorkloadRequest(0.0, 20, 5)], "gpu-only", flat_cost(2.0, iteration_ms=1.0), 64)
    (request,) = result.finished
    assert request == FinishedRequest(0.0, 3.0, 15.0, 20, 5)
    assert (request.ttft_ms, request.tpot_ms, request.latency_per_token_ms) == (3.0, 3.0, 3.0)
    figures = result.to_json()
    assert figures["num_iterations"] == 5
    assert figures["mean_batch"] == 1.0
    assert figures["output_tokens_per_s"] == pytest.approx(5 / 0.015)
    assert figures["total_tokens_per_s"] == pytest.approx(25 / 0.015)
    assert figures["gpu_busy_share"] == pytest.approx(10 / 15)


def test_the_clock_jumps_to_the_next_arrival_and_waiting_counts_as_latency() -> None:
    """The second request arrives during the first one's second iteration, the third at an idle time."""
    requests = [WorkloadRequest(0.0, 16, 3), WorkloadRequest(1.5, 16, 1), WorkloadRequest(100.0, 16, 2)]
    result = run(requests, "gpu-only", flat_cost(), 1024)
    assert sorted(result.finished, key=lambda request: request.arrival_ms) == [
        FinishedRequest(0.0, 1.0, 3.0, 16, 3),
        FinishedRequest(1.5, 3.0, 3.0, 16, 1),
        FinishedRequest(100.0, 101.0, 102.0, 16, 2),
    ]
    assert result.makespan_ms == 102.0


# ---- accounting ----


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=25),
    gpu_blocks=st.integers(4, 60),
    cpu_blocks=st.integers(4, 200),
    rate=st.sampled_from([0.5, 5.0, inf]),
    where=st.sampled_from([("t4", "llama-2-7b"), ("rtx-4090", "llama-3.1-8b"), ("h100", "llama-2-7b")]),
    most_requests=st.sampled_from([1, 3, 256]),
)
def test_every_request_ends_with_all_its_tokens_or_is_refused_and_no_bound_is_broken(
    policy: str,
    lengths: list[tuple[int, int]],
    gpu_blocks: int,
    cpu_blocks: int,
    rate: float,
    where: tuple[str, str],
    most_requests: int,
) -> None:
    """Only requests that fit no tier are refused; `simulate` itself checks that no block remains."""
    requests = with_rate([WorkloadRequest(0.0, *pair) for pair in lengths], rate)
    cost = machine(*where)
    gpu_tokens, cpu_tokens = gpu_blocks * BLOCK_SIZE, cpu_blocks * BLOCK_SIZE
    blocks = {KVTier.DEVICE: gpu_blocks, KVTier.HOST: cpu_blocks, KVTier.STREAMED: cpu_blocks}
    limits = SchedulerLimits(max_batch_tokens=2048, max_batch_requests=most_requests)
    result = simulate(requests, POLICIES[policy], cost, blocks, BLOCK_SIZE, limits)
    longest = max(blocks[tier] * BLOCK_SIZE for tier in POLICIES[policy].tiers)
    fitting = [request for request in requests if request.total_tokens <= longest]
    assert sorted((r.arrival_ms, r.prompt_tokens, r.output_tokens) for r in result.finished) == sorted(
        (r.arrival_ms, r.prompt_tokens, r.output_tokens) for r in fitting
    )
    assert result.num_refused == len(requests) - len(fitting)
    for request in result.finished:
        assert request.arrival_ms < request.first_token_ms <= request.finish_ms
    if fitting:
        room = Room(gpu_tokens, cpu_tokens, most_requests)
        if POLICIES[policy].swaps:
            room = Room(gpu_tokens + cpu_tokens, cpu_tokens, most_requests)
        bound_ms = Bound(cost, fitting, room).makespan_ms(*SHARES_OF_CPU[policy])
        assert result.makespan_ms >= bound_ms * (1 - 1e-9)
        assert result.totals.gpu_busy_ms <= result.makespan_ms
        assert result.totals.cpu_busy_ms <= result.makespan_ms


def test_what_exceeds_the_models_context_is_refused_and_counted() -> None:
    requests = [WorkloadRequest(0.0, 90, 10), WorkloadRequest(0.0, 91, 10)]
    result = run(requests, "gpu-only", flat_cost(), 1024, max_context_tokens=100)
    assert (len(result.finished), result.num_refused) == (1, 1)


# ---- policies ----


OTHERS = (
    ("t4", "llama-2-7b", 370, 45, 1008),
    ("a10g", "llama-3.1-8b", 1000, 100, 47_360),
    ("a10g", "llama-3.1-8b", 1000, 400, 26_400),
    ("rtx-3060", "qwen3-4b", 1200, 200, 19_376),
    ("rtx-4090", "llama-3.1-8b", 370, 45, 49_728),  # short: the last CPU requests must not delay the end
    ("h100", "llama-3.1-8b", 500, 50, 503_040),
)


@pytest.mark.parametrize(
    ("gpu", "model", "prompt", "output", "gpu_tokens"),
    [
        ("t4", "llama-2-7b", 370, 45, 3008),
        *(pytest.param(*each, marks=pytest.mark.sample(0)) for each in OTHERS),
    ],
)
def test_auto_is_never_much_below_gpu_only(
    gpu: str, model: str, prompt: int, output: int, gpu_tokens: int
) -> None:
    requests = synthetic(200, prompt, output)
    cost = machine(gpu, model)
    alone, auto = (run(requests, name, cost, gpu_tokens, 262_144) for name in ("gpu-only", "auto"))
    assert auto.output_tokens_per_s >= 0.97 * alone.output_tokens_per_s


def test_offloading_wins_where_the_gpu_cache_is_small() -> None:
    requests = synthetic(200, 370, 45)
    cost = machine()
    alone, neo, auto = (run(requests, name, cost, 1008) for name in ("gpu-only", "neo", "auto"))
    assert neo.output_tokens_per_s > 3 * alone.output_tokens_per_s
    assert auto.output_tokens_per_s > 3 * alone.output_tokens_per_s


def test_at_low_load_offloading_changes_nothing() -> None:
    """Requests with long gaps between them all live on the GPU."""
    requests = with_rate(synthetic(10, 300, 20), 0.02)
    cost = machine()
    alone, auto = (run(requests, name, cost, 3008) for name in ("gpu-only", "auto"))
    assert auto.finished == alone.finished


# ---- wrong predictions ----


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_machine_that_is_as_predicted_takes_the_predicted_times(policy: str) -> None:
    """The true times are recomputed from the decisions."""
    requests = with_rate(synthetic(40, 400, 40), 3.0)
    cost = machine()
    blocks = {KVTier.DEVICE: 63, KVTier.HOST: 400, KVTier.STREAMED: 60}
    exact, same = (
        simulate_on(mismatch, requests, POLICIES[policy], cost, blocks, BLOCK_SIZE, LIMITS)
        for mismatch in (None, Mismatch())
    )
    assert same.makespan_ms == pytest.approx(exact.makespan_ms, rel=1e-9)
    assert same.totals.num_iterations == exact.totals.num_iterations


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "mismatch",
    [
        Mismatch(1.0, 2.5),
        Mismatch(1.0, 0.5),
        Mismatch(2.0, 1.0),
        Mismatch(0.5, 1.0),
        Mismatch(overlap_loss=1.0),
        Mismatch(launch_ms=0.5),
    ],
)
def test_the_scheduler_learns_what_the_machine_truly_does(mismatch: Mismatch) -> None:
    """After learning, it is nearly as fast as with correct tables from the start."""
    requests = synthetic(400, 370, 45)
    tables = machine()
    blocks = {KVTier.DEVICE: 63, KVTier.HOST: 4096}
    wrong = simulate_on(mismatch, requests, POLICIES["auto"], tables, blocks, BLOCK_SIZE, LIMITS)
    right = CorrectedCostModel.of(tables)
    right.correction.device, right.correction.host = mismatch.gpu_slowdown, mismatch.cpu_slowdown
    launched = mismatch.launch_ms / tables.linear(1)
    right.correction.excess = Contents(launched=launched, attention=mismatch.overlap_loss)
    knowing = simulate(requests, POLICIES["auto"], right, blocks, BLOCK_SIZE, LIMITS)
    assert wrong.output_tokens_per_s == pytest.approx(knowing.output_tokens_per_s, rel=0.1)
    assert wrong.output_tokens_per_s != knowing.output_tokens_per_s


@pytest.mark.parametrize("seed", seeds(1, 6))
def test_auto_is_not_much_below_gpu_only_whatever_the_tables_get_wrong(seed: int) -> None:
    """The machine's times deviate at random, most of them to the disadvantage of offloading.

    The first quarter of the requests is for learning.
    """
    draw = random.Random(seed)
    mismatch = Mismatch(
        gpu_slowdown=draw.uniform(0.7, 1.5),
        cpu_slowdown=draw.uniform(0.7, 5.0),
        noise=0.1,
        bus_slowdown=draw.uniform(0.7, 8.0),
        overlap_loss=draw.uniform(0.0, 4.0),
        launch_ms=draw.uniform(0.0, 0.6),
    )
    gpu, model, gpu_tokens = MISJUDGED[seed % len(MISJUDGED)]
    requests = synthetic(160, 370, 45, seed=seed)
    blocks = KVBudget(gpu_tokens, 65_536, STREAMED_TOKENS).num_blocks()

    def requests_per_ms(policy: str) -> float:
        where = machine(gpu, model), blocks, BLOCK_SIZE, LIMITS
        result = simulate_on(mismatch, requests, POLICIES[policy], *where, seed=seed)
        ends = sorted(request.finish_ms for request in result.finished)[len(requests) // 4 :]
        return len(ends) / (ends[-1] - ends[0])

    assert requests_per_ms("auto") >= 0.95 * requests_per_ms("gpu-only")


# ---- recurrent states ----


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num_states", [4, 7])
def test_no_more_hybrids_run_at_once_than_their_states_have_slots(policy: str, num_states: int) -> None:
    cost, most = machine(), num_states // SLOTS_PER_REQUEST
    requests, running = synthetic(12, 200, 20), []

    def timing(decision: Decision[SimulatedRequest]) -> IterationTiming:
        there = {request for batch in decision.sub_batches for request, _ in batch}
        running.append(len(there | {*decision.waiting_decodes, *decision.new_async}))
        return decision.predicted

    where = KVBudget(3200, 65_536, STREAMED_TOKENS).num_blocks(), BLOCK_SIZE, LIMITS
    result = simulate(requests, POLICIES[policy], cost, *where, num_states=num_states, true_timing=timing)
    assert len(result.finished) == 12
    assert max(running) == most
    bound = Bound(cost, requests, Room(3200 + STREAMED_TOKENS, 65_536, most))
    assert result.output_tokens_per_s <= bound.output_tokens_per_s(*SHARES_OF_CPU[policy]) * (1 + 1e-9)


# ---- machines ----


def test_what_is_left_for_kv_is_what_hand_arithmetic_leaves() -> None:
    """T4 and Llama-2-7B: 16.1 GB - 13.5 GB of weights - 0.5 GB reserve - activations, 0.5 MB per token."""
    config = shape("llama-2-7b")
    budget = kv_budget(GPUS["t4"], HOSTS["g4dn.4xlarge"], config, torch.float16, LIMITS)
    weights = 2 * (2 * 32_000 * 4096 + 32 * (4 * 4096 * 4096 + 3 * 4096 * 11_008 + 2 * 4096) + 4096)
    activations = activation_bytes(config, LIMITS, torch.float16)
    rest = 15 * 2**30 - weights - 512 * 2**20 - activations
    assert budget.gpu_tokens == rest // (2 * 32 * 4096 * 2) // 16 * 16
    assert budget.cpu_tokens == 32 * 2**30 // (2 * 32 * 4096 * 2)
    blocks = {
        KVTier.DEVICE: budget.gpu_tokens // 16,
        KVTier.STREAMED: 0,
        KVTier.HOST: budget.cpu_tokens // 16,
    }
    assert budget.num_blocks() == blocks


def test_weights_that_do_not_fit_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(MemoryError, match="choose a smaller model or a larger GPU"):
        kv_budget(GPUS["t4"], HOSTS["g4dn.4xlarge"], shape("llama-3.1-8b"), torch.float16, LIMITS)


def test_the_analytic_model_is_the_roofline() -> None:
    """A10G and Llama-3.1-8B by hand: 218 M parameters a layer, 4 KB of KV per token and layer."""
    cost = machine("a10g", "llama-3.1-8b")
    parameters = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336 + 2 * 4096
    assert cost.linear_ms(1) == pytest.approx(parameters * 2 / (600e9 * 0.8) * 1e3 + 0.02)
    assert cost.linear_ms(2048) == pytest.approx(2 * parameters * 2048 / (70e12 * 0.75) * 1e3 + 0.02)
    assert cost.attention_ms(KVTier.DEVICE, 10, 10_000) == pytest.approx(
        10_000 * 4096 / (600e9 * 0.6) * 1e3 + 0.004
    )
    reading_ms = 10_000 * 4096 / (51.2e9 * 0.8 * 0.9) * 1e3
    multiplying_ms = 10_000 * 4 * 4096 / (7 * 96e9 * 0.75) * 1e3
    assert cost.attention_ms(KVTier.HOST, 10, 10_000) == pytest.approx(reading_ms + multiplying_ms + 0.005)
    assert cost.transfer_ms(1000) == pytest.approx(1000 * 4096 / (31.5e9 * 0.8) * 1e3 + 0.0107)
    share = get_gpu("a10g").prefill_attention_share
    for tokens, start in ((100, 0), (2048, 0), (777, 1), (700, 3000), (2048, 2048)):
        visible = start + tokens / 2  # masked scores are not computed
        flops = 4 * 4096 * tokens * visible
        ms = flops / (70e12 * share) * 1e3 + 0.004
        assert cost.prefill_attention_ms(tokens, start) == pytest.approx(ms, rel=5e-3)


# ---- streamed KV ----

ALWAYS_ALL = Policy("static", (KVTier.DEVICE, KVTier.STREAMED))  # uses all room, even if copies do not hide


def streamed(policy: Policy, cost: TableCostModel, budget: KVBudget) -> SimulationResult:
    requests = synthetic(60, 600, 100, seed=5)
    return simulate(requests, policy, cost, budget.num_blocks(), BLOCK_SIZE, LIMITS)


@pytest.mark.parametrize("gpu", ["gh200", "h100"])
def test_swapped_layers_hide_and_no_fixed_expansion_is_better(gpu: str) -> None:
    """All use the same memory; a swept expansion knows the workload, the policy learns it at run time."""
    cost = machine(gpu, "llama-2-7b")
    budget = KVBudget(8192, 1 << 20)
    alone = streamed(POLICIES["gpu-only"], cost, budget)
    pie = streamed(POLICIES["pie"], cost, budget.swapping(cost, LIMITS))
    assert pie.totals.copy_wait_ms <= 0.01 * pie.totals.iterating_ms
    assert pie.output_tokens_per_s >= 0.99 * alone.output_tokens_per_s
    for expansion in (1.1, 1.4, 2.0):
        device = int(budget.gpu_tokens / (1 + (expansion - 1) * RESIDENT_LAYERS / cost.num_layers))
        static = streamed(ALWAYS_ALL, cost, KVBudget(device, 0, int(device * (expansion - 1))))
        assert pie.output_tokens_per_s >= 0.97 * static.output_tokens_per_s
