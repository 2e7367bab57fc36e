"""The results of a simulation, for people and for programs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from neo_desktop.app.simulate.machine import USUAL_MODELS, Machine
from neo_desktop.app.words import duration
from neo_desktop.engine.simulation.metrics import SimulationResult
from neo_desktop.engine.simulation.presets import GPUS, HOSTS
from neo_desktop.engine.simulation.workload import WorkloadRequest

BASELINE, OFFLOADING = "gpu-only", "auto"
_WORTH_IT = 1.05  # less is within the error of a prediction
_SAME = 0.005
_SPOKEN_WITH_A_VOWEL = "AEFHILMNORSX"  # letter by letter: an RTX 3060, an L4, a T4
# Two lines each, so that the table fits 80 columns.
_COLUMNS = (
    *("policy", "output\ntokens/s", "gain", "of\nbound", "TPOT, ms\nmean/p99"),
    *("price in\nTPOT", "TTFT, s\np50/p99", "busy\nGPU/CPU"),
)


@dataclass(frozen=True, slots=True)
class SimulationReport:
    machine: Machine
    requests: tuple[WorkloadRequest, ...]
    results: dict[str, SimulationResult]
    bound_output_tokens_per_s: float  # upper bound of every policy on this machine, without drafts
    acceptance: float = 0.0  # probability that a drafted token is right; 0: no drafts

    @property
    def arriving(self) -> str:
        """The arrival of requests, after "when"."""
        count, span_s = len(self.requests), self.requests[-1].arrival_ms / 1e3
        return f"{count:,} chats come {f'within {span_s:,.0f} s' if span_s else 'at once'}"

    def to_json(self) -> dict[str, Any]:
        return {
            "policies": {
                name: result.to_json()
                | {
                    "bound_output_tokens_per_s": self.bound_output_tokens_per_s,
                    "bound_share": self._share(result),
                    "gpu_cache_tokens": self.machine.budget.gpu_tokens,
                    "cpu_cache_tokens": self.machine.budget.cpu_tokens,
                }
                for name, result in self.results.items()
            }
        }

    def print(self, console: Console) -> None:
        """Print the answer, a row per policy, what cannot run, and what was assumed."""
        console.print(answer(self), style="bold", highlight=False, markup=False)
        console.print()
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
        for result in self.results.values():
            table.add_row(*self._row(result))
        console.print(table)
        for note in self._refusals():
            console.print(f"\n{note}", highlight=False, markup=False)
        console.print(
            f"\n{'Without drafts, no' if self.acceptance else 'No'} policy can exceed "
            f"{self.bound_output_tokens_per_s:,.0f} output tokens/s. TTFT: time to "
            "the first token; TPOT: time per further token, as one chat sees it.\n\n"
            "Assumed, a prediction and not a measurement:",
            highlight=False,
        )
        assumed = Table.grid(padding=(0, 2, 0, 0))
        for name, text in self._assumed():
            assumed.add_row(f"  {name}", text)
        console.print(assumed, highlight=False, markup=False)

    def _refusals(self) -> Iterator[str]:
        """Yield how many requests some policies cannot run, and why."""
        context = self.machine.config.max_context_tokens
        for result in self.results.values():
            if result.num_refused:
                holder = "the model's context" if result.longest_tokens == context else "any of its caches"
                count = f"{result.num_refused:,} of {len(self.requests):,} requests"
                yield f"{result.policy} cannot run {count}: {result.longest_tokens:,} tokens fit {holder}."

    def _share(self, result: SimulationResult) -> float:
        bound = self.bound_output_tokens_per_s
        return result.output_tokens_per_s / bound if bound else 0.0

    def _row(self, result: SimulationResult) -> list[str]:
        if not result.finished:
            return [result.policy, "cannot run", *["-"] * (len(_COLUMNS) - 2)]
        figures, baseline = result.to_json(), self.results.get(BASELINE)
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
            f"{self._share(result):.0%}",
            f"{tpot_ms:.0f}/{figures['tpot_percentiles_ms']['p99']:.0f}",
            price,
            f"{_seconds(ttft['p50'])}/{_seconds(ttft['p99'])}",
            f"{figures['gpu_busy_share']:.0%}/{figures['cpu_busy_share']:.0%}",
        ]

    def _assumed(self) -> Iterator[tuple[str, str]]:
        machine, count = self.machine, len(self.requests)
        gpu, host, budget = machine.gpu, machine.host, machine.budget
        source = "vendor's datasheet" if GPUS[gpu.name] == gpu else "with your memory"
        rates = f"{gpu.tensor_flops / 1e12:.3g} TFLOP/s, bus {gpu.bus_bytes_per_s / 1e9:.3g} GB/s"
        yield "GPU", f"{gpu.title}: {_memory(gpu.memory_bytes, gpu.memory_bytes_per_s)}, {rates} ({source})"
        source = "datasheet; --cpu takes another" if HOSTS[host.name] == host else "with your memory"
        memory = _memory(host.memory_bytes, host.memory_bytes_per_s)
        yield "host", f"{host.name}: {memory}, {host.cores} cores ({source})"
        dtype = str(machine.dtype).removeprefix("torch.")
        config, form = machine.config, machine.form
        weights = config.weight_bytes(machine.dtype, form) + config.table_bytes(machine.dtype, form)
        chosen = ""
        if machine.model_was_chosen:
            chosen = f"; the largest of {', '.join(USUAL_MODELS)} that leaves room, --model takes another"
        yield "model", f"{machine.model} in {dtype}, {weights / 1e9:.1f} GB{chosen}"
        prompt = sum(request.prompt_tokens for request in self.requests) / count
        output = sum(request.output_tokens for request in self.requests) / count
        yield (
            "requests",
            f"{count:,}, {prompt:,.0f} tokens in and {output:,.0f} out on average, "
            f"{self.arriving.partition(' come ')[2]}; --input, --output, --requests, --rate take others",
        )
        if self.acceptance:
            right = f"each token is right with a probability of {self.acceptance:.0%}"
            yield "drafts", f"{right}, and making them takes no time"
        gpu_tokens, cpu_tokens = f"{budget.gpu_tokens:,} tokens", f"{budget.cpu_tokens:,}"
        yield "KV", f"{gpu_tokens} in GPU memory (GPU-cache), {cpu_tokens} in host memory (CPU-cache)"
        if budget.num_states is not None:
            each = f"{machine.config.state_bytes / 1e6:.3g} MB each, for recurrent layers"
            yield "states", f"{budget.num_states} of {each}: {budget.most_requests} requests run at a time"
        if machine.divided is not None and machine.divided.plan.is_split:
            plan, most = machine.divided.plan, machine.divided.bound_tokens_per_s
            yield (
                "weights",
                f"{plan.gpu_bytes / 1e9:.1f} GB in GPU memory, {plan.host_bytes / 1e9:.1f} GB in host "
                "memory, computed by CPU and GPU together: reading them bounds one chat to "
                f"{most:,.3g} tokens/s",
            )


def answer(report: SimulationReport) -> str:
    """Return the gain of offloading and its cost, in one or two sentences."""
    machine, results, when = report.machine, report.results, report.arriving
    model, where = machine.model, _where(machine)
    old, new = results.get(BASELINE), results.get(OFFLOADING)
    if old is None or new is None:
        one = next(iter(results.values()))
        if not one.finished:
            return f"{where}, {model} cannot run this under {one.policy}."
        return (
            f"{where}, {model} writes {_rate(one)} output tokens per second under {one.policy} when {when}: "
            f"{_pace(one)}."
        )
    if not new.finished and not old.finished:
        return f"{where}, {model} cannot run this, with or without offloading."
    if old.num_refused != new.num_refused:  # some requests have room in host memory only
        total, more = len(report.requests), len(new.finished)
        found = f"offloading lets {model} run {more:,} of {total:,} requests instead of {len(old.finished):,}"
        if not old.finished and more == total:
            found = f"only offloading lets {model} run this"
        return f"{where}, {found}: {_rate(new)} output tokens per second when {when}; {_pace(new)}."
    gain = new.output_tokens_per_s / old.output_tokens_per_s
    if abs(gain - 1) < _SAME:
        fits = sum(request.total_tokens for request in report.requests) <= machine.budget.gpu_tokens
        why = ", because GPU memory has room for all of them" if fits else ""
        return (
            f"{where}, offloading changes nothing for {model} when {when}{why}: {_rate(new)} output "
            f"tokens per second with and without it; {_pace(new)}."
        )
    if gain >= _WORTH_IT:
        found = f"offloading makes {model} {gain:.1f}x as fast"
    elif gain > 1 / _WORTH_IT:
        found = f"offloading changes little for {model}"
    else:
        found = f"offloading slows {model} down to {gain:.2f}x"
    return (
        f"{where}, {found} when {when}: {_rate(new)} instead of {_rate(old)} output tokens per second. Each "
        f"chat gets its tokens at {_tpot(new)} instead of {_tpot(old)}, its first one after {_ttft(new)} "
        f"instead of {_ttft(old)}."
    )


def _where(machine: Machine) -> str:
    gpu, host = machine.gpu, machine.host
    memory = host.title
    if HOSTS[host.name] != host:
        memory = f"main memory of {_memory(host.memory_bytes, host.memory_bytes_per_s)}"
    own = "" if GPUS[gpu.name] == gpu else f" of {gpu.memory_bytes / 2**30:.4g} GiB"
    return f"On {'an' if gpu.title[0] in _SPOKEN_WITH_A_VOWEL else 'a'} {gpu.title}{own} with {memory}"


def _memory(num_bytes: float, bytes_per_s: float) -> str:
    return f"{num_bytes / 2**30:.4g} GiB at {bytes_per_s / 1e9:,.0f} GB/s"


def _rate(result: SimulationResult) -> str:
    rate = result.output_tokens_per_s
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _pace(result: SimulationResult) -> str:
    return f"each chat gets its tokens at {_tpot(result)}, its first one after {_ttft(result)}"


def _tpot(result: SimulationResult) -> str:
    return duration(result.to_json()["tpot_ms"])


def _ttft(result: SimulationResult) -> str:
    return duration(result.to_json()["ttft_ms"]["p50"])


def _seconds(ms: float) -> str:
    return f"{ms / 1e3:.1f}" if ms < 1e5 else f"{ms / 1e3:.0f}"
