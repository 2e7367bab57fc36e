"""Machines with their models and requests, simulated from datasheets; tables of the results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from neo_desktop.app.simulate.traced_shapes import TRACED_SHAPES
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.loading import gpu_form
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.schedule.policies import POLICIES, Policy
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.analytic import KVBudget, analytic_cost_model, kv_budget
from neo_desktop.engine.simulation.bound import Bound, Room
from neo_desktop.engine.simulation.metrics import SimulationResult
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.engine.simulation.workload import WorkloadRequest
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.experts_config import ExpertsConfig
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.linear.quantised import PartShape
from neo_desktop.models.shapes import shape
from neo_desktop.models.stored_form import StoredForm, uniform_form
from research.mismatch import Mismatch, Observer, simulate_on
from research.traces import load_trace

DTYPE = torch.float16
LIMITS = SchedulerLimits(max_batch_tokens=2048, max_batch_requests=256)
FILES = {
    "OSC": "osc-llama2-lengths.json",
    "conversation": "azure-llm-2023-conv.csv",
    "code": "azure-llm-2023-code.csv",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A machine, a model, its memory for KV and the requests."""

    title: str  # of the GPU
    config: ModelConfig
    cost: TableCostModel
    budget: KVBudget
    requests: Sequence[WorkloadRequest] = ()

    @classmethod
    def of(cls, gpu_name: str, model: str, host_name: str | None = None) -> "Case":
        """Return a machine with all of its memory."""
        gpu, config = get_gpu(gpu_name), shape(model)
        host = get_host(host_name or gpu.host)
        budget = kv_budget(gpu, host, config, DTYPE, LIMITS)
        return cls(gpu.title, config, analytic_cost_model(gpu, host, config, DTYPE), budget)

    def with_cache(self, gpu_tokens: int) -> "Case":
        """Return the case with a GPU-cache of this size."""
        return replace(self, budget=replace(self.budget, gpu_tokens=gpu_tokens, streamed_tokens=0))

    def with_requests(self, requests: Sequence[WorkloadRequest]) -> "Case":
        """Return the case with those requests that fit the GPU-cache: all policies get the same."""
        longest = min(self.config.max_context_tokens, self.budget.gpu_tokens)
        return replace(self, requests=[r for r in requests if r.total_tokens <= longest])

    def bound(self, *, swaps: bool = False) -> float:
        """Return output tokens/s; with `swaps`, it counts streamed KV."""
        attended = self.budget.gpu_tokens
        if swaps:
            shared = self.budget.swapping(self.cost, LIMITS)
            attended = max(attended, shared.gpu_tokens + shared.streamed_tokens)
        most = min(LIMITS.max_batch_requests, self.budget.most_requests)
        room = Room(attended, self.budget.cpu_tokens, most)
        return Bound(self.cost, self.requests, room).output_tokens_per_s()

    def run(
        self,
        policy: str | Policy,
        mismatch: Mismatch | None = None,
        observe: Observer | None = None,
    ) -> SimulationResult:
        chosen, budget = POLICIES[policy] if isinstance(policy, str) else policy, self.budget
        if chosen.swaps and not budget.streamed_tokens:
            budget = budget.swapping(self.cost, LIMITS)
        return simulate_on(
            mismatch,
            self.requests,
            chosen,
            self.cost,
            budget.num_blocks(),
            BLOCK_SIZE,
            LIMITS,
            max_context_tokens=max(r.total_tokens for r in self.requests),
            num_states=budget.num_states,
            observe=observe,
        )

    def rate(self, policy: str | Policy, mismatch: Mismatch | None = None) -> float:
        """Return output tokens/s."""
        return self.run(policy, mismatch).output_tokens_per_s


def at_once(file: Path, count: int) -> list[WorkloadRequest]:
    """Return the first requests of a trace, arriving together."""
    return [replace(request, arrival_ms=0.0) for request in load_trace(file)[:count]]


def waits(result: SimulationResult) -> str:
    """Return the share of time in which the device waited for copies."""
    return f"{result.totals.copy_wait_ms / result.totals.iterating_ms:.1%}"


def header(*names: str) -> None:
    """Print the first lines of a table."""
    row(*names)
    print("|---" * len(names) + "|")


def row(*cells: str) -> None:
    """Print a line of a table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def opt(hidden: int, layers: int) -> ModelConfig:
    """Return OPT's number of weights: two matrices of width 4x equal three of width 8/3x."""
    return replace(
        shape("llama-2-13b"),
        vocab_size=50_272,
        hidden_size=hidden,
        intermediate_size=round(hidden / 3) * 8,
        num_layers=layers,
        num_heads=hidden // 128,
        num_kv_heads=hidden // 128,
        max_context_tokens=2048,
        tie_word_embeddings=True,
        layer_windows=(None,) * layers,
    )


def quantised(name: str) -> tuple[ModelConfig, WeightFormat]:
    config = shape(name)
    return config, gpu_form(uniform_form(config, "Q4_K"))


def traced(name: str, type_name: str = "Q4_K") -> tuple[ModelConfig, WeightFormat]:
    config = TRACED_SHAPES[name]
    return config, gpu_form(uniform_form(config, type_name))


def gpt_oss(experts: int, layers: int) -> tuple[ModelConfig, WeightFormat]:
    """Return a model with experts in MXFP4 and the rest in 16 bits, without windows and sinks."""
    config = replace(
        shape("llama-2-7b"),
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        max_context_tokens=131_072,
        layer_windows=(None,) * layers,
        experts=ExpertsConfig(experts, 4, 2880, tuple(range(layers))),
    )
    of_experts = {
        name: (PartShape("MXFP4", matrix.rows),) for name, matrix in config.each_matrix() if matrix.experts
    }
    return config, gpu_form(StoredForm(stored=of_experts))
