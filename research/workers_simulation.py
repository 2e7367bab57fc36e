"""Simulate attention workers: throughput by number, workers per GPU, price of tokens.

    python -m research.workers_simulation efficiency --out research/images
    python -m research.workers_simulation sizing

`efficiency` is FastDecode's figure 7: all KV is on one to eight workers. Prints the tables of
research/simulation.md; `efficiency` also draws a picture.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
import torch

from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.analytic import KVBudget, analytic_cost_model, kv_budget
from neo_desktop.engine.simulation.machine import GIB, TFLOPS
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.engine.simulation.simulator import simulate
from neo_desktop.engine.simulation.workload import synthetic
from neo_desktop.models.shapes import shape
from research.cases import header, row
from research.worker_machines import (
    WORKERS,
    Link,
    SteadyLoad,
    Workers,
    in_turn,
    with_workers,
    workers_wanted,
)

mpl.use("Agg")
import matplotlib.pyplot as plt

DTYPE = torch.float16
LIMITS = SchedulerLimits(max_batch_tokens=2048, max_batch_requests=1024)
COUNTS = (1, 2, 4, 8)
# FastDecode, section 4.1: an A10 without KV in its memory, and sockets of EPYC processors.
A10 = replace(get_gpu("a10g"), tensor_flops=125 * TFLOPS, memory_bytes=80 * GIB)
SOCKET = get_host("ddr4-server")
LINKS = {
    "10 Gbit/s, 100 us": Link(10e9 / 8, 0.1),
    "25 Gbit/s, 50 us": Link(25e9 / 8, 0.05),
    "100 Gbit/s, 20 us": Link(100e9 / 8, 0.02),
    "200 Gbit/s, 10 us": Link(200e9 / 8, 0.01),
}
SEQUENCES = ((1024, 1024), (512, 1024), (1024, 128))  # number and length
# Cards, their models, and workers: the memory of a desktop, an old and a new server.
MACHINES = (
    ("rtx-3060", "llama-3.2-3b"),
    ("a10g", "llama-3.1-8b"),
    ("rtx-4090", "llama-3.1-8b"),
    ("rtx-4090", "llama-2-7b"),
    ("h100", "llama-2-13b"),
)
# Kind of worker → assumed hourly price, relative to the GPU's machine.
KINDS = {"ddr4-desktop": 0.1, "ddr4-server": 0.2, "ddr5-server": 0.4}
CHATS = SteadyLoad(256, 1000, 400)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Throughput of 1, 2, 4 and 8 workers, relative to linear scaling."""

    tokens_per_s: Sequence[float]

    @property
    def efficiencies(self) -> list[float]:
        first = self.tokens_per_s[0]
        return [rate / first / count for rate, count in zip(self.tokens_per_s, COUNTS, strict=True)]


def cost_of(base: TableCostModel, model: str, count: int, link: Link) -> TableCostModel:
    return with_workers(base, Workers(count, SOCKET, link), shape(model), DTYPE)


def scaling(model: str, link: Link, sequences: int, length: int, *, ahead: bool = True) -> Scaling:
    """Return the workers' throughput.

    Args:
        ahead: as in the engine, rows of one sub-batch cross the link while workers attend for the other.
        False: a
            worker gets rows, attends and sends the output before it gets the next rows.
    """
    base = analytic_cost_model(A10, SOCKET, shape(model), DTYPE)
    prompt = 16
    budget = KVBudget(0, sequences * (length + 128))
    requests = synthetic(sequences, prompt, length - prompt)

    def cost(count: int) -> TableCostModel:
        found = cost_of(base, model, count, link)
        return found if ahead else in_turn(found)

    return Scaling(
        [
            simulate(
                requests,
                POLICIES["fastdecode"].with_tiers([WORKERS]),
                cost(count),
                budget.num_blocks(WORKERS),
                BLOCK_SIZE,
                LIMITS,
            ).output_tokens_per_s
            for count in COUNTS
        ]
    )


def steady(model: str, link: Link, sequences: int, length: int) -> Scaling:
    """Return throughput in the steady state of chats that began at different times."""
    base = analytic_cost_model(A10, SOCKET, shape(model), DTYPE)
    load = SteadyLoad(sequences, 16, length - 16)
    rows = sequences // 2
    prompts = round(rows * load.prompt_tokens / load.output_tokens)
    half = BatchShape(
        rows + prompts,
        rows,
        prompts * base.prefill_attention_ms(16, 0) / 16,
        {WORKERS: Decodes(rows, round(rows * load.context_tokens))},
    )
    costs = (cost_of(base, model, count, link) for count in COUNTS)
    return Scaling([2 * rows / iteration_ms(cost, IterationShape((half, half))) * 1e3 for cost in costs])


