"""The machine that is asked for: presets, or a person's own figures, and the model that suits it."""

from dataclasses import dataclass

import torch

from neo_desktop.app.commands.simulate_command import SimulationOptions, UsageError
from neo_desktop.app.simulate.fleet import Fleet
from neo_desktop.app.simulate.own import blank_gpu, check_own, own_gpu, own_host, read_gpu, read_object
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.loading import DTYPES, model_path
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.profiling.budget import QUANTISATIONS, FreeMemory
from neo_desktop.engine.profiling.weight_memory import plan_memory
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.analytic import KVBudget, analytic_cost_model, bytes_read, kv_budget
from neo_desktop.engine.simulation.divided import DividedWeights, machine_rates
from neo_desktop.engine.simulation.machine import GpuPreset, HostPreset
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import LinearForm
from neo_desktop.models.registry import check_model
from neo_desktop.models.shapes import SHAPES, shape
from neo_desktop.models.stored_form import stored_form, uniform_form

# What is taken where nobody says which model: well known, from large to small.
USUAL_MODELS = ("qwen3-14b", "llama-3.1-8b", "qwen3-4b", "llama-3.2-3b", "qwen3-1.7b", "qwen2.5-0.5b")
ENOUGH_TOKENS = 4096  # of KV in GPU memory: less, and the GPU alone could not even run a few chats
_TABLES_MODEL = "llama-2-7b"  # of tables that say nothing about their model


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the workload runs."""

    gpu: GpuPreset | None  # None: measured tables stand for both
    host: HostPreset | None
    model: str
    model_was_chosen: bool  # by us
    config: ModelConfig
    form: LinearForm  # of its matrices
    dtype: torch.dtype
    cost: TableCostModel
    budget: KVBudget
    divided: DividedWeights | None = None
    fleet: Fleet | None = None  # attention workers; None: the host attends


def machine(options: SimulationOptions, limits: SchedulerLimits) -> Machine:
    """Put the machine together.

    Raises:
        UsageError: the options make no sense.
        ValueError: tables or the model's files are malformed.
        MemoryError: the model does not fit the GPU.
        OSError: a file cannot be read.
    """
    gpu, host = _gpu_and_host(options)
    name = options.model or (_usual_model(gpu, host, limits) if gpu and host else _TABLES_MODEL)
    config, form = _config(name)
    dtype = _dtype(options, config, gpu)
    try:
        divided = _divided(options, gpu, host, config, dtype, limits, form)
        budget = _budget(options, gpu, host, config, dtype, limits, form, divided)
    except MemoryError as error:
        if options.model is None or gpu is None or host is None:
            raise
        raise MemoryError(f"{error} ({_usual_model(gpu, host, limits)} would leave room)") from None
    cost = _cost_model(options, gpu, host, name, config, dtype, form, divided)
    return Machine(gpu, host, name, options.model is None, config, form, dtype, cost, budget, divided)


def _gpu_and_host(options: SimulationOptions) -> tuple[GpuPreset | None, HostPreset | None]:
    check_own(options)
    gpu = _gpu(options)
    try:
        named = options.cpu or (gpu.host if gpu else None)
        host = None if named is None else get_host(named)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return gpu, host and own_host(host, options)


def _gpu(options: SimulationOptions) -> GpuPreset | None:
    stated = {
        "--gpu-memory": options.gpu_memory_gib,
        "--gpu-bandwidth": options.gpu_bandwidth_gb_per_s,
        "--gpu-tflops": options.gpu_tflops,
    }
    if options.gpu is not None and options.gpu_json is not None:
        raise UsageError("give either --gpu or --gpu-json, not both")
    if options.gpu is not None:
        try:
            base = get_gpu(options.gpu)
        except ValueError as error:
            raise UsageError(str(error)) from None
    elif options.gpu_json is not None:
        base = read_gpu(options.gpu_json)
    elif any(value is not None for value in stated.values()):
        missing = [flag for flag, value in stated.items() if value is None]
        if missing:
            raise UsageError(
                f"a GPU of your own also needs {' and '.join(missing)}; or name a card with --gpu and change "
                "some of its figures"
            )
        base = blank_gpu()
    elif options.tables is None:
        raise UsageError(
            "no machine: give --gpu NAME (--list shows all, rtx-3060 is one), your own figures, or --tables "
            "FILE with measured cost tables"
        )
    else:
        return None
    return own_gpu(base, options)


def _usual_model(gpu: GpuPreset, host: HostPreset, limits: SchedulerLimits) -> str:
    """Return the largest that leaves room; if none does, the smallest, so that the error names it."""
    for name in USUAL_MODELS:
        try:
            if kv_budget(gpu, host, shape(name), torch.float16, limits).gpu_tokens >= ENOUGH_TOKENS:
                return name
        except MemoryError:
            continue
    return USUAL_MODELS[-1]


def _config(name: str) -> tuple[ModelConfig, LinearForm]:
    if name in SHAPES:
        return shape(name), DENSE
    published, _, quantisation = name.partition(":")
    if published in SHAPES:
        if quantisation not in QUANTISATIONS:
            raise UsageError(f"{quantisation!r} is no quantisation: choose one of {', '.join(QUANTISATIONS)}")
        config = shape(published)
        return config, uniform_form(config, QUANTISATIONS[quantisation]).on_gpu(dispatch)
    path = model_path(name)
    if path.exists():
        checkpoint = open_checkpoint(path)
        config = checkpoint.config()
        return config, stored_form(check_model(checkpoint, config), config).on_gpu(dispatch)
    raise UsageError(f"{name!r} is neither a shape nor a model folder: choose one of {', '.join(SHAPES)}")


def _dtype(options: SimulationOptions, config: ModelConfig, gpu: GpuPreset | None) -> torch.dtype:
    """As the engine chooses on a GPU."""
    has_bfloat16 = gpu is None or gpu.has_bfloat16
    if options.dtype == "auto":
        return torch.float16 if config.dtype is torch.bfloat16 and not has_bfloat16 else config.dtype
    if options.dtype == "bfloat16" and gpu is not None and not has_bfloat16:
        raise UsageError(f"the {gpu.title} has no bfloat16: leave --dtype out, or take float16")
    return DTYPES[options.dtype]


def _divided(
    options: SimulationOptions,
    gpu: GpuPreset | None,
    host: HostPreset | None,
    config: ModelConfig,
    dtype: torch.dtype,
    limits: SchedulerLimits,
    form: LinearForm,
) -> DividedWeights | None:
    """Return what the engine would do with weights on such a machine; see `DividedWeights.of`."""
    if options.tables is not None or gpu is None or host is None:
        if options.gpu_weights_gib is not None:
            raise UsageError("--gpu-weights needs a machine from datasheets: measured tables have their own")
        return None
    rates = machine_rates(gpu, host)
    try:
        engine = EngineOptions(
            gpu_weights_gib=options.gpu_weights_gib,
            gpu_cache_tokens=options.gpu_cache_tokens,
            max_batch_tokens=limits.max_batch_tokens,
            max_batch_requests=limits.max_batch_requests,
            policy=options.policy if options.policy in POLICIES else "auto",
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    free = FreeMemory(host.memory_bytes, gpu.memory_bytes)
    plan = plan_memory(config, form, dtype, torch.device("cuda"), engine, lambda: rates, free)
    return DividedWeights.of(plan, rates, config, form, dtype)


def _cost_model(
    options: SimulationOptions,
    gpu: GpuPreset | None,
    host: HostPreset | None,
    model: str,
    config: ModelConfig,
    dtype: torch.dtype,
    form: LinearForm,
    divided: DividedWeights | None,
) -> TableCostModel:
    if options.tables is None:
        assert gpu is not None
        assert host is not None
        return analytic_cost_model(gpu, host, config, dtype, bytes_read(config, dtype, form), divided)
    try:
        data = read_object(options.tables)
        cost = TableCostModel.from_json(data.get("tables", data))  # a profile has more around them
    except UsageError:
        raise
    except ValueError as error:
        raise ValueError(f"{options.tables}: {error}") from None
    if cost.num_layers != config.num_layers:
        raise UsageError(
            f"{options.tables} was measured with a model of {cost.num_layers} layers, but {model} "
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
    form: LinearForm,
    divided: DividedWeights | None,
) -> KVBudget:
    gpu_tokens, cpu_tokens = options.gpu_cache_tokens, options.cpu_cache_tokens
    if gpu_tokens is None or cpu_tokens is None:
        if gpu is None or host is None:
            raise UsageError("without --gpu, --gpu-cache-tokens and --cpu-cache-tokens must say what fits")
        plan = divided.plan if divided is not None and divided.plan.is_split else None
        derived = kv_budget(gpu, host, config, dtype, limits, form, plan)
        gpu_tokens = derived.gpu_tokens if gpu_tokens is None else gpu_tokens
        cpu_tokens = derived.cpu_tokens if cpu_tokens is None else cpu_tokens
    return KVBudget(gpu_tokens, cpu_tokens)
