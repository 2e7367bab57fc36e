"""Models with some experts on the device and the others in host memory."""

import random
from dataclasses import replace

import torch
from offloaded_case import random_split
from pipeline_case import tiny_config
from split_models import SHARES, WINDOWS, divided

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.experts_config import ExpertsConfig
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import MoveBudget, OffloadedFormat
from neo_desktop.models.linear.shares import StreamedShares
from neo_desktop.models.registry import random_model
from neo_desktop.models.weights import named_weights

EXPERTS = ("experts_gate", "experts_up", "experts_down")


def experts_config(windows: tuple[int | None, ...] = WINDOWS, intermediate_size: int = 64) -> ModelConfig:
    """Return a config with six experts in all layers except one; a token uses two experts."""
    layers = tuple(layer for layer in range(len(windows)) if layer != 1)
    experts = ExpertsConfig(count=6, per_token=2, intermediate_size=intermediate_size, layers=layers)
    return replace(tiny_config(windows), architecture="Qwen3MoeForCausalLM", experts=experts)


def expert_model(
    seed: int | None = None,
    windows: tuple[int | None, ...] = WINDOWS,
    intermediate_size: int = 64,
    share: float | None = None,
    moves: MoveBudget | None = None,
) -> Decoder:
    """Return a model with any number of resident experts and rows per layer; all, without a seed.

    Args:
        share: see `with_shares`.
        moves: see `OffloadedFormat`; a layer then has one or four resident experts.
    """
    config = experts_config(windows, intermediate_size)
    model = random_model(config, dtype=torch.float32, device=torch.device("cpu"))
    wide = Decoder(config, dtype=torch.float32, device=torch.device("cpu"), form=_form(config, seed, moves))
    sources = {weight.name: weight for weight in named_weights(model)}
    for target in named_weights(wide):
        source = sources[target.name]
        is_matrix = "_proj" in source.name or source.name.endswith("mlp.gate.weight")
        target.load(0, source.dense() * (8.0 if is_matrix else 1.0))
    return wide if seed is None else with_shares(divided(wide, seed, None), seed, share)


def with_shares(model: Decoder, seed: int, share: float | None) -> Decoder:
    """Stream the given share of the experts in host memory; None: shares depend on the number of rows."""
    rng = random.Random(seed)
    rows, shares = sorted(rng.sample(range(1, 40), 4)), sorted(rng.choices(SHARES, k=4))
    model.streamed_experts = StreamedShares(tuple(rows), tuple(shares))
    if share is not None:
        model.streamed_experts = StreamedShares((1,), (share,))
    return model


def _form(config: ModelConfig, seed: int | None, moves: MoveBudget | None) -> Dense | OffloadedFormat:
    if seed is None:
        return DENSE
    rng = random.Random(seed)
    resident = dict(random_split(config, seed, device_form=DENSE, host_form=DENSE).resident_rows)
    assert config.experts is not None
    for layer in config.experts.layers:
        resident.pop(f"{layer}.router")
        count = rng.choice((0, 1, 4, 6) if moves is None else (1, 4))
        for name in EXPERTS:
            resident[f"{layer}.{name}"] = count * 64  # counted in rows of one expert
    return OffloadedFormat(Dense(uses_tiles=False), DENSE, resident, moves=moves)
