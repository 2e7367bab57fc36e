"""Simulate the experiments of NEO's section 5 and draw them; research/simulation.md discusses the results.

    python -m research.plot_simulation load --trace osc.json
    python -m research.plot_simulation output
    python -m research.plot_simulation hosts
    python -m research.plot_simulation ratios --trace osc.json --trace code.csv --trace conv.csv

Each command prints a Markdown table; the first three also write a picture to --out.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl

from neo_desktop.engine.simulation.metrics import SimulationResult
from neo_desktop.engine.simulation.presets import get_host
from neo_desktop.engine.simulation.workload import WorkloadRequest, synthetic, with_rate
from research.cases import LIMITS, Case, at_once, header, row
from research.traces import load_trace
from research.unmixed import simulate_unmixed

mpl.use("Agg")
import matplotlib.pyplot as plt

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


def run(case: Case, policy: str, requests: Sequence[WorkloadRequest]) -> SimulationResult:
    """Simulate requests that fit the GPU-cache."""
    case = case.with_requests(requests)
    if policy == UNMIXED:
        return simulate_unmixed(case.requests, case.cost, case.budget.gpu_tokens, LIMITS)
    return case.run(policy)


def rate(case: Case, policy: str, requests: Sequence[WorkloadRequest]) -> float:
    """Return output tokens/s."""
    return run(case, policy, requests).output_tokens_per_s


def draw_load(trace: Path, out: Path) -> None:
    """Draw NEO's figure 6c: load against latency on T4 + Llama-2-7B + OSC, for several GPU-cache sizes."""
    requests = load_trace(trace)
    names = ("gpu-only", "fastdecode", "neo", "auto")
    figure, all_axes = plt.subplots(1, len(GPU_CACHES), figsize=(4 * len(GPU_CACHES), 3.6), sharey=True)
    header("GPU-cache", *names, "neo / gpu-only", "auto / gpu-only")
    for axes, gpu_tokens in zip(all_axes, GPU_CACHES, strict=True):
        case = Case.of("t4", "llama-2-7b").with_cache(gpu_tokens)
        sustained = {}
        for name in names:

            def latency_ms(rate: float, name: str = name, case: Case = case) -> float:
                return run(case, name, with_rate(requests, rate)).latency_per_token_ms

            points = [(rate, latency_ms(rate)) for rate in (0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6)]
            sustained[name] = _highest_rate(latency_ms)
            shown = [(rate, ms / 1e3) for rate, ms in points if ms <= 4000]
            shown.append((sustained[name], LATENCY_LIMIT_MS / 1e3))
            axes.plot(*zip(*sorted(shown), strict=True), "o-", markersize=3, color=COLOURS[name], label=name)
        axes.axhline(LATENCY_LIMIT_MS / 1e3, color="black", linewidth=0.6, linestyle=":")
        axes.set(title=f"GPU-cache {gpu_tokens:,} tokens", xlabel="requests / s", ylim=(0, 3), xlim=(0, 6))
        gains = [f"{sustained[name] / sustained['gpu-only']:.1f}x" for name in ("neo", "auto")]
        row(f"{gpu_tokens:,}", *(f"{each:.2f}" for each in sustained.values()), *gains)
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
    case = Case.of("a10g", "llama-3.1-8b")
    names = (UNMIXED, "fastdecode", "neo", "auto")
    ratios: dict[str, list[float]] = {name: [] for name in (*names, "bound")}
    header("output", "gpu-only, tokens/s", *names, "bound", "neo / prefill first")
    for length in OUTPUT_LENGTHS:
        requests = synthetic(num_requests, INPUT_LENGTH, length)
        base = rate(case, "gpu-only", requests)
        for name in names:
            ratios[name].append(rate(case, name, requests) / base)
        ratios["bound"].append(case.with_requests(requests).bound() / base)
        newest = {name: values[-1] for name, values in ratios.items()}
        shown = *newest.values(), newest["neo"] / newest[UNMIXED]
        row(str(length), f"{base:.0f}", *(f"{ratio:.2f}" for ratio in shown))
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
    pairs = [(policy, base) for policy in ("neo", "auto") for base in ("gpu-only", UNMIXED)]
    gains: dict[tuple[str, str, str], list[float]] = {}
    for length in OUTPUT_LENGTHS:
        requests = synthetic(num_requests, INPUT_LENGTH, length)
        usual = Case.of("a10g", "llama-3.1-8b")
        bases = {name: rate(usual, name, requests) for name in ("gpu-only", UNMIXED)}
        for host in HOST_NAMES:
            case = Case.of("a10g", "llama-3.1-8b", host)
            speeds = {policy: rate(case, policy, requests) for policy in ("neo", "auto")}
            for policy, base in pairs:
                gains.setdefault((host, policy, base), []).append(speeds[policy] / bases[base])
    header("instance", "CPU GB/s", *(f"{policy} / {base}" for policy, base in pairs))
    for host in HOST_NAMES:
        peaks = [f"{max(gains[host, *pair]) - 1:+.0%}" for pair in pairs]
        row(host, f"{get_host(host).memory_bytes_per_s / 1e9:.0f}", *peaks)
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
    header(
        *["GPU", "model", "trace", "GPU-cache", "gpu-only, tokens/s", "fastdecode", "neo", "auto", "bound"]
    )
    lowest = float("inf")
    for gpu, model in MACHINES:
        machine = Case.of(gpu, model)
        for trace in traces:
            case = machine.with_requests(at_once(trace, num_requests))
            base, *others = map(case.rate, ("gpu-only", "fastdecode", "neo", "auto"))
            ratios = [each / base for each in (*others, case.bound())]
            lowest = min(lowest, others[-1] / base)
            where = gpu, model, trace.stem, f"{case.budget.gpu_tokens:,}"
            row(*where, f"{base:.0f}", *(f"{ratio:.2f}" for ratio in ratios))
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
