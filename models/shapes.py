"""Shapes of well-known models, for measurements with random weights and without a download."""

from dataclasses import replace

import torch

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.experts_config import ClampedGate, ExpertsConfig
from neo_desktop.models.rope import Llama3Scaling, RopeConfig, YarnScaling, yarn_temperature


def shape(name: str) -> ModelConfig:
    """Return the shape called `name`. Raise ValueError with the known names if it is unknown."""
    if name not in SHAPES:
        raise ValueError(f"There is no shape called {name!r}: choose one of {', '.join(SHAPES)}.")
    return SHAPES[name]


def _shape(
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    head_dim: int = 128,
    max_context_tokens: int,
    rope: RopeConfig,
    rms_norm_eps: float = 1e-5,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    experts: ExpertsConfig | None = None,
) -> ModelConfig:
    # No end-of-sequence tokens: random weights would stop by chance.
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=rms_norm_eps,
        rope=rope,
        tie_word_embeddings=tied,
        layer_windows=(None,) * num_layers,
        dtype=dtype,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        experts=experts,
    )


def _llama2(*sizes: int, head_dim: int = 128) -> ModelConfig:
    return _shape(
        "LlamaForCausalLM",
        *sizes,
        head_dim=head_dim,
        max_context_tokens=4096,
        rope=RopeConfig(10_000.0),
        dtype=torch.float16,
    )


def _llama3(*sizes: int, factor: float, head_dim: int = 128, tied: bool = False) -> ModelConfig:
    rope = RopeConfig(500_000.0, Llama3Scaling(factor, 1.0, 4.0, original_max_tokens=8192))
    return _shape(
        "LlamaForCausalLM", *sizes, head_dim=head_dim, max_context_tokens=131_072, rope=rope, tied=tied
    )


def _mistral(*sizes: int, max_context_tokens: int = 32_768, theta: float = 1e6) -> ModelConfig:
    return _shape("MistralForCausalLM", *sizes, max_context_tokens=max_context_tokens, rope=RopeConfig(theta))


def _qwen2(*sizes: int, head_dim: int = 128, tied: bool = False) -> ModelConfig:
    return _shape(
        "Qwen2ForCausalLM",
        *sizes,
        head_dim=head_dim,
        max_context_tokens=32_768,
        rope=RopeConfig(1_000_000.0),
        rms_norm_eps=1e-6,
        tied=tied,
    )


def _qwen3(*sizes: int, tied: bool = False) -> ModelConfig:
    return _shape(
        "Qwen3ForCausalLM",
        *sizes,
        max_context_tokens=40_960,
        rope=RopeConfig(1_000_000.0),
        rms_norm_eps=1e-6,
        tied=tied,
    )


def _mixtral(*sizes: int, max_context_tokens: int = 32_768) -> ModelConfig:
    _, _, intermediate, num_layers, *_ = sizes
    return _shape(
        "MixtralForCausalLM",
        *sizes,
        max_context_tokens=max_context_tokens,
        rope=RopeConfig(1e6),
        experts=ExpertsConfig(8, 2, intermediate, tuple(range(num_layers))),
    )


def _qwen3_moe(*sizes: int, of_each: int) -> ModelConfig:
    num_layers = sizes[3]
    return _shape(
        "Qwen3MoeForCausalLM",
        *sizes,
        max_context_tokens=40_960,
        rope=RopeConfig(1_000_000.0),
        rms_norm_eps=1e-6,
        experts=ExpertsConfig(128, 8, of_each, tuple(range(num_layers))),
    )


def _gpt_oss(num_layers: int, num_experts: int) -> ModelConfig:
    scaling = YarnScaling(32.0, 4096, 32.0, 1.0, truncate=False, attention_factor=yarn_temperature(32.0))
    layers = tuple(range(num_layers))
    config = _shape(
        "GptOssForCausalLM",
        *(201_088, 2880, 2880, num_layers, 64, 8),
        head_dim=64,
        max_context_tokens=131_072,
        rope=RopeConfig(150_000.0, scaling),
        experts=ExpertsConfig(
            num_experts, 4, 2880, layers, router_bias=True, bias=True, gating=ClampedGate()
        ),
    )
    windows = tuple(None if layer % 2 else 128 for layer in layers)
    return replace(config, layer_windows=windows, qkv_bias=True, output_bias=True, attention_sinks=True)


def _smollm2(*sizes: int) -> ModelConfig:
    return _shape(
        "LlamaForCausalLM",
        49_152,
        *sizes,
        head_dim=64,
        max_context_tokens=8192,
        rope=RopeConfig(100_000.0),
        tied=True,
    )


# vocabulary, hidden, intermediate, layers, heads, key-value heads: from the config.json of the releases
SHAPES: dict[str, ModelConfig] = {
    "llama-2-7b": _llama2(32_000, 4096, 11_008, 32, 32, 32),
    "llama-2-13b": _llama2(32_000, 5120, 13_824, 40, 40, 40),
    "llama-2-70b": _llama2(32_000, 8192, 28_672, 80, 64, 8),
    "llama-3.1-8b": _llama3(128_256, 4096, 14_336, 32, 32, 8, factor=8.0),
    "llama-3.1-70b": _llama3(128_256, 8192, 28_672, 80, 64, 8, factor=8.0),
    "llama-3.2-1b": _llama3(128_256, 2048, 8192, 16, 32, 8, factor=32.0, head_dim=64, tied=True),
    "llama-3.2-3b": _llama3(128_256, 3072, 8192, 28, 24, 8, factor=32.0, tied=True),
    "mistral-7b": _mistral(32_768, 4096, 14_336, 32, 32, 8),
    "mistral-nemo-12b": _mistral(131_072, 5120, 14_336, 40, 32, 8, max_context_tokens=131_072),
    "mistral-small-24b": _mistral(131_072, 5120, 32_768, 40, 32, 8, theta=1e8),
    "mixtral-8x7b": _mixtral(32_000, 4096, 14_336, 32, 32, 8),
    "mixtral-8x22b": _mixtral(32_000, 6144, 16_384, 56, 48, 8, max_context_tokens=65_536),
    "qwen2.5-0.5b": _qwen2(151_936, 896, 4864, 24, 14, 2, head_dim=64, tied=True),
    "qwen2.5-1.5b": _qwen2(151_936, 1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": _qwen2(151_936, 2048, 11_008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _qwen2(152_064, 3584, 18_944, 28, 28, 4),
    "qwen2.5-14b": _qwen2(152_064, 5120, 13_824, 48, 40, 8),
    "qwen2.5-32b": _qwen2(152_064, 5120, 27_648, 64, 40, 8),
    "qwen3-0.6b": _qwen3(151_936, 1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(151_936, 2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3(151_936, 2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3(151_936, 4096, 12_288, 36, 32, 8),
    "qwen3-14b": _qwen3(151_936, 5120, 17_408, 40, 40, 8),
    "qwen3-32b": _qwen3(151_936, 5120, 25_600, 64, 64, 8),
    "qwen3-30b-a3b": _qwen3_moe(151_936, 2048, 6144, 48, 32, 4, of_each=768),
    "qwen3-235b-a22b": _qwen3_moe(151_936, 4096, 12_288, 94, 64, 4, of_each=1536),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3),
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5),
    "tiny": _llama2(257, 64, 160, 2, 4, 2, head_dim=16),  # for tests: the vocabulary of ByteTokenizer
}
