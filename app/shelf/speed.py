"""The predicted speed of a model on this computer, from its figures by the cost model.

The figures of a GPU are those of its datasheet; those of a CPU alone are measured in a fraction of a second.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product

import torch

from neo_desktop import native
from neo_desktop.app.bench.host_rates import Host
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms
from neo_desktop.engine.profiling.hardware import host_memory
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.divided import DividedWeights
from neo_desktop.engine.simulation.presets import GB, GpuPreset, HostPreset, get_gpu, get_host
from neo_desktop.models.config import ModelConfig

MEASURED = "the tables that were measured on this computer with this model"
_READ_BYTES = 256 << 20  # beyond all caches
_MATRIX_SIZE = 1024


@dataclass(frozen=True, slots=True)
class MachineFigures:
    gpu: GpuPreset  # without a GPU: the CPU, as what computes the linear layers
    host: HostPreset
    has_gpu: bool
    source: str  # of the figures, in words


@dataclass(frozen=True, slots=True)
class Speed:
    """Decoding, with contexts half full."""

    one_chat_tokens_per_s: float
    best_chats: int  # at once: most tokens per second together
    best_tokens_per_s: float
    best_ms_per_token: float  # per chat, with `best_chats` chats at once
    assumption: str
    is_measured: bool  # from tables that were measured here with this model


def find_figures(device: torch.device) -> MachineFigures | str:
    """Return what is known of this computer, or why nothing is."""
    if device.type != "cuda":
        return _quick_figures()
    name = torch.cuda.get_device_name(device)
    try:
        gpu = _preset(name)
    except ValueError:
        return f"no datasheet of the {name} is at hand: 'neo-desktop doctor --measure' measures the model"
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
    return cpu_figures(read * GB, flops * 1e9)


def cpu_figures(read: float, flops: float) -> MachineFigures:
    """Return a CPU that reads and multiplies at these rates, in bytes and operations per second."""
    name, cores = "this computer", native.num_usable_cpus()
    gpu = GpuPreset(
        name="cpu",
        host=name,
        memory_bytes=0,
        memory_bytes_per_s=read,
        tensor_flops=flops,
        bus_bytes_per_s=read,
        multiprocessors=1,
        # Of what square matrices and plain reads reach.
        matmul_share=0.8,
        streaming_share=0.8,
        attention_share=0.9,
    )
    host = HostPreset(
        name,
        memory_bytes=0,
        memory_bytes_per_s=read,
        cores=cores,
        core_bytes_per_s=read,
        core_flops=flops / cores,
        read_share=1.0,
        idle_cores=0,
    )
    return MachineFigures(gpu, host, False, "a quick look at this computer's memory and processor")
