"""Simulate Pie's experiments: throughput against the size of the GPU-cache, and against the expansion.

    python research/swap_simulation.py cache --data FOLDER --requests 500
    python research/swap_simulation.py expansion --data FOLDER --requests 500
    python research/swap_simulation.py convergence --data FOLDER --out PICTURE

FOLDER has osc-llama2-lengths.json and azure-llm-2023-conv.csv. Prints the tables of research/simulation.md
line by line. `convergence` draws how the expansion settles if the bus differs from the tables.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
import torch

from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.policies import POLICIES, Policy
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.analytic import RESIDENT_LAYERS, KVBudget, analytic_cost_model, kv_budget
from neo_desktop.engine.simulation.metrics import SimulationResult
from neo_desktop.engine.simulation.presets import GB, get_gpu, get_host
from neo_desktop.engine.simulation.reality import Mismatch
from neo_desktop.engine.simulation.simulator import SimulatedRequest, simulate
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace
from neo_desktop.models.shapes import shape

mpl.use("Agg")
import matplotlib.pyplot as plt

LIMITS = SchedulerLimits(max_batch_tokens=2048, max_batch_requests=256)
MODEL = "llama-2-13b"
FILES = {"OSC": "osc-llama2-lengths.json", "conversation": "azure-llm-2023-conv.csv"}
MACHINES = ("gh200", "h100", "a100-40gb")  # NVLink-C2C, PCIe 5, PCIe 4
CACHES_GB = (3, 5, 7, 9, 12)
EXPANSIONS = (1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0, 4.0)
CONVERGENCE_GB = 5  # GPU-cache size
BUSES = {0.5: "twice as fast", 1.0: "as the tables say", 2.0: "half as fast", 3.0: "a third as fast"}
NOISE = 0.05  # per iteration
SETTLED = 0.1  # relative deviation that counts as settled
SHOWN = 400  # iterations
STATIC = Policy("static", (KVTier.DEVICE, KVTier.STREAMED))  # always fills its memory


@dataclass(frozen=True, slots=True)
class Case:
    """A machine, its memory for KV, and the requests."""

    cost: TableCostModel
    budget: KVBudget
    requests: Sequence[WorkloadRequest]

    def run(self, policy: str) -> SimulationResult:
        chosen, budget = POLICIES[policy], self.budget
        if KVTier.STREAMED in chosen.tiers:
            budget = budget.swapping(self.cost, LIMITS)
        return self._run(chosen, budget)

    def run_static(self, expansion: float) -> SimulationResult:
        """Simulate KV memory of `expansion` times the GPU's, all in use, hidden or not."""
        device = self.budget.gpu_tokens / (1 + (expansion - 1) * RESIDENT_LAYERS / self.cost.num_layers)
        return self._run(STATIC, KVBudget(int(device), 0, int(device * (expansion - 1))))

    def _run(self, policy: Policy, budget: KVBudget) -> SimulationResult:
        longest = max(request.total_tokens for request in self.requests)
        return simulate(
            self.requests,
            policy,
            self.cost,
            budget.num_blocks(),
            BLOCK_SIZE,
            LIMITS,
            max_context_tokens=longest,
        )


def cases(data: Path, count: int, machines: Sequence[str]) -> Iterator[tuple[str, Case]]:
    config = shape(MODEL)
    for gpu_name in machines:
        gpu = get_gpu(gpu_name)
        host = get_host(gpu.host)
        cost = analytic_cost_model(gpu, host, config, torch.float16)
        full = kv_budget(gpu, host, config, torch.float16, LIMITS)
        for name, file in FILES.items():
            requests = [replace(r, arrival_ms=0.0) for r in load_trace(data / file)[:count]]
            for cache_gb in CACHES_GB:
                tokens = int(cache_gb * GB) // config.kv_bytes_per_token(torch.float16)
                tokens = tokens // BLOCK_SIZE * BLOCK_SIZE
                if tokens > full.gpu_tokens:
                    continue
                # A longer request would need host memory at any cost.
                fitting = [r for r in requests if r.total_tokens <= 0.6 * tokens]
                title = f"{gpu.title} | {name} | {cache_gb} GB"
                yield title, Case(cost, KVBudget(tokens, full.cpu_tokens), fitting)


