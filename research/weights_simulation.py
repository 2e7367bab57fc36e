"""Simulate models larger than the card: divided weights against streaming and a layer split.

    python -m research.weights_simulation sweep      6 to 90 % of the weights on the GPU (HeteGen, figure 8)
    python -m research.weights_simulation ablation   the gain of each part (HeteGen, table 3)
    python -m research.weights_simulation cards      fit and speed on cards of 8 to 32 GB
    python -m research.weights_simulation plot       the sweep as a picture

One chat: 512 tokens in and 64 out, as in the paper's section 5, with its KV on the GPU. All variants have the
same machine, kernels and GPU memory for weights. They differ in the placement of computation:

    streaming    weights that are not resident cross the bus for every token, beside the GPU's computation
    accelerate   streaming from pageable memory, layer by layer: copies wait for matmuls
    layer split  the first layers are on the GPU, the others on the CPU, and one waits for the other; for
                 prompts the CPU's layers are copied to the GPU and computed there. For MoE, all but the
                 experts is on the GPU first, and then experts layer by layer
    divided      rows of each matrix, or a layer's experts: CPU, bus and GPU work at the same time
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import inf
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch

from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.predict.cost_model import Curve
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, IterationShape, iteration_ms
from neo_desktop.engine.predict.offloaded_matmul import Rates, Sizes
from neo_desktop.engine.predict.weight_plan import (
    WeightPlan,
    bound_ms,
    layer_matrices,
    least_gpu_bytes,
    plan_weights,
    weight_times,
)
from neo_desktop.engine.profiling.budget import FreeMemory, limits_of
from neo_desktop.engine.profiling.weight_memory import plan_memory
from neo_desktop.engine.simulation.analytic import (
    analytic_cost_model,
    bytes_read,
    kv_budget,
)
from neo_desktop.engine.simulation.divided import DividedWeights, machine_rates
from neo_desktop.engine.simulation.presets import GIB, GpuPreset, HostPreset, get_gpu, get_host
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.shapes import shape
from research.cases import gpt_oss, header, opt, quantised, row, traced
from research.layer_plan import plan_layers

DTYPE = torch.float16
PROMPT, OUTPUT = 512, 64
SHARES = (0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MACHINES = ("t4", "rtx-3060", "rtx-4090")
CARDS = ("rtx-4060", "rtx-3060", "rtx-5060-ti-16gb", "rtx-4090", "rtx-5090")
CARD_HOST_GIB = 64  # of main memory, instead of the card's usual host
CHAT_TOKENS = 4096
OFFLOADED_ROWS = 32  # from this size on a layer split copies the CPU's layers to the GPU

LEVELS = ("accelerate", "streaming", "layer split", "divided")
COLOURS = {"accelerate": "#bbbbbb", "streaming": "#666666", "layer split": "#d08700", "divided": "#1c8c4c"}
PLOTTED = "Llama-2-13B"


MODELS: dict[str, Callable[[], tuple[ModelConfig, WeightFormat]]] = {
    "Llama-2-13B": lambda: (shape("llama-2-13b"), DENSE),
    "OPT-13B": lambda: (opt(5120, 40), DENSE),
    "OPT-30B": lambda: (opt(7168, 48), DENSE),
    "Llama-3.1-70B, 4 bits": lambda: quantised("llama-3.1-70b"),
    "Qwen3-30B-A3B, 4 bits": lambda: quantised("qwen3-30b-a3b"),
    "gpt-oss-20b": lambda: gpt_oss(32, 24),
    "gpt-oss-120b": lambda: gpt_oss(128, 36),
}
CARD_MODELS: dict[str, Callable[[], tuple[ModelConfig, WeightFormat]]] = {
    **{
        name: partial(traced, name.lower())
        for name in ("Qwen3.8-27B", "Qwen3.6-35B-A3B", "Gemma-4-26B-A4B", "LFM2.5-8B-A1B")
    },
    "Nemotron-3-Nano (Q4_0)": lambda: traced("nemotron-3-nano", "Q4_0"),  # widths that K-quants lack
    "GLM-4.7-Flash": lambda: traced("glm-4.7-flash"),
    **{
        name: partial(quantised, name.lower())
        for name in ("Qwen3-14B", "Mistral-Small-24B", "Qwen3-32B", "Llama-3.1-70B", "Qwen3-30B-A3B")
    },
    "gpt-oss-20b (MXFP4)": lambda: gpt_oss(32, 24),
    "gpt-oss-120b (MXFP4)": lambda: gpt_oss(128, 36),
    "Llama-3.1-8B, 16 bits": lambda: (shape("llama-3.1-8b"), DENSE),
    "Llama-2-13B, 16 bits": lambda: (shape("llama-2-13b"), DENSE),
}


@dataclass(frozen=True)
class Case:
    """A model on a machine, with its GPU memory for weights."""

    gpu: GpuPreset
    host: HostPreset
    config: ModelConfig
    form: WeightFormat
    gpu_bytes: int

    @classmethod
    def of(cls, gpu_name: str, model: str, share: float) -> "Case":
        gpu = get_gpu(gpu_name)
        config, form = MODELS[model]()
        return cls(gpu, get_host(gpu.host), config, form, int(share * config.weight_bytes(DTYPE, form)))

    @property
    def rates(self) -> Rates:
        return machine_rates(self.gpu, self.host, self.config)

    @cached_property
    def matrices(self) -> dict[str, Sizes]:
        return layer_matrices(self.config, self.form, DTYPE)

    @cached_property
    def plan(self) -> WeightPlan:
        return plan_weights(self.config, self.form, DTYPE, self.gpu_bytes, self.rates)

    @cached_property
    def layers_plan(self) -> WeightPlan:
        return plan_layers(self.config, self.form, DTYPE, self.gpu_bytes)

    def needed_bytes(self, rows: int) -> float:
        """Return the bytes that the first layers leave in host memory and `rows` rows need."""
        resident = self.layers_plan.resident_rows
        others = [sizes for name, sizes in self.matrices.items() if not resident[name]]
        return sum(sizes.touched(rows) * sizes.host_bytes for sizes in others)

    def times(self, rows: int, plan: WeightPlan, rates: Rates, share: float | None = None) -> float:
        """Return the layers' matmul time, in ms."""
        return weight_times(self.matrices, plan, rates, rows, share).ms

    def streaming_ms(self, rows: int, rates: Rates) -> float:
        """Return the matmul time if the GPU computes all; only needed experts are streamed."""
        needed, plan = dict(self.matrices), self.layers_plan
        for name, sizes in self.matrices.items():
            if not plan.resident_rows[name]:
                needed[name] = replace(
                    sizes,
                    columns=round(sizes.used_share * sizes.columns),  # the columns that each row uses
                    host_bytes=round(sizes.touched(rows) * sizes.host_bytes),
                    unpacked_bytes=round(sizes.touched(rows) * sizes.unpacked_bytes),
                    used_share=1.0,
                )
        return weight_times(needed, plan, rates, rows, 1.0).ms

    def level(self, name: str) -> float:
        """Return output tokens per second."""
        return self.rate(
            {
                "divided": lambda rows: self.times(rows, self.plan, self.rates),
                "streaming": lambda rows: self.streaming_ms(rows, self.rates),
                "accelerate": self._accelerate_ms,
                "layer split": self._layer_split_ms,
            }[name]
        )

    def rate(self, products_ms: Callable[[int], float]) -> float:
        """Return output tokens per second, including the prompt's time."""
        read = bytes_read(self.config, DTYPE, self.form)
        cost = analytic_cost_model(self.gpu, self.host, self.config, DTYPE, read)
        fixed_ms = self.gpu.layer_ms + self.gpu.mixture_ms * (self.config.experts is not None)
        layer_ms = [fixed_ms + products_ms(rows) / cost.num_layers for rows in (1, PROMPT)]
        cost = replace(cost, linear=Curve((1, PROMPT), layer_ms))
        chunk = BatchShape(PROMPT, 1, cost.prefill_attention_ms(PROMPT, 0))
        token = BatchShape().plus({KVTier.DEVICE: Decodes(1, PROMPT + OUTPUT // 2)})
        prompt, decode = (iteration_ms(cost, IterationShape((each,))) for each in (chunk, token))
        return OUTPUT / (prompt + (OUTPUT - 1) * decode) * 1e3

    def bound(self) -> float:
        """Return output tokens per second if only reading weights by CPU, bus and GPU took time."""
        decode_ms = bound_ms(self.matrices, self.plan, self.rates)
        return OUTPUT / (OUTPUT - 1) / decode_ms * 1e3

    def _accelerate_ms(self, rows: int) -> float:
        """Return the time if one core copies to pinned memory, and the GPU computes layer by layer."""
        copying = 1 / min(self.host.core_bytes_per_s / 2, self.rates.bus_bytes_per_s)
        copied_ms = 1e3 * self.needed_bytes(rows) * copying
        computing = replace(self.rates, bus_bytes_per_s=inf, host_bytes_per_s=inf)
        return copied_ms + self.streaming_ms(rows, computing)

    def _layer_split_ms(self, rows: int) -> float:
        """Return the time with one offload between the halves; the GPU alone computes long prompts."""
        rates = replace(self.rates, offload_ms=0.0, host_bytes_per_s=inf)
        on_cpu_ms = self.times(rows, self.layers_plan, rates, 0.0)
        if rows < OFFLOADED_ROWS:
            return on_cpu_ms
        copied_ms = 1e3 * self.needed_bytes(rows) / self.rates.bus_bytes_per_s
        computing = replace(rates, bus_bytes_per_s=inf)
        return min(on_cpu_ms, copied_ms + self.streaming_ms(rows, computing))


def cases(share: float) -> Iterator[tuple[str, str, Case]]:
    for gpu in MACHINES:
        for model in MODELS:
            case = Case.of(gpu, model, share)
            if case.gpu_bytes >= least_gpu_bytes(case.config, case.form, DTYPE):
                yield gpu, model, case


def sweep() -> None:
    over = ("/ accelerate", "/ streaming", "/ layer split")
    header("GPU", "model", "weights on the GPU", "GB", *LEVELS, "bound", *over)
    for gpu, model, share in product(MACHINES, MODELS, SHARES):
        case = Case.of(gpu, model, share)
        if case.gpu_bytes < least_gpu_bytes(case.config, case.form, DTYPE):
            continue
        *others, divided = rates = [case.level(name) for name in LEVELS]
        where = get_gpu(gpu).title, model, f"{share:.0%}", f"{case.gpu_bytes / 1e9:.1f}"
        gains = [f"{divided / rate:.{digits}f}x" for rate, digits in zip(others, (1, 1, 2), strict=True)]
        row(*where, *(f"{rate:.2f}" for rate in (*rates, case.bound())), *gains)


def ablated(case: Case) -> dict[str, float]:
    """Return `omitted part` → tokens per second."""
    rates, plan = case.rates, case.plan
    best = weight_times(case.matrices, plan, rates, 1)
    share_of_one = best.streamed_bytes / plan.host_bytes
    # Pageable weights are copied first: read, written, and read again by the bus.
    copying = 2 / rates.host_bytes_per_s
    unpinned = replace(rates, bus_bytes_per_s=1 / (1 / rates.bus_bytes_per_s + copying))
    nothing = WeightPlan(
        dict.fromkeys(case.matrices, 0),
        least_gpu_bytes(case.config, case.form, DTYPE),
        sum(sizes.host_bytes for sizes in case.matrices.values()),
    )
    variants: dict[str, Callable[[int], float]] = {
        "all": lambda rows: case.times(rows, plan, rates),
        "without the CPU": lambda rows: case.times(rows, plan, rates, 1.0),
        "without streaming": lambda rows: case.times(rows, plan, rates, 0.0),
        "streaming for prompts alone": lambda rows: case.times(rows, plan, rates, 0.0 if rows == 1 else None),
        "one share for all numbers of rows": lambda rows: case.times(rows, plan, rates, share_of_one),
        "pinning before each transfer": lambda rows: case.times(rows, plan, unpinned),
        "whole layers on the GPU": lambda rows: case.times(rows, case.layers_plan, rates),
        "nothing resident": lambda rows: case.times(rows, nothing, rates),
    }
    return {name: case.rate(products_ms) for name, products_ms in variants.items()}


def ablation() -> None:
    share = 0.5
    found = {(gpu, model): ablated(case) for gpu, model, case in cases(share)}
    print(f"At {share:.0%} of the weights on the GPU:\n")
    header("", *(f"{get_gpu(gpu).title}, {model}" for gpu, model in found))
    for name in next(iter(found.values())):
        row(name, *(f"{each[name] / each['all']:.0%}" for each in found.values()))


def cards() -> None:
    header("model", *(get_gpu(card).title for card in CARDS))
    for model, make in CARD_MODELS.items():
        row(model, *(on_card(card, *make()) for card in CARDS))


def on_card(name: str, config: ModelConfig, form: WeightFormat) -> str:
    """Return tokens per second of one chat, and the weights in host memory."""
    found = chat_rate(name, config, form, CHAT_TOKENS)
    if found is None:
        return "does not fit"
    rate, plan = found
    return f"{rate:.3g}" + ("" if plan is None else f" ({plan.host_bytes / 1e9:.1f} GB)")


def chat_rate(
    name: str,
    config: ModelConfig,
    form: WeightFormat,
    context: int,
    gpu_tokens: int | None = None,
    host: HostPreset | None = None,
) -> tuple[float, WeightPlan | None] | None:
    """Return the decodes per second of one chat, and the placement of the weights; None: it does not fit.

    Args:
        gpu_tokens: of KV on the GPU; None: as planned.
        host: None: the one that usually comes with the card.
    """
    gpu = get_gpu(name)
    host = replace(host or get_host(gpu.host), memory_bytes=CARD_HOST_GIB * GIB)
    rates, dtype, device = machine_rates(gpu, host, config), config.dtype, torch.device("cuda")
    options = EngineOptions(gpu_cache_tokens=gpu_tokens)
    free = FreeMemory(host.memory_bytes, gpu.memory_bytes)
    try:
        plan = plan_memory(config, form, dtype, device, options, lambda: rates, free)
        budget = kv_budget(gpu, host, config, dtype, limits_of(options, device), form, plan)
    except MemoryError:
        return None
    divided, read = DividedWeights.of(plan, rates, config, form, dtype), bytes_read(config, dtype, form)
    cost = analytic_cost_model(gpu, host, config, dtype, read, divided)
    blocks = budget.num_blocks()
    decode = Decodes(1, int(config.attended_tokens(context)))
    ms = min(
        iteration_ms(cost, IterationShape((BatchShape().plus({tier: decode}),)))
        for tier in MEASURED_TIERS
        if blocks[tier] * BLOCK_SIZE >= context
    )
    return 1e3 / ms, plan


def plot(out: Path) -> None:
    mpl.use("Agg")
    figure, all_axes = plt.subplots(1, len(MACHINES), figsize=(4.2 * len(MACHINES), 3.6), sharex=True)
    for axes, gpu in zip(all_axes, MACHINES, strict=True):
        found = [Case.of(gpu, PLOTTED, share) for share in SHARES]
        percent = [100 * share for share in SHARES]
        for name in LEVELS:
            rates = [case.level(name) for case in found]
            axes.plot(percent, rates, "o-", markersize=3, color=COLOURS[name], label=name)
        axes.plot(percent, [case.bound() for case in found], ":", color="black", label="bound")
        axes.set(title=get_gpu(gpu).title, xlabel="weights on the GPU, %", ylim=(0, None))
    all_axes[0].set_ylabel("tokens / s")
    all_axes[0].legend(frameon=False)
    figure.suptitle(f"{PLOTTED}, {PROMPT} tokens in, {OUTPUT} out")
    figure.tight_layout()
    figure.savefig(out / "sim-weights.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"sweep": sweep, "ablation": ablation, "cards": cards}
    parser.add_argument("part", choices=(*parts, "plot"))
    parser.add_argument("--out", type=Path, default=Path("research/images"))
    arguments = parser.parse_args()
    parts.get(arguments.part, lambda: plot(arguments.out))()


if __name__ == "__main__":
    main()
