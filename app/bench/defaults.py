"""What is measured when nobody says what."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from neo_desktop import native
from neo_desktop.app.bench.cost_model import CostModelOptions
from neo_desktop.app.bench.cpu_attention.options import CpuAttentionOptions
from neo_desktop.app.bench.gpu import GpuOptions
from neo_desktop.app.bench.hardware import HardwareOptions
from neo_desktop.app.bench.load import LoadOptions
from neo_desktop.app.bench.run import SuiteOptions
from neo_desktop.app.bench.throughput import ThroughputOptions
from neo_desktop.app.model_options import ModelOptions
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.profiling.budget import MemoryCaps
from neo_desktop.engine.profiling.hardware import host_memory
from neo_desktop.models.shapes import shape

# The largest whose weights leave room is measured: offloading is for models that nearly fill a GPU.
_GPU_SHAPES = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b", "qwen2.5-0.5b")
_CPU_SHAPE = "qwen2.5-0.5b"
_CPU_CORES = 8  # with fewer, a model of this size would take minutes
_GPU_SHARE = 0.75  # of the free memory, for weights
_HOST_SHARE = 0.25


def default_model(device: str, gpu_memory_gib: float | None = None) -> str | None:
    """Return the shape that suits this computer and a cap; None: only the built-in model does."""
    if choose_device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        free = min(free, MemoryCaps.from_gib(gpu_memory_gib, None).gpu_bytes or free)
        fitting = [
            name for name in _GPU_SHAPES if shape(name).weight_bytes(torch.float16) <= _GPU_SHARE * free
        ]
        return fitting[0] if fitting else None
    needed = shape(_CPU_SHAPE).weight_bytes(torch.float32)
    fits = needed <= _HOST_SHARE * host_memory().available_bytes
    return _CPU_SHAPE if fits and native.num_usable_cpus() >= _CPU_CORES else None


def suite_options(
    model: ModelOptions,
    *,
    quick: bool,
    cpu_attention: Mapping[str, Any],
    throughput: Mapping[str, Any],
    load: Mapping[str, Any],
) -> SuiteOptions:
    """Return what each suite is asked to do.

    Args:
        model: for all suites that need one.
        quick: for a self-test of all suites, in about three minutes.
        cpu_attention: settings that differ from the defaults; the others likewise.

    Raises:
        ValueError: a setting makes no sense.
    """
    of_model = asdict(model)
    suites = SuiteOptions(
        gpu_slice=model.gpu_slice,
        hardware=HardwareOptions(gpu_slice=model.gpu_slice),
        gpu=GpuOptions(**of_model),
        cost_model=CostModelOptions(**of_model),
        throughput=ThroughputOptions(**of_model),
        load=LoadOptions(**of_model),
    )
    if quick:
        on_gpu = choose_device(model.device).type == "cuda"
        suites = replace(
            suites,
            hardware=replace(suites.hardware, seconds=15.0),
            cpu_attention=CpuAttentionOptions(
                head_dims=(128,), context_tokens=(512, 8192), seconds=15.0, rival_seconds=12.0
            ),
            gpu=replace(
                suites.gpu,
                batches=(1, 8, 32) if on_gpu else (1, 4),
                context_tokens=512 if on_gpu else 64,  # a CPU alone takes a second for a hundred tokens
                seconds=20.0,
            ),
            cost_model=replace(suites.cost_model, points=12, rounds=5, seconds=20.0),
            throughput=replace(suites.throughput, seconds=40.0),
            load=replace(suites.load, seconds=3.0, load_shares=(0.5, 0.75, 1.0)),
        )
    return replace(
        suites,
        cpu_attention=replace(suites.cpu_attention, **cpu_attention),
        throughput=replace(suites.throughput, **throughput),
        load=replace(suites.load, **load),
    )
