"""The predicted speed of a model on this computer, from its figures by the cost model.

The figures are, in this order: those that the self-test measured on this computer; of a GPU, its datasheet's;
of a CPU alone, what a fraction of a second shows.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from neo_desktop import native
from neo_desktop.app.bench.host_rates import Host
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms
from neo_desktop.engine.profiling.hardware import cpu_name, host_memory
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.divided import DividedWeights
from neo_desktop.engine.simulation.presets import GB, GpuPreset, HostPreset, get_gpu, get_host
from neo_desktop.models.config import ModelConfig

MEASURED = "the tables that were measured on this computer with this model"
_READ_BYTES = 256 << 20  # beyond all caches
_MATRIX_SIZE = 1024
# Of what square matrices and plain reads reach, by matmuls and by reading weights.
_CPU_SHARES = {"matmul_share": 0.8, "streaming_share": 0.8, "attention_share": 0.9}
# Real work loses only little of a GPU's measured figures.
_GPU_SHARES = {"matmul_share": 0.9, "streaming_share": 0.95, "attention_share": 0.65, "bus_share": 1.0}
_CPU_RATES = {"host reads", "CPU matrix products, float32"}  # of the suite hardware
_GPU_RATES = {"GPU reads", "GPU matrix products, float16", "host to GPU", "GPU to host"}


@dataclass(frozen=True, slots=True)
class MachineFigures:
    gpu: GpuPreset  # without a GPU: the CPU, as what computes the linear layers
    host: HostPreset
    has_gpu: bool
    source: str  # where the figures come from


@dataclass(frozen=True, slots=True)
class Speed:
    """Decoding, with contexts half full."""

    one_chat_tokens_per_s: float
    best_chats: int  # at once: most tokens per second together
    best_tokens_per_s: float
    best_ms_per_token: float  # per chat, with `best_chats` chats at once
    assumption: str
    is_measured: bool  # from tables that were measured here with this model


def find_figures(device: torch.device, reports: Path | None = None) -> MachineFigures | str:
    """Return what is known of this computer, also from the self-test's reports, or why nothing is."""
    gpu_name, rates, source = _measured(reports) if reports is not None else ("", {}, "")
    read, flops = GB * rates.get("host reads", 0.0), 1e9 * rates.get("CPU matrix products, float32", 0.0)
    if device.type != "cuda":
        return _cpu_figures(read, flops, source) if rates else _quick_figures()
    name = torch.cuda.get_device_name(device)
    if gpu_name == name:
        bus = GB * min(rates["host to GPU"], rates["GPU to host"])
        products = 1e9 * rates["GPU matrix products, float16"]
        gpu = _gpu(name, GB * rates["GPU reads"], products, bus, **_GPU_SHARES)
        return MachineFigures(gpu, _host(read, flops), True, source)
    try:
        gpu = _preset(name)
    except ValueError:
        return f"no datasheet of the {name} is at hand: run the self-test's suite hardware, which measures it"
    host = get_host(gpu.host)
    return MachineFigures(gpu, host, True, f"the datasheet of the {gpu.name} in a computer like {host.name}")


@lru_cache(256)
def predict(
    figures: MachineFigures,
    config: ModelConfig,
    dtype: torch.dtype,
    chats: tuple[tuple[KVTier, int], ...],
    chat_tokens: int,
    read: tuple[float, float] | None = None,
    divided: DividedWeights | None = None,
) -> Speed:
    """Predict decoding from a machine's figures.

    Args:
        chats: (tier, how many have room there); at least one in all.
        chat_tokens: final length of a chat; the average is half.
        read, divided: see `analytic_cost_model`.
    """
    cost = analytic_cost_model(figures.gpu, figures.host, config, dtype, read, divided)
    if not figures.has_gpu:
        cost = replace(cost, overlaps=False)
    return predict_by(cost, chats, chat_tokens, figures.source)


