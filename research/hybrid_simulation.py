"""Simulate one chat of a hybrid, beside speeds of llama.cpp that its users have published.

    python research/hybrid_simulation.py

The cards have 64 GiB of host memory. Experts are divided between GPU and host memory as those of native
models; the engine does not do this for models that the code of transformers computes.
"""

from dataclasses import replace

import torch

from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms
from neo_desktop.engine.profiling.budget import FreeMemory, limits_of
from neo_desktop.engine.profiling.weight_memory import plan_memory
from neo_desktop.engine.simulation.analytic import analytic_cost_model, bytes_read, kv_budget
from neo_desktop.engine.simulation.divided import DividedWeights, machine_rates
from neo_desktop.engine.simulation.presets import GIB, get_gpu, get_host
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.stored_form import uniform_form
from neo_desktop.models.traced_shapes import TRACED_SHAPES

CARD_HOST_GIB = 64
PUBLISHED = (  # card, its stand-in here, model, quantisation, context -> published tokens per second
    (
        "RTX 4070 Ti 12 GB",
        "rtx-4070",
        "qwen3.8-27b",
        "Q4_K",
        {4_096: 4.2, 32_768: 2.3, 65_536: 1.4, 131_072: 0.9},
    ),
    (
        "RTX 4070 Ti 12 GB",
        "rtx-4070",
        "qwen3.6-35b-a3b",
        "Q4_K",
        {8_192: 51.8, 32_768: 47, 65_536: 42, 131_072: 35},
    ),
    ("RTX 4060 Ti 8 GB", "rtx-4060", "qwen3.6-35b-a3b", "Q4_K", {16_384: 41.6, 65_536: 34, 131_072: 28}),
    ("RTX 5080 16 GB", "rtx-5080", "qwen3.6-35b-a3b", "Q4_K", {4_096: 69.6, 65_536: 65.7}),
    ("RTX 5060 Ti 16 GB", "rtx-5060-ti-16gb", "qwen3.6-35b-a3b", "Q4_K", {4_096: 40}),
)


def main() -> None:
    print("| card | model | context | published | simulated | with --gpu-cache-tokens |")
    print("|---" * 6 + "|")
    for card, gpu, model, type_name, speeds in PUBLISHED:
        config = TRACED_SHAPES[model]
        form = uniform_form(config, type_name).on_gpu(dispatch)
        for context, published in speeds.items():
            rates = [chat_rate(gpu, config, form, context, tokens) for tokens in (None, context)]
            row = (
                card,
                model,
                f"{context:,}",
                f"{published:g}",
                *(f"{rate:.3g}" if rate else "does not fit" for rate in rates),
            )
            print(f"| {' | '.join(row)} |", flush=True)


def chat_rate(
    name: str, config: ModelConfig, form: WeightFormat, context: int, gpu_tokens: int | None
) -> float | None:
    """Return the decodes per second of one chat; None: it does not fit.

    Args:
        gpu_tokens: of KV on the GPU; None: as planned.
    """
    gpu = get_gpu(name)
    host = replace(get_host(gpu.host), memory_bytes=CARD_HOST_GIB * GIB)
    rates, dtype = machine_rates(gpu, host), config.dtype
    options = EngineOptions(gpu_cache_tokens=gpu_tokens)
    free = FreeMemory(host.memory_bytes, gpu.memory_bytes)
    limits = limits_of(options, torch.device("cuda"))
    try:
        plan = plan_memory(config, form, dtype, torch.device("cuda"), options, lambda: rates, free)
    except MemoryError:
        return None
    budget = kv_budget(gpu, host, config, dtype, limits, form, plan)
    divided = DividedWeights.of(plan, rates, config, form, dtype)
    cost = analytic_cost_model(gpu, host, config, dtype, bytes_read(config, dtype, form), divided)
    blocks = budget.num_blocks()
    tiers = [tier for tier in MEASURED_TIERS if blocks[tier] * BLOCK_SIZE >= context]
    ms = min(
        iteration_ms(cost, IterationShape((BatchShape().plus({tier: Decodes(1, context)}),)))
        for tier in tiers
    )
    return 1e3 / ms


if __name__ == "__main__":
    main()
