"""Models of every architecture in GGUF tests."""

from dataclasses import replace

import torch

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.experts_config import ExpertsConfig
from neo_desktop.models.rope import RopeConfig
from neo_desktop.models.shapes import shape
from neo_desktop.models.weights import named_weights

CPU = torch.device("cpu")
TINY = shape("tiny")
LLAMA3 = RopeConfig(500.0, (1.0, 1.0, 1.5, 2.5, 4.0, 6.0, 8.0, 8.0))
LINEAR = RopeConfig(1e3, (3.0,) * 8)
QWEN2, QWEN3, QWEN3_MOE, MISTRAL, MIXTRAL = (
    f"{name}ForCausalLM" for name in ("Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Mixtral")
)
CONFIGS = {
    "llama": TINY,
    "llama-tied": replace(TINY, tie_word_embeddings=True),
    "llama-biases": replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama-wide-heads": replace(TINY, head_dim=32),
    "llama3-rope": replace(TINY, rope=LLAMA3),
    "linear-rope": replace(TINY, rope=LINEAR),
    "mistral": replace(TINY, architecture=MISTRAL),
    "qwen2": replace(TINY, architecture=QWEN2, qkv_bias=True, rms_norm_eps=1e-6),
    "qwen2-linear-rope": replace(TINY, architecture=QWEN2, qkv_bias=True, rope=LINEAR),
    "mixtral": replace(TINY, architecture=MIXTRAL, experts=ExpertsConfig(4, 2, 64, (0, 1))),
    "qwen3-moe": replace(
        TINY, architecture=QWEN3_MOE, qk_norm=True, head_dim=32, experts=ExpertsConfig(6, 3, 128, (0, 1))
    ),
    "qwen3": replace(TINY, architecture=QWEN3, qk_norm=True, head_dim=32),
}


def made(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return a model in which every weight matters."""
    decoder = Decoder(config, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(1)
    for weight in named_weights(decoder):
        values = torch.randn(weight.shape, generator=generator) * 0.2
        weight.load(0, values + 1 if "norm" in weight.name else values)
    return decoder
