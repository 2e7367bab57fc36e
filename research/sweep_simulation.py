"""Simulate machines, workloads and cache sizes: the ratio of `auto` to the bound and to `gpu-only`.

    python research/sweep_simulation.py --data FOLDER --requests 1000

FOLDER has osc-llama2-lengths.json, azure-llm-2023-conv.csv and azure-llm-2023-code.csv; lengths like
"1000/200" need no file. Prints the tables of research/simulation.md line by line.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import Curve, TableCostModel
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.schedule.steady_state import SteadyStateFinder, Workload
from neo_desktop.engine.simulation.analytic import KVBudget, analytic_cost_model, kv_budget
from neo_desktop.engine.simulation.bound import Bound, Room
from neo_desktop.engine.simulation.metrics import SimulationResult
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.engine.simulation.reality import Mismatch
from neo_desktop.engine.simulation.simulator import simulate
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace, synthetic, with_rate
from neo_desktop.models.shapes import shape

LIMITS = SchedulerLimits(max_batch_tokens=2048, max_batch_requests=256)
FILES = {
    "OSC": "osc-llama2-lengths.json",
    "conversation": "azure-llm-2023-conv.csv",
    "code": "azure-llm-2023-code.csv",
}
CASES = (
    ("t4", "llama-2-7b", ("OSC", "conversation")),
    ("rtx-3060", "llama-3.2-3b", ("OSC", "conversation", "code")),
    ("rtx-4090", "llama-3.1-8b", ("OSC", "conversation", "code")),
    ("rtx-4090", "llama-2-7b", ("OSC", "conversation")),
    ("a10g", "llama-3.1-8b", ("1000/50", "1000/100", "1000/200", "1000/400")),
    ("h100", "llama-2-7b", ("OSC", "conversation")),
    ("gh200", "llama-2-13b", ("OSC", "conversation")),
)
SINGLE = ("gpu-only", "neo", "apex", "pie")  # kinds of iterations that `auto` combines
CACHE_SHARES = (1.0, 0.3, 0.0)  # of the card's memory for KV; 0: 1,008 tokens, or the longest request
SMALLEST_CACHE = 1008
MANY = 1 << 40  # tokens
# Slowdown of GPU and CPU against the tables; the noise of an iteration has the same size.
WRONG = ((1.15, 0.87, 0.15), (0.87, 1.15, 0.15))


@dataclass(frozen=True, slots=True)
class Case:
    """A machine, a model, its memory for KV and the requests."""

    name: str
    cost: TableCostModel
    budget: KVBudget
    requests: Sequence[WorkloadRequest]

    @property
    def bound(self) -> float:
        shared = self.budget.swapping(self.cost, LIMITS)
        attended = max(self.budget.gpu_tokens, shared.gpu_tokens + shared.streamed_tokens)
        room = Room(attended, self.budget.cpu_tokens, LIMITS.max_batch_requests)
        return Bound(self.cost, self.requests, room).output_tokens_per_s()

    @property
    def loose_bound(self) -> float:
        """Return the bound without limits of host memory and requests, and without fixed costs.

        An iteration costs only the reading of its weights.
        """
        cost = self.cost
        layer_ms = [ms + cost.iteration_ms / cost.num_layers for ms in cost.linear.ms]
        output_ms = min(ms / rows for rows, ms in zip(cost.head.x, cost.head.ms, strict=True))
        cost = replace(
            cost,
            iteration_ms=0.0,
            linear=Curve(cost.linear.x, layer_ms),
            head=Curve((1, 2), (output_ms, 2 * output_ms)),
        )
        return Bound(cost, self.requests, Room(self.budget.gpu_tokens, MANY)).output_tokens_per_s()

    @property
    def lasting(self) -> float:
        """Return output tokens/s of the best steady state for these requests, without start and end."""
        decodes = [r.output_tokens - 1 for r in self.requests]
        context = sum(
            (r.prompt_tokens + n / 2) * n for r, n in zip(self.requests, decodes, strict=True)
        ) / max(sum(decodes), 1)
        most = [int(0.95 * n / context) for n in (self.budget.gpu_tokens, self.budget.cpu_tokens)]
        on_device = min(most[0], LIMITS.max_batch_requests)
        on_host = min(most[1], LIMITS.max_batch_requests - on_device)
        prompts = [r.prompt_tokens for r in self.requests]
        mean_prompt = sum(p**2 for p in prompts) / sum(prompts)  # mean over prompt tokens
        workload = Workload(
            KVTier.DEVICE,
            KVTier.HOST,
            on_device,
            on_host,
            mean_prompt,
            context,
            sum(prompts) / max(sum(decodes), 1),
            LIMITS.max_batch_tokens,
            LIMITS.max_token_ms,
        )
        firsts = len(self.requests) / max(sum(decodes), 1)  # first tokens from prompts, per decode
        return SteadyStateFinder(self.cost).best(workload).rate * (1 + firsts) * 1e3

    def run(self, policy: str, mismatch: Mismatch | None = None) -> SimulationResult:
        longest = max(r.total_tokens for r in self.requests)
        chosen, budget = POLICIES[policy], self.budget
        if chosen.swaps:
            budget = budget.swapping(self.cost, LIMITS)
        return simulate(
            self.requests,
            chosen,
            self.cost,
            budget.num_blocks(),
            BLOCK_SIZE,
            LIMITS,
            max_context_tokens=longest,
            mismatch=mismatch,
        )


def cases(data: Path, count: int, shares: Sequence[float]) -> Iterator[Case]:
    for gpu_name, model, workloads in CASES:
        gpu, config = get_gpu(gpu_name), shape(model)
        host = get_host(gpu.host)
        full = kv_budget(gpu, host, config, torch.float16, LIMITS)
        cost = analytic_cost_model(gpu, host, config, torch.float16)
        for name in workloads:
            if name in FILES:
                requests = load_trace(data / FILES[name])[:count]
            else:
                prompt, output = name.split("/")
                requests = synthetic(count, int(prompt), int(output))
            longest = min(config.max_context_tokens, full.gpu_tokens)
            at_once = [replace(r, arrival_ms=0.0) for r in requests if r.total_tokens <= longest]
            sizes = {max(int(full.gpu_tokens * share), SMALLEST_CACHE) // BLOCK_SIZE for share in shares}
            for tokens in sorted((size * BLOCK_SIZE for size in sizes), reverse=True):
                budget = KVBudget(tokens, full.cpu_tokens)
                fitting = [r for r in at_once if r.total_tokens <= tokens]
                if len(fitting) > len(at_once) / 2:
                    title = f"{gpu.title} | {model} | {name} | {tokens:,}"
                    yield Case(title, cost, budget, fitting)


def at_once(data: Path, count: int) -> None:
    print(
        "| GPU | model | requests | GPU-cache | `gpu-only`, tokens/s | `neo` | `apex` | `auto` | "
        "best steady_state | loose bound | bound | `auto` / steady_state | / loose bound | / bound |"
    )
    print("|---" * 14 + "|")
    for case in cases(data, count, CACHE_SHARES):
        alone, *others = (case.run(p).output_tokens_per_s for p in ("gpu-only", "neo", "apex", "auto"))
        ratios = " | ".join(f"{other / alone:.2f}" for other in others)
        auto, lasting, loose, bound = others[-1], case.lasting, case.loose_bound, case.bound
        print(
            f"| {case.name} | {alone:.0f} | {ratios} | {lasting / alone:.2f} | {loose / alone:.2f} | "
            f"{bound / alone:.2f} | {auto / lasting:.0%} | {auto / loose:.0%} | {auto / bound:.0%} |",
            flush=True,
        )


def best_single(data: Path, count: int) -> None:
    names = " | ".join(f"`{name}`" for name in SINGLE)
    print(f"| GPU | model | requests | GPU-cache | {names} | `auto`, tokens/s | `auto` / best | waits |")
    print("|---" * (7 + len(SINGLE)) + "|")
    for case in cases(data, count, CACHE_SHARES):
        single = [case.run(name).output_tokens_per_s for name in SINGLE]
        auto = case.run("auto")
        rates = " | ".join(f"{rate:.0f}" for rate in single)
        ratio = auto.output_tokens_per_s / max(single)
        waits = auto.totals.copy_wait_ms / auto.totals.iterating_ms
        print(
            f"| {case.name} | {rates} | {auto.output_tokens_per_s:.0f} | {ratio:.2f} | {waits:.1%} |",
            flush=True,
        )


def steady(data: Path, count: int) -> None:
    print(
        "| GPU | model | requests | GPU-cache | requests/s | `gpu-only`, s/token | `neo` | `apex` | `auto` |"
    )
    print("|---" * 9 + "|")
    for case in cases(data, count, (1.0,)):
        makespan_s = case.run("auto").makespan_ms / 1e3
        rate = 0.9 * len(case.requests) / makespan_s
        loaded = replace(case, requests=with_rate(case.requests, rate))
        latencies = " | ".join(
            f"{loaded.run(p).latency_per_token_ms / 1e3:.2f}" for p in ("gpu-only", "neo", "apex", "auto")
        )
        print(f"| {case.name} | {rate:.2f} | {latencies} |", flush=True)


def wrong_tables(data: Path, count: int) -> None:
    print("| GPU | model | requests | GPU-cache | CPU faster | GPU faster |")
    print("|---" * 6 + "|")
    for case in cases(data, count, (1.0,)):
        ratios = []
        for gpu_slowdown, cpu_slowdown, noise in WRONG:
            mismatch = Mismatch(gpu_slowdown, cpu_slowdown, noise)
            alone, auto = (case.run(p, mismatch).output_tokens_per_s for p in ("gpu-only", "auto"))
            ratios.append(f"{auto / alone:.2f}")
        print(f"| {case.name} | {' | '.join(ratios)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--only", choices=("at-once", "best-single", "steady", "wrong-tables"))
    options = parser.parse_args()
    parts = {"at-once": at_once, "best-single": best_single, "steady": steady, "wrong-tables": wrong_tables}
    for name, part in parts.items():
        if options.only in (None, name):
            part(options.data, options.requests)
            print()


if __name__ == "__main__":
    main()
