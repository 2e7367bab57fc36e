"""The results of a simulation, for people and for programs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from neo_desktop.app.simulate.answer import BASELINE, answer
from neo_desktop.app.simulate.machine import USUAL_MODELS, Machine
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.simulation.analytic import KVBudget
from neo_desktop.engine.simulation.metrics import SimulationResult
from neo_desktop.engine.simulation.presets import GPUS, HOSTS
from neo_desktop.engine.simulation.workload import WorkloadRequest


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """One or several policies on one machine and workload."""

    machine: Machine
    requests: tuple[WorkloadRequest, ...]
    results: dict[str, SimulationResult]
    bound_output_tokens_per_s: float  # what no policy can exceed on this machine

    @property
    def budget(self) -> KVBudget:
        """Tokens of KV that the two tiers hold."""
        return self.machine.budget

    @property
    def arriving(self) -> str:
        """The arrival of requests, after "when"."""
        count, span_s = len(self.requests), self.requests[-1].arrival_ms / 1e3
        return f"{count:,} chats come {f'within {span_s:,.0f} s' if span_s else 'at once'}"

    @property
    def fits_gpu(self) -> bool:
        """True if all requests together have room in the GPU-cache."""
        return sum(request.total_tokens for request in self.requests) <= self.budget.gpu_tokens

    def to_json(self) -> dict[str, Any]:
        """Plain data: `{"policies": {name: figures}}`, units in the names."""
        return {
            "policies": {
                name: result.to_json()
                | {
                    "bound_output_tokens_per_s": self.bound_output_tokens_per_s,
                    "bound_share": self._share(result),
                    "gpu_cache_tokens": self.budget.gpu_tokens,
                    "cpu_cache_tokens": self.budget.cpu_tokens,
                }
                for name, result in self.results.items()
            }
        }

    def write_json(self, path: Path) -> None:
        """Write `to_json` to a file. Raises OSError where that is impossible."""
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        """Print the answer, a row per policy, what cannot run, and what was assumed."""
        console.print(answer(self), style="bold", highlight=False, markup=False)
        console.print()
        console.print(self._table())
        for note in self.refusals():
            console.print(f"\n{note}", highlight=False, markup=False)
        console.print(
            f"\nNo policy can exceed {self.bound_output_tokens_per_s:,.0f} output tokens/s. TTFT: time to "
            "the first token; TPOT: time per further token, as one chat sees it.",
            highlight=False,
        )
        console.print("\nAssumed, a prediction and not a measurement:", highlight=False)
        assumed = Table.grid(padding=(0, 2, 0, 0))
        for name, text in self._assumed():
            assumed.add_row(f"  {name}", text)
        console.print(assumed, highlight=False, markup=False)

    def refusals(self) -> list[str]:
        """Name the requests that some policies cannot run, and why."""
        by_limit: dict[str, list[SimulationResult]] = {}
        for result in self.results.values():
            if result.num_refused:
                by_limit.setdefault(self._limit(result), []).append(result)
        return [self._refusal(limit, refusing) for limit, refusing in by_limit.items()]

    def _limit(self, result: SimulationResult) -> str:
        if result.longest_tokens == self.machine.config.max_context_tokens:
            return f"{self.machine.model}'s context of {result.longest_tokens:,}"
        tiers = POLICIES[result.policy].tiers
        if len(tiers) > 1:
            return f"either cache, the larger of which holds {result.longest_tokens:,}"
        return f"the {tiers[0].title} of {result.longest_tokens:,}"

    def _refusal(self, limit: str, refusing: list[SimulationResult]) -> str:
        longest = max(self.requests, key=lambda request: request.total_tokens)
        prompt, output = f"{longest.prompt_tokens:,} tokens", f"{longest.output_tokens:,}"
        count = refusing[0].num_refused
        names = " and ".join(result.policy for result in refusing)
        if count == 1:
            return (
                f"A prompt of {prompt} and its answer of {output} do not fit {limit}: {names} cannot run it."
            )
        what = f"All {count:,}" if count == len(self.requests) else f"{count:,} of {len(self.requests):,}"
        return (
            f"{what} requests do not fit {limit} (the longest has a prompt of {prompt} and an answer of "
            f"{output}): {names} cannot run them."
        )

    def _share(self, result: SimulationResult) -> float:
        """Return how much of the bound a policy reaches; 0 where there is nothing to reach."""
        bound = self.bound_output_tokens_per_s
        return result.output_tokens_per_s / bound if bound else 0.0

    def _table(self) -> Table:
        baseline = self.results.get(BASELINE)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
        for result in self.results.values():
            table.add_row(*_row(result, baseline, self._share(result)))
        return table

    def _assumed(self) -> list[tuple[str, str]]:
        machine, count = self.machine, len(self.requests)
        gpu, host = machine.gpu, machine.host
        prompt = sum(request.prompt_tokens for request in self.requests) / count
        output = sum(request.output_tokens for request in self.requests) / count
        dtype = str(machine.dtype).removeprefix("torch.")
        weights_gb = machine.config.weight_bytes(machine.dtype, machine.form) / 1e9
        chosen = ""
        if machine.model_was_chosen:
            chosen = f"; the largest of {', '.join(USUAL_MODELS)} that leaves room, --model takes another"
        gpu_source = "vendor's datasheet" if GPUS[gpu.name] == gpu else "with your memory"
        host_source = "datasheet; --cpu takes another" if HOSTS[host.name] == host else "with your memory"
        lines = [
            (
                "GPU",
                f"{gpu.title}: {gpu.memory_bytes / 2**30:.4g} GiB at {gpu.memory_bytes_per_s / 1e9:,.0f} "
                f"GB/s, {gpu.tensor_flops / 1e12:.3g} TFLOP/s, bus {gpu.bus_bytes_per_s / 1e9:.3g} GB/s "
                f"({gpu_source})",
            ),
            (
                "host",
                f"{host.name}: {host.memory_bytes / 2**30:.4g} GiB at {host.memory_bytes_per_s / 1e9:,.0f} "
                f"GB/s, {host.cores} cores ({host_source})",
            ),
            (
                "model",
                f"{machine.model} in {dtype}, {weights_gb:.1f} GB{chosen}",
            ),
            (
                "requests",
                f"{count:,}, {prompt:,.0f} tokens in and {output:,.0f} out on average, "
                f"{self.arriving.partition(' come ')[2]}; --input, --output, --requests, --rate take others",
            ),
            (
                "KV",
                f"{self.budget.gpu_tokens:,} tokens in GPU memory (GPU-cache), {self.budget.cpu_tokens:,} in "
                "host memory (CPU-cache)",
            ),
        ]
        if machine.divided is not None and machine.divided.plan.is_split:
            plan, most = machine.divided.plan, machine.divided.bound_tokens_per_s
            lines.append(
                (
                    "weights",
                    f"{plan.gpu_bytes / 1e9:.1f} GB in GPU memory, {plan.host_bytes / 1e9:.1f} GB in host "
                    "memory, computed by CPU and GPU together: reading them bounds one chat to "
                    f"{most:,.3g} tokens/s",
                )
            )
        return lines


# Two lines each, so that the table fits 80 columns.
_COLUMNS = (
    "policy",
    "output\ntokens/s",
    "gain",
    "of\nbound",
    "TPOT, ms\nmean/p99",
    "price in\nTPOT",
    "TTFT, s\np50/p99",
    "busy\nGPU/CPU",
)


def _row(result: SimulationResult, baseline: SimulationResult | None, bound_share: float) -> list[str]:
    if not result.finished:
        return [result.policy, "cannot run", *["-"] * (len(_COLUMNS) - 2)]
    figures = result.to_json()
    ttft, tpot_ms = figures["ttft_ms"], figures["tpot_ms"]
    gain = price = "-"
    if baseline is not None and baseline.num_refused == result.num_refused:  # the same requests
        gain = f"{result.output_tokens_per_s / baseline.output_tokens_per_s:.2f}x"
        if base_ms := baseline.to_json()["tpot_ms"]:
            price = f"{tpot_ms / base_ms:.2f}x"
    return [
        result.policy,
        f"{result.output_tokens_per_s:,.1f}",
        gain,
        f"{bound_share:.0%}",
        f"{tpot_ms:.0f}/{figures['tpot_percentiles_ms']['p99']:.0f}",
        price,
        f"{_seconds(ttft['p50'])}/{_seconds(ttft['p99'])}",
        f"{figures['gpu_busy_share']:.0%}/{figures['cpu_busy_share']:.0%}",
    ]


def _seconds(ms: float) -> str:
    return f"{ms / 1e3:.1f}" if ms < 1e5 else f"{ms / 1e3:.0f}"