def print_efficiency(out: Path) -> None:
    ways = ("efficiency at 8", "begun at different times", "not sent ahead")
    header("model", "sequences", "link", *map(str, COUNTS), *ways, "wanted")
    drawn: dict[str, Scaling] = {}
    for model in ("llama-2-7b", "llama-2-13b"):
        base = analytic_cost_model(A10, SOCKET, shape(model), DTYPE)
        for sequences, length in SEQUENCES:
            for name, link in LINKS.items():
                found = scaling(model, link, sequences, length)
                behind = scaling(model, link, sequences, length, ahead=False)
                lasting = steady(model, link, sequences, length)
                load = SteadyLoad(sequences, 16, length - 16)
                wanted = workers_wanted(base, SOCKET, link, shape(model), DTYPE, load) or "none is enough"
                rates = [f"{rate:,.0f}" for rate in found.tokens_per_s]
                shares = [f"{each.efficiencies[-1]:.0%}" for each in (found, lasting, behind)]
                row(model, f"{sequences} of {length}", name, *rates, *shares, str(wanted))
                if (model, sequences, length) == ("llama-2-13b", *SEQUENCES[0]):
                    drawn[name] = found
    _draw(drawn, out / "sim-workers.png")


def _draw(scalings: dict[str, Scaling], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, found in scalings.items():
        axes.plot(
            COUNTS, [rate / found.tokens_per_s[0] for rate in found.tokens_per_s], marker="o", label=name
        )
    axes.plot(COUNTS, COUNTS, color="#bbbbbb", linestyle="--", label="perfect")
    axes.set(xlabel="workers", ylabel="throughput, relative to one", xticks=COUNTS)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def print_sizing() -> None:
    """Print a typical office: one GPU, machines with free memory, 400 chats."""
    rates = ("`gpu-only`", "`auto`, own CPU", "`auto`, wanted")
    header("GPU", "model", "worker", "link", "wanted", *rates, "per price, relative")
    limits = replace(LIMITS, max_batch_requests=CHATS.requests)
    requests = synthetic(400, round(CHATS.prompt_tokens), round(CHATS.output_tokens))
    for gpu_name, model in MACHINES:
        gpu, config = get_gpu(gpu_name), shape(model)
        host = get_host(gpu.host)
        base = analytic_cost_model(gpu, host, config, DTYPE)
        budget = kv_budget(gpu, host, config, DTYPE, limits)

        def rate(policy: str, cost: TableCostModel, budget: KVBudget, workers: KVTier | None = None) -> float:
            where = POLICIES[policy].with_tiers([] if workers is None else [workers])
            result = simulate(requests, where, cost, budget.num_blocks(workers), BLOCK_SIZE, limits)
            return result.output_tokens_per_s

        alone, own = rate("gpu-only", base, budget), rate("auto", base, budget)
        for kind_name, price in KINDS.items():
            kind = replace(get_host(kind_name), memory_bytes=64 * GIB)
            for link_name, link in list(LINKS.items())[:3]:
                wanted = workers_wanted(base, kind, link, config, DTYPE, CHATS)
                count, found, gain = "none is enough", "-", "-"
                if wanted is not None:
                    workers = Workers(wanted, kind, link)
                    tokens = workers.kv_tokens(config, DTYPE)
                    cost = with_workers(base, workers, config, DTYPE)
                    speed = rate("auto", cost, KVBudget(budget.gpu_tokens, tokens), WORKERS)
                    count, found = str(wanted), f"{speed:,.0f}"
                    gain = f"{speed / alone / (1 + price * wanted):.2f}"
                where = gpu.title, model, kind_name, link_name
                row(*where, count, f"{alone:,.0f}", f"{own:,.0f}", found, gain)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("efficiency", "sizing"))
    parser.add_argument("--out", type=Path, default=Path("research/images"))
    options = parser.parse_args()
    if options.part == "efficiency":
        print_efficiency(options.out)
    else:
        print_sizing()


if __name__ == "__main__":
    main()
