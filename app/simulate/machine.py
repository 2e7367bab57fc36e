"""The machine that is asked for, and the model that suits it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from typer import BadParameter

from neo_desktop.app.simulate.options import SimulationOptions
from neo_desktop.app.simulate.traced_shapes import TRACED_SHAPES
from neo_desktop.engine.loading import gpu_form, model_path
from neo_desktop.engine.mtp import Layer, plan_beside
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.weight_plan import WeightPlan
from neo_desktop.engine.profiling.budget import FreeMemory
from neo_desktop.engine.profiling.weight_memory import QUANTISATIONS, plan_memory
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.analytic import KVBudget, analytic_cost_model, bytes_read, kv_budget
from neo_desktop.engine.simulation.divided import DividedWeights, machine_rates
from neo_desktop.engine.simulation.machine import GIB, GpuPreset, HostPreset
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.registry import check_model
from neo_desktop.models.shapes import SHAPES, shape
from neo_desktop.models.stored_form import stored_form, uniform_form

PUBLISHED: Mapping[str, ModelConfig] = {**SHAPES, **TRACED_SHAPES}

# The default models: well known, from large to small.
USUAL_MODELS = ("qwen3-14b", "llama-3.1-8b", "qwen3-4b", "llama-3.2-3b", "qwen3-1.7b", "qwen2.5-0.5b")
ENOUGH_TOKENS = 4096  # of KV in GPU memory: less, and the GPU alone could not even run a few chats


@dataclass(frozen=True, slots=True)
class Machine:
    gpu: GpuPreset
    host: HostPreset
    model: str
    model_was_chosen: bool  # by us
    config: ModelConfig
    form: WeightFormat  # of its matrices
    dtype: torch.dtype
    cost: TableCostModel
    budget: KVBudget
    divided: DividedWeights | None  # None: all weights are in GPU memory


def machine(options: SimulationOptions, limits: SchedulerLimits) -> Machine:
    """Put the machine together.

    Raises BadParameter: the options make no sense; MemoryError: the model does not fit; OSError.
    """
    gpu, host = _gpu_and_host(options)
    name = options.model or _usual_model(gpu, host, limits)
    config, form, layer = _config(name)
    # As the engine chooses on a GPU.
    is_float16 = config.dtype is torch.bfloat16 and not gpu.has_bfloat16
    dtype = torch.float16 if is_float16 else config.dtype
    rates, device = machine_rates(gpu, host, config), torch.device("cuda")
    free = FreeMemory(host.memory_bytes, gpu.memory_bytes)
    engine = EngineOptions(
        max_batch_tokens=limits.max_batch_tokens,
        max_batch_requests=limits.max_batch_requests,
        policy=options.policy or "auto",
    )

    def planned(options: EngineOptions, free: FreeMemory) -> WeightPlan | None:
        return plan_memory(config, form, dtype, device, options, lambda: rates, free)

    try:
        if layer is not None:
            with suppress(MemoryError):  # it is not used
                free = plan_beside(layer, dtype, device, engine, free, planned).free
        own_gpu = replace(gpu, memory_bytes=free.device_bytes)  # without the layer's memory
        own_host = replace(host, memory_bytes=free.host_bytes)
        plan = planned(engine, free)
        divided = DividedWeights.of(plan, rates, config, form, dtype)
        is_split = divided is not None and divided.plan.is_split
        budget = kv_budget(own_gpu, own_host, config, dtype, limits, form, plan if is_split else None)
    except MemoryError as error:
        if options.model is None:
            raise
        raise MemoryError(f"{error} ({_usual_model(gpu, host, limits)} would leave room)") from None
    cost = analytic_cost_model(gpu, host, config, dtype, bytes_read(config, dtype, form), divided)
    return Machine(gpu, host, name, options.model is None, config, form, dtype, cost, budget, divided)


def _gpu_and_host(options: SimulationOptions) -> tuple[GpuPreset, HostPreset]:
    if options.gpu is None:
        raise BadParameter("name a GPU, such as rtx-3060; --list shows all", param_hint="--gpu")
    try:
        gpu = get_gpu(options.gpu)
    except ValueError as error:
        raise BadParameter(str(error), param_hint="--gpu") from None
    try:
        host = get_host(options.cpu or gpu.host)
    except ValueError as error:
        raise BadParameter(str(error), param_hint="--cpu") from None
    if options.gpu_memory_gib is not None:
        gpu = replace(gpu, memory_bytes=int(options.gpu_memory_gib * GIB))
    if options.cpu_memory_gib is not None:
        host = replace(host, memory_bytes=int(options.cpu_memory_gib * GIB))
    return gpu, host


def _usual_model(gpu: GpuPreset, host: HostPreset, limits: SchedulerLimits) -> str:
    """Return the largest that leaves room; if none does, the smallest, so that the error names it."""
    for name in USUAL_MODELS:
        try:
            if kv_budget(gpu, host, shape(name), torch.float16, limits).gpu_tokens >= ENOUGH_TOKENS:
                return name
        except MemoryError:
            continue
    return USUAL_MODELS[-1]


def _config(name: str) -> tuple[ModelConfig, WeightFormat, Layer | None]:
    """Return a model's configuration, format of matrices, and layer of multi-token prediction."""
    if name in PUBLISHED:
        return PUBLISHED[name], gpu_form(DENSE), None
    published, _, quantisation = name.partition(":")
    if published in PUBLISHED:
        if quantisation not in QUANTISATIONS:
            raise BadParameter(
                f"{quantisation!r} is no quantisation: choose one of {', '.join(QUANTISATIONS)}",
                param_hint="--model",
            )
        config = PUBLISHED[published]
        return config, gpu_form(uniform_form(config, QUANTISATIONS[quantisation])), None
    path = model_path(name)
    if path.exists():
        checkpoint = open_checkpoint(path)
        config = checkpoint.config()
        weights = check_model(checkpoint, config)
        form = gpu_form(stored_form(weights, config))
        return config, form, Layer.of(checkpoint, config, weights)
    raise BadParameter(
        f"{name!r} is neither a shape nor a model folder: choose one of {', '.join(PUBLISHED)}",
        param_hint="--model",
    )
