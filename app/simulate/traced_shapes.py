"""Shapes of well-known models that the code of transformers computes, for simulations.

They have sizes alone: no names of weights, and only layers with attention are layers, as in traced models.
"""

import torch

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.experts_config import ExpertsConfig
from neo_desktop.models.matrices import Matrix
from neo_desktop.models.rope import RopeConfig

_States = tuple[tuple[int, ...], ...]


def _shape(
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    depth: int,
    attention: tuple[int, int, int, int],
    matrices: dict[str, tuple[int, int, int]],
    experts: tuple[int, int, int, int] | None = None,
    *,
    has_gates: bool = True,
    states: _States = (),
    tied: bool = False,
    max_context_tokens: int = 262_144,
    windows: tuple[int | None, ...] | None = None,
    kv_parts: int = 2,
) -> ModelConfig:
    """Return a shape.

    Args:
        attention: layers with it, heads, KV heads, size of a head.
        matrices: kind -> layers with it, rows, columns.
        experts: layers with them, number, number per token, width.
    """
    num_layers, heads, kv_heads, head_dim = attention
    table = [Matrix("embedding", (), (vocab_size,), hidden_size, is_table=not tied)]
    for kind, (layers, rows, columns) in matrices.items():
        table += [Matrix(f"{layer}.{kind}", (), (rows,), columns) for layer in range(layers)]
    mixture = None
    if experts is not None:
        layers, count, per_token, width = experts
        mixture, rows = ExpertsConfig(count, per_token, width, tuple(range(layers))), count * width
        of_experts = {
            "gate": (rows * has_gates, hidden_size),
            "up": (rows, hidden_size),
            "down": (count * hidden_size, width),
        }
        for layer in range(layers):
            table += [
                Matrix(f"{layer}.router", (), (count,), hidden_size),
                *(
                    Matrix(f"{layer}.experts_{kind}", (), (rows,), columns, (), count, per_token)
                    for kind, (rows, columns) in of_experts.items()
                ),
            ]
    if not tied:
        table.append(Matrix("head", (), (vocab_size,), hidden_size))
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=0,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e7),
        tie_word_embeddings=tied,
        layer_windows=windows or (None,) * num_layers,
        dtype=torch.bfloat16,
        experts=mixture,
        depth=depth,
        table=tuple(table),
        state_shapes=states,
        kv_parts=kv_parts,
    )


def _qwen35(
    architecture: str,
    hidden: int,
    depth: int,
    heads: tuple[int, int, int],
    network: tuple[str, int],
    experts: tuple[int, int, int, int] | None = None,
) -> ModelConfig:
    """Return gated attention in every fourth layer, and Gated DeltaNet with 16 key heads in the others.

    Args:
        heads: of queries, of keys and values, and of DeltaNet's values.
        network: prefix and width of the network that all tokens use.
    """
    (queries, kv, value_heads), (prefix, width) = heads, network
    full, size, keys, values = depth // 4, 256, 16 * 128, value_heads * 128
    recurrent = depth - full
    matrices = {
        "qkv": (full, (2 * queries + 2 * kv) * size, hidden),
        "output": (full, hidden, queries * size),
        "delta_in": (recurrent, 2 * keys + 2 * values + 2 * value_heads, hidden),
        "delta_out": (recurrent, hidden, values),
        f"{prefix}gate_up": (depth, 2 * width, hidden),
        f"{prefix}down": (depth, hidden, width),
    }
    states = ((3, 2 * keys + values), (value_heads, 128, 128)) * recurrent
    attention = (full, queries, kv, size)
    return _shape(architecture, 248_320, hidden, depth, attention, matrices, experts, states=states)


# From the config.json of the releases, without vision towers and layers of multi-token prediction.
TRACED_SHAPES: dict[str, ModelConfig] = {
    "qwen3.6-35b-a3b": _qwen35(
        "Qwen3_5MoeForCausalLM", 2048, 40, (16, 2, 32), ("shared_", 512), (40, 256, 8, 512)
    ),
    "qwen3.8-27b": _qwen35("Qwen3_5ForCausalLM", 5120, 64, (24, 4, 48), ("", 17_408)),
    # KV rows are those of the engine: four heads of 512 in every layer.
    "gemma-4-26b-a4b": _shape(
        "Gemma4ForCausalLM",
        262_144,
        2816,
        30,
        (30, 16, 4, 512),
        {
            "qkv": (25, (16 + 2 * 8) * 256, 2816),
            "output": (25, 2816, 16 * 256),
            "full_qk": (5, (16 + 2) * 512, 2816),  # keys are values
            "full_output": (5, 2816, 16 * 512),
            "gate_up": (30, 2 * 2112, 2816),
            "down": (30, 2816, 2112),
        },
        (30, 128, 8, 704),
        tied=True,
        windows=tuple(None if layer % 6 == 5 else 1024 for layer in range(30)),
    ),
    "lfm2.5-8b-a1b": _shape(
        "Lfm2MoeForCausalLM",
        128_000,
        2048,
        24,
        (6, 32, 8, 64),
        {
            "qkv": (6, (32 + 2 * 8) * 64, 2048),
            "output": (6, 2048, 32 * 64),
            "conv_in": (18, 3 * 2048, 2048),
            "conv_out": (18, 2048, 2048),
            "gate_up": (2, 2 * 7168, 2048),
            "down": (2, 2048, 7168),
        },
        (22, 32, 4, 1792),
        states=((2, 2048),) * 18,
        tied=True,
        max_context_tokens=128_000,
    ),
    # A layer is Mamba-2, a mixture of experts, or attention.
    "nemotron-3-nano": _shape(
        "NemotronHForCausalLM",
        131_072,
        2688,
        52,
        (6, 32, 2, 128),
        {
            "qkv": (6, (32 + 2 * 2) * 128, 2688),
            "output": (6, 2688, 32 * 128),
            "mamba_in": (23, 2 * 64 * 64 + 2 * 8 * 128 + 64, 2688),
            "mamba_out": (23, 2688, 64 * 64),
            "shared_up": (23, 3712, 2688),
            "shared_down": (23, 2688, 3712),
        },
        (23, 128, 6, 1856),
        has_gates=False,
        states=((3, 64 * 64 + 2 * 8 * 128), (64, 64, 128)) * 23,
    ),
    # KV rows are latents: one head of 512 + 64, whose keys contain the values.
    "glm-4.7-flash": _shape(
        "Glm4MoeLiteForCausalLM",
        154_880,
        2048,
        47,
        (47, 20, 1, 512 + 64),
        {
            "latents": (47, 768 + 512 + 64, 2048),
            "queries": (47, 20 * 256, 768),
            "keys_values": (47, 20 * (192 + 256), 512),
            "output": (47, 2048, 20 * 256),
            "gate_up": (1, 2 * 10_240, 2048),
            "down": (1, 2048, 10_240),
            "shared_gate_up": (46, 2 * 1536, 2048),
            "shared_down": (46, 2048, 1536),
        },
        (46, 64, 4, 1536),
        max_context_tokens=202_752,
        kv_parts=1,
    ),
}
