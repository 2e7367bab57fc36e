"""Simulate the experiments of NEO's section 5 and draw them; research/simulation.md discusses the results.

    python research/plot_simulation.py load --trace osc.json
    python research/plot_simulation.py output
    python research/plot_simulation.py hosts
    python research/plot_simulation.py ratios --trace osc.json --trace code.csv --trace conv.csv

Each command prints a Markdown table; the first three also write a picture to --out.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
from unmixed import simulate_unmixed

from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.analytic import KVBudget, analytic_cost_model, kv_budget
from neo_desktop.engine.simulation.bound import Bound, Room
from neo_desktop.engine.simulation.metrics import SimulationResult
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.engine.simulation.simulator import simulate
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace, synthetic, with_rate
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.shapes import shape

mpl.use("Agg")
import matplotlib.pyplot as plt

LIMITS = SchedulerLimits(max_batch_tokens=2048, max_batch_requests=256)
DTYPE = torch.float16
UNMIXED = "prefill first"
COLOURS = {
    "gpu-only": "#666666",
    UNMIXED: "#bbbbbb",
    "fastdecode": "#d08700",
    "neo": "#2f6fb0",
    "auto": "#1c8c4c",
}

GPU_CACHES = (1008, 2000, 3008, 6000)
LATENCY_LIMIT_MS = 1000.0
OUTPUT_LENGTHS = (25, 50, 100, 150, 200, 300, 400, 600, 800)
INPUT_LENGTH = 1000
HOST_NAMES = ("g5.2xlarge", "g5.4xlarge", "g5.8xlarge", "g5.16xlarge")
MACHINES = (
    ("t4", "llama-2-7b"),
    ("t4", "qwen3-4b"),
    ("a10g", "llama-3.1-8b"),
    ("rtx-3060", "qwen3-4b"),
    ("rtx-4090", "llama-3.1-8b"),
    ("h100", "llama-3.1-8b"),
    ("h100", "llama-2-13b"),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU, a host and a model."""

    cost: TableCostModel
    budget: KVBudget
    config: ModelConfig

    @classmethod
    def of(
        cls, gpu_name: str, model: str, host_name: str | None = None, gpu_tokens: int | None = None
    ) -> "Machine":
        gpu, config = get_gpu(gpu_name), shape(model)
        host = get_host(host_name or gpu.host)
        budget = kv_budget(gpu, host, config, DTYPE, LIMITS)
        if gpu_tokens is not None:
            budget = KVBudget(gpu_tokens, budget.cpu_tokens)
        return cls(analytic_cost_model(gpu, host, config, DTYPE), budget, config)

    @property
    def room(self) -> Room:
        return Room(self.budget.gpu_tokens, self.budget.cpu_tokens, LIMITS.max_batch_requests)

    def run(self, policy: str, requests: Sequence[WorkloadRequest]) -> SimulationResult:
        # Requests beyond the GPU-cache's size are omitted, so that all policies get the same requests.
        context = min(self.config.max_context_tokens, self.budget.gpu_tokens)
        if policy == UNMIXED:
            fitting = [request for request in requests if request.total_tokens <= context]
            return simulate_unmixed(fitting, self.cost, self.budget.gpu_tokens, LIMITS)
        return simulate(
            requests,
            POLICIES[policy],
            self.cost,
            self.budget.num_blocks(),
            BLOCK_SIZE,
            LIMITS,
            max_context_tokens=context,
        )


