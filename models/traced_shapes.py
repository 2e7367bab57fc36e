"""Shapes of well-known models that the code of transformers computes, for simulations.

They have sizes alone: no names of weights, and only layers with attention are layers, as in traced models.
"""

from dataclasses import dataclass

import torch

from neo_desktop.models.config import Matrix, ModelConfig
from neo_desktop.models.experts_config import ExpertsConfig
from neo_desktop.models.rope import RopeConfig

_State = tuple[int, ...]


@dataclass(frozen=True)
class TracedShape(ModelConfig):
    """A `ModelConfig` from tables of matrices."""

    depth: int = 0
    table: tuple[tuple[str, Matrix], ...] = ()
    states: tuple[_State, ...] = ()

    @property
    def matrices(self) -> dict[str, Matrix]:
        return dict(self.table)

    @property
    def state_shapes(self) -> tuple[_State, ...]:
        return self.states

    @property
    def num_layers_in_all(self) -> int:
        return self.depth

    @property
    def num_parameters(self) -> int:
        norms = (2 * self.depth + 1) * self.hidden_size
        return self.vocab_size * self.hidden_size + norms + sum(m.copies * m.weights for _, m in self.table)


@dataclass(frozen=True, slots=True)
class _Attention:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class _Experts:
    layers: int
    count: int
    per_token: int
    width: int
    has_gate: bool = True


def _shape(
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    depth: int,
    attention: _Attention,
    matrices: dict[str, tuple[int, int, int]],
    *,
    experts: _Experts | None = None,
    states: tuple[_State, ...] = (),
    tied: bool = False,
    max_context_tokens: int = 262_144,
    windows: tuple[int | None, ...] | None = None,
) -> TracedShape:
    """Return a shape; `matrices`: kind -> layers with it, rows, columns."""
    table = {
        kind: Matrix(rows, columns, False, tuple(range(layers)))
        for kind, (layers, rows, columns) in matrices.items()
    }
    of_experts = None
    if experts is not None:
        layers, rows = tuple(range(experts.layers)), experts.count * experts.width
        of_experts = ExpertsConfig(experts.count, experts.per_token, experts.width, layers)
        table["router"] = Matrix(experts.count, hidden_size, False, layers)
        gates = rows if experts.has_gate else 0
        table["experts_gate"] = Matrix(gates, hidden_size, False, layers, experts.count)
        table["experts_up"] = Matrix(rows, hidden_size, False, layers, experts.count)
        down = experts.count * hidden_size, experts.width
        table["experts_down"] = Matrix(*down, False, layers, experts.count)
    if not tied:
        table["head"] = Matrix(vocab_size, hidden_size, False, None)
    return TracedShape(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=0,
        num_layers=attention.layers,
        num_heads=attention.heads,
        num_kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e7),
        tie_word_embeddings=tied,
        layer_windows=windows or (None,) * attention.layers,
        dtype=torch.bfloat16,
        experts=of_experts,
        depth=depth,
        table=tuple(table.items()),
        states=states,
    )


def _qwen35(
    hidden: int, depth: int, heads: int, kv_heads: int, value_heads: int, network: dict[str, tuple[int, int]]
) -> tuple[_Attention, dict[str, tuple[int, int, int]], tuple[_State, ...]]:
    """Return gated attention in every fourth layer, and Gated DeltaNet with 16 key heads in the others."""
    full, size, keys = depth // 4, 256, 16 * 128
    recurrent, values = depth - full, value_heads * 128
    matrices = {
        "qkv": (full, (2 * heads + 2 * kv_heads) * size, hidden),
        "output": (full, hidden, heads * size),
        "delta_in": (recurrent, 2 * keys + 2 * values + 2 * value_heads, hidden),
        "delta_out": (recurrent, hidden, values),
        **{kind: (depth, *sizes) for kind, sizes in network.items()},
    }
    states = ((3, 2 * keys + values), (value_heads, 128, 128)) * recurrent
    return _Attention(full, heads, kv_heads, size), matrices, states


def _qwen35_dense() -> TracedShape:
    hidden, width = 5120, 17_408
    network = {"gate_up": (2 * width, hidden), "down": (hidden, width)}
    attention, matrices, states = _qwen35(hidden, 64, 24, 4, 48, network)
    return _shape("Qwen3_5ForCausalLM", 248_320, hidden, 64, attention, matrices, states=states)