def print_caches(data: Path, count: int, machines: Sequence[str]) -> None:
    """Print Pie's figure 7."""
    policies = ("gpu-only", "pie", "neo", "auto")
    print(f"| GPU | requests | GPU-cache | {' | '.join(policies)} | `pie` / `gpu-only` | expansion | waits |")
    print("|---" * 10 + "|")
    for title, case in cases(data, count, machines):
        results = [case.run(policy) for policy in policies]
        alone, pie = results[0].output_tokens_per_s, results[1]
        budget = case.budget.swapping(case.cost, LIMITS)
        expansion = (budget.gpu_tokens + budget.streamed_tokens) / case.budget.gpu_tokens
        rates = " | ".join(f"{result.output_tokens_per_s:.0f}" for result in results)
        waits = pie.totals.copy_wait_ms / pie.totals.iterating_ms
        gain = pie.output_tokens_per_s / alone
        print(f"| {title} | {rates} | {gain:.2f} | {expansion:.2f} | {waits:.1%} |", flush=True)


def print_expansions(data: Path, count: int, machines: Sequence[str]) -> None:
    """Print Pie's figures 6 and 9b."""
    print(f"| GPU | requests | GPU-cache | {' | '.join(map(str, EXPANSIONS))} | adaptive | / best |")
    print("|---" * (len(EXPANSIONS) + 5) + "|")
    for title, case in cases(data, count, machines):
        alone = case.run("gpu-only").output_tokens_per_s
        rates = [case.run_static(expansion).output_tokens_per_s / alone for expansion in EXPANSIONS]
        adaptive = case.run("pie").output_tokens_per_s / alone
        shown = " | ".join(f"{rate:.2f}" for rate in rates)
        print(f"| {title} | {shown} | {adaptive:.2f} | {adaptive / max(rates):.1%} |", flush=True)


def draw_convergence(data: Path, count: int, machine: str, out: Path) -> None:
    """Draw the scheduler's estimate of the bus, and the streamed KV, from the start."""
    wanted = f"| OSC | {CONVERGENCE_GB} GB"
    case = next(case for title, case in cases(data, count, (machine,)) if title.endswith(wanted))
    budget = case.budget.swapping(case.cost, LIMITS)
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5), sharex=True)
    print("| bus | settled within | factor then | waits |\n" + "|---" * 4 + "|")
    for (slowdown, title), colour in zip(
        BUSES.items(), ("#1c8c4c", "#2f6fb0", "#d08700", "#b03a2e"), strict=True
    ):
        factors: list[float] = []
        tokens: list[int] = []

        def observe(
            decision: Decision[SimulatedRequest],
            cost: TableCostModel,
            factors: list[float] = factors,
            tokens: list[int] = tokens,
        ) -> None:
            assert isinstance(cost, CorrectedCostModel)
            streamed = [
                load.decodes[tier]
                for load in decision.shape.batches
                for tier in load.decodes
                if tier.is_streamed
            ]
            factors.append(cost.correction.bus)
            tokens.append(sum(each.context_tokens for each in streamed))

        result = simulate(
            case.requests,
            POLICIES["pie"],
            case.cost,
            budget.num_blocks(),
            BLOCK_SIZE,
            LIMITS,
            max_context_tokens=max(request.total_tokens for request in case.requests),
            mismatch=Mismatch(bus_slowdown=slowdown, noise=NOISE),
            observe=observe,
        )
        begun = next(index for index, count in enumerate(tokens) if count)
        off = [index for index, factor in enumerate(factors) if abs(factor / slowdown - 1) > SETTLED]
        settled = max((index + 1 - begun for index in off if index < len(factors) // 2), default=0)
        waits = result.totals.copy_wait_ms / result.totals.iterating_ms
        print(
            f"| {title} | {settled} iterations | {factors[-1]:.2f} | {waits:.1%} |",
            flush=True,
        )
        shown = slice(begun, begun + SHOWN)
        above.plot(factors[shown], color=colour, label=title)
        above.axhline(slowdown, color=colour, linewidth=0.5, linestyle=":")
        below.plot(tokens[shown], color=colour, linewidth=0.8)
    above.set_ylabel("time of copies,\nas believed")
    above.legend(title="the bus is", ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False)
    below.set_ylabel("tokens of KV brought\nto each layer")
    below.set_xlabel("iterations since the first swapped decode")
    figure.tight_layout()
    figure.savefig(out, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("cache", "expansion", "convergence"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--machine", action="append", choices=MACHINES)
    parser.add_argument("--out", type=Path, default=Path("research/images/sim-swap-convergence.png"))
    options = parser.parse_args()
    if options.part == "convergence":
        draw_convergence(options.data, options.requests, (options.machine or MACHINES)[0], options.out)
        return
    part = {"cache": print_caches, "expansion": print_expansions}[options.part]
    part(options.data, options.requests, options.machine or MACHINES)


if __name__ == "__main__":
    main()
