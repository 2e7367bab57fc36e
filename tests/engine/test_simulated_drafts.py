"""Drafts of a given acceptance in the simulator."""

from itertools import pairwise

import pytest
import torch

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.metrics import SimulationResult
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.engine.simulation.simulator import simulate
from neo_desktop.engine.simulation.workload import WorkloadRequest
from neo_desktop.models.shapes import shape

GPU = get_gpu("t4")
COST = analytic_cost_model(GPU, get_host(GPU.host), shape("llama-2-7b"), torch.float16)
BLOCKS = {KVTier.DEVICE: 4096, KVTier.HOST: 4096}
LIMITS = SchedulerLimits(max_batch_tokens=2048, max_batch_requests=256)


def run(requests: list[WorkloadRequest], policy: str, acceptance: float) -> SimulationResult:
    return simulate(requests, POLICIES[policy], COST, BLOCKS, 16, LIMITS, acceptance=acceptance)


@pytest.mark.parametrize("policy", ["gpu-only", "auto", "fastdecode"])
@pytest.mark.parametrize("count", [1, 4, 64])
def test_right_drafts_raise_the_rate_of_few_chats_and_none_lowers_it(policy: str, count: int) -> None:
    def rate(acceptance: float) -> float:
        result = run([WorkloadRequest(0.0, 100, 120)] * count, policy, acceptance)
        assert result.output_tokens == 120 * count
        return result.output_tokens_per_s

    without, *rates = map(rate, (0.0, 0.3, 0.7, 0.9))
    assert all(more > 0.99 * less for less, more in pairwise([without, *rates]))
    if count == 1 and policy == "gpu-only":
        # 1 + 0.7 + ... + 0.7^8 = 3.2 tokens per iteration, if reading the weights is all that takes time
        assert 2.0 < rates[1] / without < 3.2


def test_a_perfect_draft_of_eight_tokens_costs_one_iteration() -> None:
    result = run([WorkloadRequest(0.0, 16, 1 + 4 * 9)], "gpu-only", 1.0)
    assert result.totals.num_iterations == 1 + 4
