"""Simulate experts that move: a chat's tokens per second, beside experts that stay.

Cards, models and hosts are those of `weights_simulation cards`. A router has no preference, or a skew by
Zipf's law: it uses a layer's n-th expert in proportion to 1 / n^skew. Or it has the published locality of one
model, which prefers no expert for long.
"""

from collections.abc import Iterator
from dataclasses import replace

from neo_desktop.engine.predict.offloaded_matmul import product_time
from neo_desktop.engine.predict.weight_plan import layer_matrices, slotted_experts
from neo_desktop.engine.simulation.divided import machine_rates
from neo_desktop.engine.simulation.presets import GIB, get_gpu, get_host
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.protocol import WeightFormat
from research.cases import gpt_oss, header, quantised, row
from research.moving_experts import Recent, Routing, Skewed, run_experts
from research.weights_simulation import CARD_HOST_GIB, CARDS, CHAT_TOKENS, chat_rate

MODELS: dict[str, tuple[ModelConfig, WeightFormat]] = {
    "Qwen3-30B-A3B": quantised("qwen3-30b-a3b"),
    "gpt-oss-20b": gpt_oss(32, 24),
    "gpt-oss-120b": gpt_oss(128, 36),
}
ROUTINGS: dict[str, Routing] = {
    "no preference": Skewed(),
    "skew 0.5": Skewed(0.5),
    "skew 1": Skewed(1.0),
    "published locality": Recent(),
}


def rows(card: str, model: str) -> Iterator[tuple[str, ...]]:
    """Yield a row per kind of router; none if the model's experts cannot move on this card."""
    config, form = MODELS[model]
    found = chat_rate(card, config, form, CHAT_TOKENS)
    if found is None:
        return
    rate, plan = found
    if plan is None or plan.moves is None:
        return
    gpu = get_gpu(card)
    rates = machine_rates(gpu, replace(get_host(gpu.host), memory_bytes=CARD_HOST_GIB * GIB), config)
    experts = slotted_experts(config, form, layer_matrices(config, form, config.dtype), plan)
    other_ms = 1e3 / rate - sum(product_time(rates, sizes, number, 1).ms for sizes, number in experts)
    slots = f"{experts[0][1]} of {experts[0][0].rows}"
    for name, routing in ROUTINGS.items():
        run = run_experts(rates, experts, routing)
        speeds = [1e3 / (other_ms + ms) for ms in (run.static_ms, run.moving_ms)]
        yield (
            gpu.title,
            model,
            slots,
            name,
            f"{run.static_hits:.0%}",
            f"{run.moving_hits:.0%}",
            f"{run.moved_bytes / 1e6:.0f}",
            *(f"{speed:.1f}" for speed in speeds),
            f"{speeds[1] / speeds[0]:.2f}x",
        )


def main() -> None:
    header(
        "GPU", "model", "experts on the GPU", "router", "hits, staying", "hits, moving", "MB moved per token",
        "tokens/s, staying", "tokens/s, moving", "gain",
    )  # fmt: skip
    for model in MODELS:
        for card in CARDS:
            for each in rows(card, model):
                row(*each)


if __name__ == "__main__":
    main()
