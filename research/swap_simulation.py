"""Simulate Pie's experiments: throughput against the size of the GPU-cache, and against the expansion.

    python -m research.swap_simulation cache --data FOLDER --requests 500
    python -m research.swap_simulation expansion --data FOLDER --requests 500
    python -m research.swap_simulation convergence --data FOLDER --out PICTURE

FOLDER has osc-llama2-lengths.json and azure-llm-2023-conv.csv. Prints the tables of research/simulation.md
line by line. `convergence` draws how the expansion settles if the bus differs from the tables.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.schedule.iteration_builder import Decision
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.simulation.analytic import RESIDENT_LAYERS, KVBudget
from neo_desktop.engine.simulation.presets import GB
from neo_desktop.engine.simulation.simulator import SimulatedRequest
from research.cases import DTYPE, FILES, LIMITS, Case, at_once, header, row, waits
from research.mismatch import Mismatch

mpl.use("Agg")
import matplotlib.pyplot as plt

MODEL = "llama-2-13b"
WORKLOADS = ("OSC", "conversation")
MACHINES = ("gh200", "h100", "a100-40gb")  # NVLink-C2C, PCIe 5, PCIe 4
CACHES_GB = (3, 5, 7, 9, 12)
EXPANSIONS = (1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0, 4.0)
CONVERGENCE_GB = 5  # GPU-cache size
BUSES = {0.5: "twice as fast", 1.0: "as the tables say", 2.0: "half as fast", 3.0: "a third as fast"}
COLOURS = ("#1c8c4c", "#2f6fb0", "#d08700", "#b03a2e")
NOISE = 0.05  # per iteration
SETTLED = 0.1  # relative deviation that counts as settled
SHOWN = 400  # iterations
STATIC = Policy("static", (KVTier.DEVICE, KVTier.STREAMED))  # always fills its memory


def rate_of(case: Case, expansion: float) -> float:
    """Return output tokens/s with KV memory of `expansion` times the GPU's, all in use, hidden or not."""
    device = case.budget.gpu_tokens / (1 + (expansion - 1) * RESIDENT_LAYERS / case.cost.num_layers)
    budget = KVBudget(int(device), 0, int(device * (expansion - 1)))
    return replace(case, budget=budget).rate(STATIC)


def cases(data: Path, count: int, machines: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """Yield cases with their names."""
    for gpu_name in machines:
        machine = Case.of(gpu_name, MODEL)
        for name in WORKLOADS:
            requests = at_once(data / FILES[name], count)
            for cache_gb in CACHES_GB:
                tokens = int(cache_gb * GB) // machine.config.kv_bytes_per_token(DTYPE)
                tokens = tokens // BLOCK_SIZE * BLOCK_SIZE
                if tokens <= machine.budget.gpu_tokens:
                    # A longer request would need host memory at any cost.
                    fitting = [r for r in requests if r.total_tokens <= 0.6 * tokens]
                    case = replace(machine.with_cache(tokens), requests=fitting)
                    yield f"{case.title} | {name} | {cache_gb} GB", case


def print_caches(data: Path, count: int, machines: Sequence[str]) -> None:
    """Print Pie's figure 7."""
    policies = ("gpu-only", "pie", "neo", "auto")
    header("GPU", "requests", "GPU-cache", *policies, "`pie` / `gpu-only`", "expansion", "waits")
    for title, case in cases(data, count, machines):
        results = [case.run(policy) for policy in policies]
        alone, pie, *_ = rates = [result.output_tokens_per_s for result in results]
        budget = case.budget.swapping(case.cost, LIMITS)
        expansion = (budget.gpu_tokens + budget.streamed_tokens) / case.budget.gpu_tokens
        shown = [f"{rate:.0f}" for rate in rates]
        row(title, *shown, f"{pie / alone:.2f}", f"{expansion:.2f}", waits(results[1]))


def print_expansions(data: Path, count: int, machines: Sequence[str]) -> None:
    """Print Pie's figures 6 and 9b."""
    header("GPU", "requests", "GPU-cache", *map(str, EXPANSIONS), "adaptive", "/ best")
    for title, case in cases(data, count, machines):
        alone = case.rate("gpu-only")
        rates = [rate_of(case, expansion) / alone for expansion in EXPANSIONS]
        adaptive = case.rate("pie") / alone
        row(title, *(f"{rate:.2f}" for rate in (*rates, adaptive)), f"{adaptive / max(rates):.1%}")


def draw_convergence(data: Path, count: int, machine: str, out: Path) -> None:
    """Draw the scheduler's estimate of the bus, and the streamed KV, from the start."""
    wanted = f"| OSC | {CONVERGENCE_GB} GB"
    case = next(case for title, case in cases(data, count, (machine,)) if title.endswith(wanted))
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5), sharex=True)
    header("bus", "settled within", "factor then", "waits")
    for (slowdown, title), colour in zip(BUSES.items(), COLOURS, strict=True):
        seen: list[tuple[float, int]] = []  # believed factor of copies, streamed tokens

        def observe(
            decision: Decision[SimulatedRequest],
            cost: TableCostModel,
            seen: list[tuple[float, int]] = seen,
        ) -> None:
            shapes = [each.decodes.items() for each in decision.shape.batches]
            tokens = sum(d.context_tokens for items in shapes for tier, d in items if tier.is_streamed)
            seen.append((cost.correction.bus, tokens))

        result = case.run("pie", Mismatch(bus_slowdown=slowdown, noise=NOISE), observe)
        factors, tokens = zip(*seen, strict=True)
        begun = next(index for index, count in enumerate(tokens) if count)
        off = [index for index, factor in enumerate(factors) if abs(factor / slowdown - 1) > SETTLED]
        settled = max((index + 1 - begun for index in off if index < len(factors) // 2), default=0)
        row(title, f"{settled} iterations", f"{factors[-1]:.2f}", waits(result))
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