def predict_by(
    cost: TableCostModel, chats: tuple[tuple[KVTier, int], ...], chat_tokens: int, source: str | None = None
) -> Speed:
    """Predict decoding from tables; see `predict`. Without a source, they were measured with this model."""
    context = max(chat_tokens // 2, 1)

    def total_ms(*counts: int) -> float:
        decodes = {
            tier: Decodes(count, count * context)
            for (tier, _), count in zip(chats, counts, strict=True)
            if count
        }
        return _best_ms(cost, decodes)

    first = next(index for index, (_, count) in enumerate(chats) if count)
    one = total_ms(*(int(index == first) for index in range(len(chats))))
    batches = [batch for batch in product(*(_steps(count) for _, count in chats)) if any(batch)]
    speeds = {batch: sum(batch) / total_ms(*batch) * 1e3 for batch in batches}
    best = max(speeds, key=lambda batch: (speeds[batch], -sum(batch)))
    # The smallest batch that is as good as the best: more chats would only slow each other down.
    best = min((batch for batch in batches if speeds[batch] >= 0.97 * speeds[best]), key=sum)
    return Speed(
        one_chat_tokens_per_s=1e3 / one,
        best_chats=sum(best),
        best_tokens_per_s=speeds[best],
        best_ms_per_token=total_ms(*best),
        assumption=f"predicted from {source or MEASURED}; chats of {context:,} tokens",
        is_measured=source is None,
    )


def _best_ms(cost: TableCostModel, decodes: Mapping[KVTier, Decodes]) -> float:
    """One sub-batch, or those that the host attends for in one of their own."""
    together = iteration_ms(cost, IterationShape((BatchShape().plus(decodes),)))
    parts = tuple(
        BatchShape().plus({tier: each for tier, each in decodes.items() if tier.host_attends is host_attends})
        for host_attends in (False, True)
    )
    if not all(part.tokens for part in parts):
        return together
    return min(together, iteration_ms(cost, IterationShape(parts)))


def _steps(most: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8 … and the most."""
    steps = {0, most} | {round(2 ** (i / 2)) for i in range(20) if round(2 ** (i / 2)) <= most}
    return sorted(steps)


def _measured(reports: Path) -> tuple[str, Mapping[str, float], str]:
    """Return the GPU's name, the best rates and their source, of the newest report of this computer."""
    for file in sorted(reports.glob("*/report.json"), reverse=True):
        # A report may be of a run that was stopped, or of another version.
        with suppress(OSError, ValueError, KeyError, TypeError):
            report = json.loads(file.read_text(encoding="utf-8"))
            (suite,) = [suite for suite in report["suites"] if suite["suite"] == "hardware"]
            rates: dict[str, float] = {}
            for each in suite["figures"]:
                rates[each["what"]] = max(rates.get(each["what"], 0.0), float(each["value"]["median"]))
            needed = _CPU_RATES | (_GPU_RATES if suite["gpu_name"] else set())
            if report["machine"]["cpu"] == cpu_name() and needed <= rates.keys():
                day = str(report["started"])[:10]
                return suite["gpu_name"], rates, f"what the self-test measured on this computer on {day}"
    return "", {}, ""


def _preset(name: str) -> GpuPreset:
    """The datasheet's figures by the driver's name: "NVIDIA GeForce RTX 3060 Laptop GPU", "NVIDIA L4"."""
    words = [word for word in name.split() if word.lower() not in ("nvidia", "geforce", "tesla", "gpu")]
    try:
        return get_gpu(" ".join(words))
    except ValueError:
        return get_gpu(
            " ".join(word for word in words if not re.fullmatch(r"\d+GB|HBM\d\w*|PCIe|SXM\d?", word))
        )


@cache
def _quick_figures() -> MachineFigures | str:
    """Look for a fraction of a second; kept, since later the computer may be busy."""
    if host_memory().available_bytes < 4 * _READ_BYTES:
        return "too little memory is free to measure this computer's"
    host = Host(_READ_BYTES)
    threads = native.default_num_threads()
    read = max(host.read_gb_per_s(threads) for _ in range(3))
    flops = max(host.matrix_gflop_per_s(_MATRIX_SIZE, "float32") for _ in range(4))
    return _cpu_figures(read * GB, flops * 1e9, "a quick look at this computer's memory and processor")


def _cpu_figures(read: float, flops: float, source: str) -> MachineFigures:
    gpu = _gpu("cpu", read, flops, read, **_CPU_SHARES)
    return MachineFigures(gpu, _host(read, flops), False, source)


def _gpu(name: str, read: float, flops: float, bus: float, **shares: Any) -> GpuPreset:
    """Return a device of measured rates, of which work reaches these shares."""
    return GpuPreset(
        name=name,
        host="this computer",
        memory_bytes=0,
        memory_bytes_per_s=read,
        tensor_flops=flops,
        bus_bytes_per_s=bus,
        multiprocessors=1,
        **shares,
    )


def _host(read: float, flops: float) -> HostPreset:
    cores = native.num_usable_cpus()
    return HostPreset(
        "this computer",
        memory_bytes=0,
        memory_bytes_per_s=read,
        cores=cores,
        core_bytes_per_s=read,
        core_flops=flops / cores,
        read_share=1.0,
        idle_cores=0,
    )
