"""What is measured when nobody says what."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from neo_desktop.app.bench.computer import Probe, Prober
from neo_desktop.app.bench.cost_model import CostModelOptions
from neo_desktop.app.bench.gpu import GpuOptions
from neo_desktop.app.bench.hardware import HardwareOptions
from neo_desktop.app.bench.load import LoadOptions
from neo_desktop.app.bench.run import SuiteOptions
from neo_desktop.app.bench.section import number
from neo_desktop.app.bench.throughput import ThroughputOptions
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.profiling.budget import GIB
from neo_desktop.engine.profiling.hardware import host_memory
from neo_desktop.models.shapes import shape

# The largest whose weights leave room is measured: offloading is for models that nearly fill a GPU.
_GPU_SHAPES = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b", "qwen2.5-0.5b", "smollm2-135m")
_GPU_SHARE = 0.75  # of the free memory, for weights
# On a CPU alone, the largest that answers this request alone, at best in so many seconds:
# then the whole self-test takes a few minutes.
_CPU_SHAPES = ("llama-3.2-3b", "llama-3.2-1b", "qwen2.5-0.5b", "smollm2-360m", "smollm2-135m")
_PROMPT_TOKENS, _OUTPUT_TOKENS, _MOST_SECONDS = 128, 32, 4.0
_HOST_SHARE = 0.25  # of the available memory, for weights


@dataclass(frozen=True, slots=True)
class DefaultModel:
    """The model that suits this computer."""

    shape: str
    note: str  # why that one, in a sentence


def default_model(device: str, gpu_memory_gib: float | None = None) -> DefaultModel:
    """Choose by memory, on a CPU also by speed; the smallest where even that suits badly."""
    if choose_device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        free = min(free, free if gpu_memory_gib is None else int(gpu_memory_gib * GIB))
        fitting = [
            name for name in _GPU_SHAPES if shape(name).weight_bytes(torch.float16) <= _GPU_SHARE * free
        ]
        return _described(
            [*fitting, _GPU_SHAPES[-1]][0],
            f"the largest of {', '.join(_GPU_SHAPES)} that leaves room for KV in {free / 1e9:.1f} GB of GPU "
            "memory",
        )
    probe, room = Prober().probe(), _HOST_SHARE * host_memory().available_bytes
    fitting = [
        name
        for name in _CPU_SHAPES
        if shape(name).weight_bytes(torch.float32) <= room and _seconds(name, probe) <= _MOST_SECONDS
    ]
    return _described(
        [*fitting, _CPU_SHAPES[-1]][0],
        f"the largest of {', '.join(_CPU_SHAPES)} with which the self-test takes a few minutes on a CPU that "
        f"reads {number(probe.read_gb_per_s)} GB/s",
    )


def _seconds(name: str, probe: Probe) -> float:
    """Read the weights once per output token, and multiply by them once per token of the prompt."""
    config = shape(name)
    reading_s = config.weight_bytes(torch.float32) / (probe.read_gb_per_s * 1e9)
    multiplying_s = 2 * config.num_parameters / (probe.gflop_per_s * 1e9)
    return _OUTPUT_TOKENS * reading_s + _PROMPT_TOKENS * multiplying_s


def _described(name: str, why: str) -> DefaultModel:
    return DefaultModel(
        name,
        f"Measured with random weights in the shape of {name}, {why}. Speed does not depend on what the "
        "weights are; --shape or --model takes another model.",
    )


def suite_options(
    model: EngineOptions,
    *,
    quick: bool,
    cpu_attention: Mapping[str, Any],
    throughput: Mapping[str, Any],
    load: Mapping[str, Any],
    model_note: str = "",
) -> SuiteOptions:
    """Return what each suite is asked to do.

    Args:
        model: for all suites that need one.
        quick: for a self-test of all suites, in about three minutes.
        model_note: which model was chosen and why.
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
        model_note=model_note,
    )
    asked = {"cpu_attention": cpu_attention, "throughput": throughput, "load": load}
    for changes in ([_quick(choose_device(model.device).type == "cuda")] if quick else []) + [asked]:
        suites = replace(
            suites, **{name: replace(getattr(suites, name), **each) for name, each in changes.items()}
        )
    return suites


def _quick(on_gpu: bool) -> dict[str, Mapping[str, Any]]:
    """What a self-test of all suites does otherwise; a CPU alone takes a second for a hundred tokens."""
    return {
        "hardware": {"seconds": 15.0},
        "cpu_attention": {
            "head_dims": (128,),
            "context_tokens": (512, 8192),
            "seconds": 15.0,
            "rival_seconds": 12.0,
        },
        "gpu": {
            "batches": (1, 8, 32) if on_gpu else (1, 4),
            "context_tokens": 512 if on_gpu else 64,
            "seconds": 20.0,
        },
        "cost_model": {"points": 12, "rounds": 5, "seconds": 20.0},
        "throughput": {"seconds": 40.0},
        "load": {
            "input_tokens": 256 if on_gpu else 96,
            "output_tokens": 64 if on_gpu else 32,
            "seconds": 3.0 if on_gpu else 8.0,  # fewer come in a second
            "load_shares": (0.5, 0.75, 1.0),
        },
    }