def _qwen35_moe() -> TracedShape:
    hidden, width = 2048, 512
    network = {"shared_gate_up": (2 * width, hidden), "shared_down": (hidden, width)}
    attention, matrices, states = _qwen35(hidden, 40, 16, 2, 32, network)
    experts = _Experts(40, 256, 8, width)
    return _shape(
        "Qwen3_5MoeForCausalLM", 248_320, hidden, 40, attention, matrices, experts=experts, states=states
    )


def _gemma4() -> TracedShape:
    """KV rows are those of the engine: four heads of 512 in every layer."""
    hidden, width, local, full = 2816, 2112, 25, 5
    matrices = {
        "qkv": (local, (16 + 2 * 8) * 256, hidden),
        "output": (local, hidden, 16 * 256),
        "full_qk": (full, (16 + 2) * 512, hidden),  # keys are values
        "full_output": (full, hidden, 16 * 512),
        "gate_up": (30, 2 * width, hidden),
        "down": (30, hidden, width),
    }
    windows = tuple(None if layer % 6 == 5 else 1024 for layer in range(30))
    return _shape(
        "Gemma4ForCausalLM",
        262_144,
        hidden,
        30,
        _Attention(30, 16, 4, 512),
        matrices,
        experts=_Experts(30, 128, 8, 704),
        tied=True,
        windows=windows,
    )


def _lfm2() -> TracedShape:
    hidden, full, convolutions, dense = 2048, 6, 18, 2
    matrices = {
        "qkv": (full, (32 + 2 * 8) * 64, hidden),
        "output": (full, hidden, 32 * 64),
        "conv_in": (convolutions, 3 * hidden, hidden),
        "conv_out": (convolutions, hidden, hidden),
        "gate_up": (dense, 2 * 7168, hidden),
        "down": (dense, hidden, 7168),
    }
    return _shape(
        "Lfm2MoeForCausalLM",
        128_000,
        hidden,
        24,
        _Attention(full, 32, 8, 64),
        matrices,
        experts=_Experts(22, 32, 4, 1792),
        states=((2, hidden),) * convolutions,
        tied=True,
        max_context_tokens=128_000,
    )


def _nemotron3() -> TracedShape:
    """A layer is Mamba-2, a mixture of experts, or attention."""
    hidden, full, mamba, experts, inner, groups = 2688, 6, 23, 23, 64 * 64, 8 * 128
    matrices = {
        "qkv": (full, (32 + 2 * 2) * 128, hidden),
        "output": (full, hidden, 32 * 128),
        "mamba_in": (mamba, 2 * inner + 2 * groups + 64, hidden),
        "mamba_out": (mamba, hidden, inner),
        "shared_up": (experts, 3712, hidden),
        "shared_down": (experts, hidden, 3712),
    }
    return _shape(
        "NemotronHForCausalLM",
        131_072,
        hidden,
        52,
        _Attention(full, 32, 2, 128),
        matrices,
        experts=_Experts(experts, 128, 6, 1856, has_gate=False),
        states=((3, inner + 2 * groups), (64, 64, 128)) * mamba,
    )


def _glm47_flash() -> TracedShape:
    """KV rows are latents: one head of 512 + 64."""
    hidden, depth, heads, rank, width = 2048, 47, 20, 512, 1536
    matrices = {
        "latents": (depth, 768 + rank + 64, hidden),
        "queries": (depth, heads * 256, 768),
        "keys_values": (depth, heads * (192 + 256), rank),
        "output": (depth, hidden, heads * 256),
        "gate_up": (1, 2 * 10_240, hidden),
        "down": (1, hidden, 10_240),
        "shared_gate_up": (depth - 1, 2 * width, hidden),
        "shared_down": (depth - 1, hidden, width),
    }
    return _shape(
        "Glm4MoeLiteForCausalLM",
        154_880,
        hidden,
        depth,
        _Attention(depth, heads, 1, rank + 64),
        matrices,
        experts=_Experts(depth - 1, 64, 4, width),
        max_context_tokens=202_752,
    )


# From the config.json of the releases, without vision towers and layers of multi-token prediction.
TRACED_SHAPES: dict[str, TracedShape] = {
    "qwen3.6-35b-a3b": _qwen35_moe(),
    "qwen3.8-27b": _qwen35_dense(),
    "gemma-4-26b-a4b": _gemma4(),
    "lfm2.5-8b-a1b": _lfm2(),
    "nemotron-3-nano": _nemotron3(),
    "glm-4.7-flash": _glm47_flash(),
}