def draw_load(trace: Path, out: Path) -> None:
    """Draw NEO's figure 6c: load against latency on T4 + Llama-2-7B + OSC, for several GPU-cache sizes."""
    requests = load_trace(trace)
    names = ("gpu-only", "fastdecode", "neo", "auto")
    figure, all_axes = plt.subplots(1, len(GPU_CACHES), figsize=(4 * len(GPU_CACHES), 3.6), sharey=True)
    print("| GPU-cache | " + " | ".join(names) + " | neo / gpu-only | auto / gpu-only |")
    print("|---" * (len(names) + 3) + "|")
    for axes, gpu_tokens in zip(all_axes, GPU_CACHES, strict=True):
        machine = Machine.of("t4", "llama-2-7b", gpu_tokens=gpu_tokens)
        sustained = {}
        for name in names:

            def latency_ms(rate: float, name: str = name, machine: Machine = machine) -> float:
                return machine.run(name, with_rate(requests, rate)).latency_per_token_ms

            points = [(rate, latency_ms(rate)) for rate in (0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6)]
            sustained[name] = _highest_rate(latency_ms)
            shown = [(rate, ms / 1e3) for rate, ms in points if ms <= 4000]
            shown.append((sustained[name], LATENCY_LIMIT_MS / 1e3))
            axes.plot(*zip(*sorted(shown), strict=True), "o-", markersize=3, color=COLOURS[name], label=name)
        axes.axhline(LATENCY_LIMIT_MS / 1e3, color="black", linewidth=0.6, linestyle=":")
        axes.set(title=f"GPU-cache {gpu_tokens:,} tokens", xlabel="requests / s", ylim=(0, 3), xlim=(0, 6))
        base = sustained["gpu-only"]
        print(
            f"| {gpu_tokens:,} | "
            + " | ".join(f"{sustained[name]:.2f}" for name in names)
            + f" | {sustained['neo'] / base:.1f}x | {sustained['auto'] / base:.1f}x |",
            flush=True,
        )
    all_axes[0].set_ylabel("mean latency per output token, s")
    all_axes[0].legend(frameon=False)
    _save(figure, out / "sim-load.png", "T4 + Llama-2-7B + OSC, Poisson arrivals")


def _highest_rate(latency_ms: Callable[[float], float]) -> float:
    """Return the rate at which the mean latency per token is one second, to 2 %."""
    low, high = 0.02, 16.0
    while high > low * 1.02:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if latency_ms(middle) <= LATENCY_LIMIT_MS else (low, middle)
    return low


def draw_output(out: Path, num_requests: int) -> None:
    """Draw NEO's figure 9b: throughput against output length on A10G + Llama-3.1-8B, g5.4xlarge."""
    machine = Machine.of("a10g", "llama-3.1-8b")
    names = (UNMIXED, "fastdecode", "neo", "auto")
    ratios: dict[str, list[float]] = {name: [] for name in (*names, "bound")}
    print("| output | gpu-only, tokens/s | " + " | ".join(names) + " | bound | neo / prefill first |")
    print("|---" * (len(names) + 4) + "|")
    for length in OUTPUT_LENGTHS:
        requests = synthetic(num_requests, INPUT_LENGTH, length)
        base = machine.run("gpu-only", requests).output_tokens_per_s
        for name in names:
            ratios[name].append(machine.run(name, requests).output_tokens_per_s / base)
        bound = Bound(machine.cost, requests, machine.room).output_tokens_per_s()
        ratios["bound"].append(bound / base)
        print(
            f"| {length} | {base:.0f} | "
            + " | ".join(f"{ratios[name][-1]:.2f}" for name in (*names, "bound"))
            + f" | {ratios['neo'][-1] / ratios[UNMIXED][-1]:.2f} |",
            flush=True,
        )
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for name in names:
        left.plot(OUTPUT_LENGTHS, ratios[name], "o-", markersize=3, color=COLOURS[name], label=name)
    left.plot(OUTPUT_LENGTHS, ratios["bound"], ":", color="black", label="closed bound")
    left.set(title="against gpu-only (prompts beside decodes)", ylabel="relative throughput")
    for name in names[1:]:
        relative = [a / b for a, b in zip(ratios[name], ratios[UNMIXED], strict=True)]
        right.plot(OUTPUT_LENGTHS, relative, "o-", markersize=3, color=COLOURS[name], label=name)
    right.set(title="against prefill first (the paper's baseline)")
    for axes in (left, right):
        axes.axhline(1.0, color="black", linewidth=0.6)
        axes.set(xlabel="output tokens", ylim=(0, None))
    left.legend(frameon=False)
    _save(figure, out / "sim-output.png", f"A10G (g5.4xlarge) + Llama-3.1-8B, {INPUT_LENGTH} tokens in")


