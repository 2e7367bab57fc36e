"""Simulate machines, workloads and cache sizes: the ratio of `auto` to the bound and to `gpu-only`.

    python -m research.sweep_simulation --data FOLDER --requests 1000

FOLDER has osc-llama2-lengths.json, azure-llm-2023-conv.csv and azure-llm-2023-code.csv; lengths like
"1000/200" need no file. Prints the tables of research/simulation.md line by line.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import Curve
from neo_desktop.engine.schedule.steady_state import SteadyStateFinder, Workload
from neo_desktop.engine.simulation.bound import Bound, Room
from neo_desktop.engine.simulation.workload import synthetic, with_rate
from research.cases import FILES, LIMITS, Case, at_once, header, row, waits
from research.mismatch import Mismatch

CASES = (
    ("t4", "llama-2-7b", ("OSC", "conversation")),
    ("rtx-3060", "llama-3.2-3b", ("OSC", "conversation", "code")),
    ("rtx-4090", "llama-3.1-8b", ("OSC", "conversation", "code")),
    ("rtx-4090", "llama-2-7b", ("OSC", "conversation")),
    ("a10g", "llama-3.1-8b", ("1000/50", "1000/100", "1000/200", "1000/400")),
    ("h100", "llama-2-7b", ("OSC", "conversation")),
    ("gh200", "llama-2-13b", ("OSC", "conversation")),
)
WHERE = ("GPU", "model", "requests", "GPU-cache")  # columns of a case's name
SINGLE = ("gpu-only", "neo", "apex", "pie")  # kinds of iterations that `auto` combines
CACHE_SHARES = (1.0, 0.3, 0.0)  # of the card's memory for KV; 0: 1,008 tokens, or the longest request
SMALLEST_CACHE = 1008
MANY = 1 << 40  # tokens
# Slowdown of GPU and CPU against the tables; the noise of an iteration has the same size.
WRONG = ((1.15, 0.87, 0.15), (0.87, 1.15, 0.15))


def loose_bound(case: Case) -> float:
    """Return the bound without limits of host memory and requests, and without fixed costs.

    An iteration costs only the reading of its weights.
    """
    cost = case.cost
    layer_ms = [ms + cost.iteration_ms / cost.num_layers for ms in cost.linear.ms]
    output_ms = min(ms / rows for rows, ms in zip(cost.head.x, cost.head.ms, strict=True))
    cost = replace(
        cost,
        iteration_ms=0.0,
        linear=Curve(cost.linear.x, layer_ms),
        head=Curve((1, 2), (output_ms, 2 * output_ms)),
    )
    return Bound(cost, case.requests, Room(case.budget.gpu_tokens, MANY)).output_tokens_per_s()


def lasting(case: Case) -> float:
    """Return output tokens/s of the best steady state for these requests, without start and end."""
    requests = case.requests
    decodes = [r.output_tokens - 1 for r in requests]
    attended = sum((r.prompt_tokens + n / 2) * n for r, n in zip(requests, decodes, strict=True))
    context = attended / max(sum(decodes), 1)
    most = [int(0.95 * n / context) for n in (case.budget.gpu_tokens, case.budget.cpu_tokens)]
    on_device = min(most[0], LIMITS.max_batch_requests)
    prompts = [r.prompt_tokens for r in requests]
    workload = Workload(
        KVTier.DEVICE,
        KVTier.HOST,
        on_device,
        min(most[1], LIMITS.max_batch_requests - on_device),
        sum(p**2 for p in prompts) / sum(prompts),  # mean over prompt tokens
        context,
        sum(prompts) / max(sum(decodes), 1),
        LIMITS.max_batch_tokens,
        LIMITS.max_token_ms,
    )
    firsts = len(requests) / max(sum(decodes), 1)  # first tokens from prompts, per decode
    return SteadyStateFinder(case.cost).best(workload).rate * (1 + firsts) * 1e3


def cases(data: Path, count: int, shares: Sequence[float]) -> Iterator[tuple[str, Case]]:
    """Yield cases with their names."""
    for gpu_name, model, workloads in CASES:
        machine = Case.of(gpu_name, model)
        for name in workloads:
            requests = (
                at_once(data / FILES[name], count)
                if name in FILES
                else synthetic(count, *map(int, name.split("/")))
            )
            whole, full = machine.with_requests(requests), machine.budget.gpu_tokens
            sizes = {max(int(full * share), SMALLEST_CACHE) // BLOCK_SIZE for share in shares}
            for tokens in sorted((size * BLOCK_SIZE for size in sizes), reverse=True):
                case = machine.with_cache(tokens).with_requests(whole.requests)
                if len(case.requests) > len(whole.requests) / 2:
                    yield f"{case.title} | {model} | {name} | {tokens:,}", case


def print_at_once(data: Path, count: int) -> None:
    ratios = ("`auto` / steady_state", "/ loose bound", "/ bound")
    bounds = ("best steady_state", "loose bound", "bound")
    header(*WHERE, "`gpu-only`, tokens/s", "`neo`", "`apex`", "`auto`", *bounds, *ratios)
    for name, case in cases(data, count, CACHE_SHARES):
        alone, *others = map(case.rate, ("gpu-only", "neo", "apex", "auto"))
        limits = lasting(case), loose_bound(case), case.bound(swaps=True)
        relative = [f"{rate / alone:.2f}" for rate in (*others, *limits)]
        row(name, f"{alone:.0f}", *relative, *(f"{others[-1] / limit:.0%}" for limit in limits))


def print_best_single(data: Path, count: int) -> None:
    header(*WHERE, *(f"`{name}`" for name in SINGLE), "`auto`, tokens/s", "`auto` / best", "waits")
    for name, case in cases(data, count, CACHE_SHARES):
        single, auto = [case.rate(policy) for policy in SINGLE], case.run("auto")
        rate = auto.output_tokens_per_s
        rates = [f"{each:.0f}" for each in (*single, rate)]
        row(name, *rates, f"{rate / max(single):.2f}", waits(auto))


def print_steady(data: Path, count: int) -> None:
    header(*WHERE, "requests/s", "`gpu-only`, s/token", "`neo`", "`apex`", "`auto`")
    for name, case in cases(data, count, (1.0,)):
        rate = 0.9 * len(case.requests) / (case.run("auto").makespan_ms / 1e3)
        loaded = replace(case, requests=with_rate(case.requests, rate))
        policies = ("gpu-only", "neo", "apex", "auto")
        row(name, f"{rate:.2f}", *(f"{loaded.run(p).latency_per_token_ms / 1e3:.2f}" for p in policies))


def print_wrong_tables(data: Path, count: int) -> None:
    header(*WHERE, "CPU faster", "GPU faster")
    for name, case in cases(data, count, (1.0,)):
        wrong = [Mismatch(*each) for each in WRONG]
        row(name, *(f"{case.rate('auto', each) / case.rate('gpu-only', each):.2f}" for each in wrong))


PARTS = {
    "at-once": print_at_once,
    "best-single": print_best_single,
    "steady": print_steady,
    "wrong-tables": print_wrong_tables,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(options.data, options.requests)
            print()


if __name__ == "__main__":
    main()
