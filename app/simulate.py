"""The body of `neo-desktop simulate`: from options to a workload, a machine and a report."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from neo_desktop.engine.loading import DTYPES, model_folder
from neo_desktop.engine.placement import POLICIES
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling.budget import BLOCK_SIZE
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.analytic import KVBudget, analytic_cost_model, kv_budget
from neo_desktop.engine.simulation.bound import Bound
from neo_desktop.engine.simulation.metrics import SimulationResult
from neo_desktop.engine.simulation.presets import GpuPreset, HostPreset, get_gpu, get_host
from neo_desktop.engine.simulation.reality import Mismatch
from neo_desktop.engine.simulation.simulator import simulate
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace, synthetic, with_rate
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.shapes import SHAPES, shape

BASELINE = "gpu-only"

Progress = Callable[[float, str], None]  # share done, 0 to 1; what runs


class UsageError(ValueError):
    """Options that make no sense, alone or together."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What the command line asks for; None: not given."""

    gpu: str | None = None
    cpu: str | None = None
    tables: Path | None = None
    model: str = "llama-2-7b"
    dtype: str = "float16"
    trace: Path | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    num_requests: int | None = None
    rate: float | None = None
    seed: int = 0
    policy: str | None = None
    gpu_cache_tokens: int | None = None
    cpu_cache_tokens: int | None = None
    max_context_tokens: int | None = None
    max_batch_tokens: int = 2048
    max_batch_requests: int = 256
    gpu_slowdown: float = 1.0
    cpu_slowdown: float = 1.0
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """One or several policies on one machine and workload."""

    machine: str
    workload: str
    budget: KVBudget
    results: dict[str, SimulationResult]
    bound_output_tokens_per_s: float  # what no policy can exceed on this machine

    def to_json(self) -> dict[str, Any]:
        """Plain data: `{"policies": {name: figures}}`, units in the names."""
        return {
            "policies": {
                name: result.to_json()
                | {
                    "bound_output_tokens_per_s": self.bound_output_tokens_per_s,
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
        """Print the machine, the workload and a row per policy."""
        console.print(f"{self.machine}\n{self.workload}", highlight=False)
        console.print(
            f"GPU-cache {self.budget.gpu_tokens:,} tokens, CPU-cache {self.budget.cpu_tokens:,} tokens; no "
            f"policy can exceed {self.bound_output_tokens_per_s:,.0f} output tokens/s",
            highlight=False,
        )
        baseline = self.results.get(BASELINE)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
        for result in self.results.values():
            table.add_row(*_row(result, baseline))
        console.print(table)
        for name, result in self.results.items():
            if result.num_refused:
                console.print(
                    f"{name}: {result.num_refused} of {result.num_refused + len(result.finished)} requests "
                    "refused, since they can never fit (--max-context-tokens refuses them everywhere)",
                    highlight=False,
                    soft_wrap=True,
                )


# Two lines each, so that the table fits 80 columns.
_COLUMNS = (
    "policy",
    "output\ntokens/s",
    "gain",
    "TTFT, s\np50/p99",
    "TPOT, ms\nmean/p99",
    "mean\nbatch",
    "busy\nGPU/CPU",
    "moves/\npreempts",
)


def _row(result: SimulationResult, baseline: SimulationResult | None) -> list[str]:
    figures = result.to_json()
    base = baseline.output_tokens_per_s if baseline else 0.0
    ttft = figures["ttft_ms"]
    return [
        result.policy,
        f"{result.output_tokens_per_s:,.1f}",
        f"{result.output_tokens_per_s / base:.2f}x" if base else "-",
        f"{_seconds(ttft['p50'])}/{_seconds(ttft['p99'])}",
        f"{figures['tpot_ms']:.0f}/{figures['tpot_percentiles_ms']['p99']:.0f}",
        f"{figures['mean_batch']:.1f}",
        f"{figures['gpu_busy_share']:.0%}/{figures['cpu_busy_share']:.0%}",
        f"{figures['num_moves']}/{figures['num_preemptions']}",
    ]


def _seconds(ms: float) -> str:
    return f"{ms / 1e3:.1f}" if ms < 1e5 else f"{ms / 1e3:.0f}"


def run_simulation(options: SimulationOptions, progress: Progress) -> SimulationReport:
    """Simulate the workload under every policy, or the one that is named.

    Raises:
        UsageError: the options make no sense.
        WorkloadError: the trace is malformed.
        ValueError: the tables are.
        MemoryError: the model does not fit the GPU.
        OSError: a file cannot be read.
    """
    config = _model(options.model)
    dtype = DTYPES[options.dtype]
    limits = _limits(options)
    requests = _workload(options)
    if options.policy is not None and options.policy not in POLICIES:
        raise UsageError(f"there is no policy {options.policy!r}: choose one of {', '.join(POLICIES)}")
    mismatch = _mismatch(options)
    gpu, host = _machine(options)
    cost = _cost_model(options, gpu, host, config, dtype)
    budget = _budget(options, gpu, host, config, dtype, limits)
    context = min(options.max_context_tokens or config.max_context_tokens, config.max_context_tokens)
    names = [options.policy] if options.policy else list(POLICIES)
    results = {}
    for index, name in enumerate(names):

        def report(done: int, total: int, index: int = index, name: str = name) -> None:
            progress((index + done / total) / len(names), name)

        results[name] = simulate(
            requests,
            POLICIES[name],
            cost,
            budget.num_blocks(),
            BLOCK_SIZE,
            limits,
            max_context_tokens=context,
            mismatch=mismatch,
            seed=options.seed,
            progress=report,
        )
    fitting = [r for r in requests if r.total_tokens <= context]
    return SimulationReport(
        machine=_describe_machine(options, gpu, host, cost),
        workload=_describe_workload(options, requests),
        budget=budget,
        results=results,
        bound_output_tokens_per_s=Bound(cost, fitting, budget.gpu_tokens).output_tokens_per_s()
        if fitting
        else 0.0,
    )


def _model(name: str) -> ModelConfig:
    if name in SHAPES:
        return shape(name)
    folder = model_folder(name)
    if folder.is_dir():
        return ModelConfig.from_pretrained(folder)
    raise UsageError(f"{name!r} is neither a shape nor a model folder: choose one of {', '.join(SHAPES)}")


def _limits(options: SimulationOptions) -> SchedulerLimits:
    try:
        return SchedulerLimits(options.max_batch_tokens, options.max_batch_requests)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _mismatch(options: SimulationOptions) -> Mismatch | None:
    factors = (options.gpu_slowdown, options.cpu_slowdown, options.noise)
    try:
        return None if factors == (1.0, 1.0, 0.0) else Mismatch(*factors)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _workload(options: SimulationOptions) -> list[WorkloadRequest]:
    lengths = (options.input_tokens, options.output_tokens)
    if options.trace is not None:
        if lengths != (None, None):
            raise UsageError("give either --trace or --input and --output, not both")
        requests = load_trace(options.trace)[: options.num_requests]
    elif None in lengths:
        raise UsageError("no workload: give --trace FILE, or --input N and --output N for a synthetic one")
    else:
        assert options.input_tokens is not None
        assert options.output_tokens is not None
        requests = synthetic(
            options.num_requests or 200, options.input_tokens, options.output_tokens, options.seed
        )
    if options.rate is None:
        return requests
    try:
        return with_rate(requests, options.rate, options.seed)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _machine(options: SimulationOptions) -> tuple[GpuPreset | None, HostPreset | None]:
    if options.gpu is None and options.tables is None:
        raise UsageError("no machine: give --gpu NAME, or --tables FILE with measured cost tables")
    try:
        gpu = None if options.gpu is None else get_gpu(options.gpu)
        host_name = options.cpu or (gpu.host if gpu else None)
        return gpu, None if host_name is None else get_host(host_name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _cost_model(
    options: SimulationOptions,
    gpu: GpuPreset | None,
    host: HostPreset | None,
    config: ModelConfig,
    dtype: torch.dtype,
) -> TableCostModel:
    if options.tables is None:
        assert gpu is not None
        assert host is not None
        return analytic_cost_model(gpu, host, config, dtype)
    try:
        data = json.loads(options.tables.read_text(encoding="utf-8"))
        tables = data.get("tables", data) if isinstance(data, dict) else {}  # a profile has more around them
        cost = TableCostModel.from_json(tables)
    except ValueError as error:
        raise ValueError(f"{options.tables}: {error}") from None
    if cost.num_layers != config.num_layers:
        raise UsageError(
            f"{options.tables} was measured with a model of {cost.num_layers} layers, but {options.model} "
            f"has {config.num_layers}: name the same model with --model"
        )
    return cost


def _budget(
    options: SimulationOptions,
    gpu: GpuPreset | None,
    host: HostPreset | None,
    config: ModelConfig,
    dtype: torch.dtype,
    limits: SchedulerLimits,
) -> KVBudget:
    gpu_tokens, cpu_tokens = options.gpu_cache_tokens, options.cpu_cache_tokens
    if gpu_tokens is None or cpu_tokens is None:
        if gpu is None or host is None:
            raise UsageError("without --gpu, --gpu-cache-tokens and --cpu-cache-tokens must say what fits")
        derived = kv_budget(gpu, host, config, dtype, limits)
        gpu_tokens = derived.gpu_tokens if gpu_tokens is None else gpu_tokens
        cpu_tokens = derived.cpu_tokens if cpu_tokens is None else cpu_tokens
    return KVBudget(gpu_tokens, cpu_tokens)


def _describe_machine(
    options: SimulationOptions, gpu: GpuPreset | None, host: HostPreset | None, cost: TableCostModel
) -> str:
    if options.tables is not None or gpu is None or host is None:
        return f"Cost tables of {options.tables}, {options.model}, {cost.num_layers} layers"
    return (
        f"{gpu.name} ({gpu.multiprocessors} SMs, {gpu.memory_bytes / 1e9:.1f} GB at "
        f"{gpu.memory_bytes_per_s / 1e9:.0f} GB/s, {gpu.tensor_flops / 1e12:.0f} TFLOP/s), {host.name} "
        f"({host.cores} cores, {host.memory_bytes_per_s / 1e9:.0f} GB/s), {options.model} in {options.dtype}"
    )


def _describe_workload(options: SimulationOptions, requests: list[WorkloadRequest]) -> str:
    count = len(requests)
    prompt = sum(request.prompt_tokens for request in requests) / count
    output = sum(request.output_tokens for request in requests) / count
    span_s = requests[-1].arrival_ms / 1e3
    name = "Synthetic" if options.trace is None else options.trace.name
    arriving = f"within {span_s:,.0f} s" if span_s else "all at once"
    return f"{name}: {count:,} requests, {prompt:.0f} tokens in and {output:.0f} out on average, {arriving}"