def draw_hosts(out: Path, num_requests: int) -> None:
    """Draw NEO's figure 10a: the same on instances with different CPU bandwidth."""
    policies = ("neo", "auto")
    gains: dict[tuple[str, str, str], list[float]] = {}
    for length in OUTPUT_LENGTHS:
        requests = synthetic(num_requests, INPUT_LENGTH, length)
        bases = {
            name: Machine.of("a10g", "llama-3.1-8b").run(name, requests).output_tokens_per_s
            for name in ("gpu-only", UNMIXED)
        }
        for host in HOST_NAMES:
            machine = Machine.of("a10g", "llama-3.1-8b", host)
            for policy in policies:
                speed = machine.run(policy, requests).output_tokens_per_s
                for base, value in bases.items():
                    gains.setdefault((host, policy, base), []).append(speed / value)
    print(
        "| instance | CPU GB/s | "
        + " | ".join(f"{p} / {b}" for p in policies for b in ("gpu-only", UNMIXED))
        + " |"
    )
    print("|---" * (2 + 2 * len(policies)) + "|")
    for host in HOST_NAMES:
        peaks = [max(gains[host, p, b]) for p in policies for b in ("gpu-only", UNMIXED)]
        bandwidth = get_host(host).memory_bytes_per_s / 1e9
        print(f"| {host} | {bandwidth:.0f} | " + " | ".join(f"{(peak - 1):+.0%}" for peak in peaks) + " |")
    figure, all_axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axes, base in zip(all_axes, ("gpu-only", UNMIXED), strict=True):
        for shade, host in enumerate(HOST_NAMES):
            colour = mpl.colormaps["viridis"](0.85 - 0.25 * shade)
            axes.plot(OUTPUT_LENGTHS, gains[host, "auto", base], "o-", markersize=3, color=colour, label=host)
            axes.plot(OUTPUT_LENGTHS, gains[host, "neo", base], ":", color=colour)
        axes.axhline(1.0, color="black", linewidth=0.6)
        axes.set(title=f"against {base}", xlabel="output tokens")
    all_axes[0].set_ylabel("relative throughput (solid: auto, dotted: neo)")
    all_axes[0].legend(frameon=False)
    _save(figure, out / "sim-hosts.png", f"A10G + Llama-3.1-8B, {INPUT_LENGTH} tokens in, by CPU bandwidth")


def print_ratios(traces: Sequence[Path], num_requests: int) -> None:
    """Print the ratio of auto to gpu-only on every machine and trace, all requests at once."""
    print("| GPU | model | trace | GPU-cache | gpu-only, tokens/s | fastdecode | neo | auto | bound |")
    print("|---|---|---|---|---|---|---|---|---|")
    lowest = float("inf")
    for gpu, model in MACHINES:
        machine = Machine.of(gpu, model)
        for trace in traces:
            requests = with_rate(load_trace(trace)[:num_requests], float("inf"))
            base, *others = (
                machine.run(name, requests) for name in ("gpu-only", "fastdecode", "neo", "auto")
            )
            ratios = [other.output_tokens_per_s / base.output_tokens_per_s for other in others]
            longest = min(machine.config.max_context_tokens, machine.budget.gpu_tokens)
            fitting = [request for request in requests if request.total_tokens <= longest]
            bound = Bound(machine.cost, fitting, machine.room).output_tokens_per_s()
            lowest = min(lowest, ratios[-1])
            print(
                f"| {gpu} | {model} | {trace.stem} | {machine.budget.gpu_tokens:,} "
                f"| {base.output_tokens_per_s:.0f} | "
                + " | ".join(f"{ratio:.2f}" for ratio in ratios)
                + f" | {bound / base.output_tokens_per_s:.2f} |",
                flush=True,
            )
    print(f"\nLowest auto / gpu-only: {lowest:.3f}")


def _save(figure: plt.Figure, path: Path, title: str) -> None:
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"\n{path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=("load", "output", "hosts", "ratios"))
    parser.add_argument("--trace", type=Path, action="append", default=[], help="repeatable for ratios")
    parser.add_argument("--requests", type=int, default=1000, help="per point (output, hosts, ratios)")
    parser.add_argument("--out", type=Path, default=Path("research/images"))
    arguments = parser.parse_args()
    if arguments.figure in ("load", "ratios") and not arguments.trace:
        parser.error(f"{arguments.figure} needs --trace FILE")
    match arguments.figure:
        case "load":
            draw_load(arguments.trace[0], arguments.out)
        case "output":
            draw_output(arguments.out, arguments.requests)
        case "hosts":
            draw_hosts(arguments.out, arguments.requests)
        case "ratios":
            print_ratios(arguments.trace, arguments.requests)


if __name__ == "__main__":
    main()
