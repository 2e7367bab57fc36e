"""Shapes of well-known models, for measurements with random weights and without a download."""

from pathlib import Path
from typing import Any

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.json_file import JsonFile

_Values = dict[str, Any]
"""Of a config.json."""
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
# No end-of-sequence tokens: random weights would stop by chance.
_COMMON: _Values = {"dtype": "bfloat16", "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None}
_LLAMA_2 = _COMMON | {"model_type": "llama", "max_position_embeddings": 4096, "dtype": "float16"}
_LLAMA_3 = _COMMON | {
    "model_type": "llama",
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA_3_2 = _LLAMA_3 | {
    "rope_scaling": _LLAMA_3["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}
_MISTRAL = _COMMON | {
    "model_type": "mistral",
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "sliding_window": None,
    "head_dim": 128,
}
_MIXTRAL = _MISTRAL | {"model_type": "mixtral"}
_QWEN = _COMMON | {
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "head_dim": 128,
}
_QWEN_2 = _QWEN | {"model_type": "qwen2", "max_position_embeddings": 32_768}
_QWEN_3 = _QWEN | {"model_type": "qwen3"}
_QWEN_3_MOE = _QWEN | {"model_type": "qwen3_moe", "norm_topk_prob": True}
_GPT_OSS = _COMMON | {"model_type": "gpt_oss"}
_SMOLLM_2 = _COMMON | {
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}
_TIED = {"tie_word_embeddings": True}


def shape(name: str) -> ModelConfig:
    """Return the shape called `name`. Raise ValueError with the known names if it is unknown."""
    if name not in SHAPES:
        raise ValueError(f"There is no shape called {name!r}: choose one of {', '.join(SHAPES)}.")
    return SHAPES[name]


def _shape(values: _Values, *sizes: int, **others: object) -> ModelConfig:
    named = dict(zip(_SIZES, sizes, strict=True))
    return ModelConfig.from_json(JsonFile(Path("shape"), values | named | others))


# From the config.json of the releases.
SHAPES: dict[str, ModelConfig] = {
    "llama-2-7b": _shape(_LLAMA_2, 32_000, 4096, 11_008, 32, 32, 32),
    "llama-2-13b": _shape(_LLAMA_2, 32_000, 5120, 13_824, 40, 40, 40),
    "llama-2-70b": _shape(_LLAMA_2, 32_000, 8192, 28_672, 80, 64, 8),
    "llama-3.1-8b": _shape(_LLAMA_3, 128_256, 4096, 14_336, 32, 32, 8),
    "llama-3.1-70b": _shape(_LLAMA_3, 128_256, 8192, 28_672, 80, 64, 8),
    "llama-3.2-1b": _shape(_LLAMA_3_2, 128_256, 2048, 8192, 16, 32, 8),
    "llama-3.2-3b": _shape(_LLAMA_3_2, 128_256, 3072, 8192, 28, 24, 8),
    "mistral-7b": _shape(_MISTRAL, 32_768, 4096, 14_336, 32, 32, 8),
    "mistral-nemo-12b": _shape(_MISTRAL, 131_072, 5120, 14_336, 40, 32, 8, max_position_embeddings=131_072),
    "mistral-small-24b": _shape(_MISTRAL, 131_072, 5120, 32_768, 40, 32, 8, rope_theta=1e8),
    "mixtral-8x7b": _shape(_MIXTRAL, 32_000, 4096, 14_336, 32, 32, 8),
    "mixtral-8x22b": _shape(_MIXTRAL, 32_000, 6144, 16_384, 56, 48, 8, max_position_embeddings=65_536),
    "qwen2.5-0.5b": _shape(_QWEN_2 | _TIED, 151_936, 896, 4864, 24, 14, 2, head_dim=64),
    "qwen2.5-1.5b": _shape(_QWEN_2 | _TIED, 151_936, 1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _shape(_QWEN_2 | _TIED, 151_936, 2048, 11_008, 36, 16, 2),
    "qwen2.5-7b": _shape(_QWEN_2, 152_064, 3584, 18_944, 28, 28, 4),
    "qwen2.5-14b": _shape(_QWEN_2, 152_064, 5120, 13_824, 48, 40, 8),
    "qwen2.5-32b": _shape(_QWEN_2, 152_064, 5120, 27_648, 64, 40, 8),
    "qwen3-0.6b": _shape(_QWEN_3 | _TIED, 151_936, 1024, 3072, 28, 16, 8),
    "qwen3-1.7b": _shape(_QWEN_3 | _TIED, 151_936, 2048, 6144, 28, 16, 8),
    "qwen3-4b": _shape(_QWEN_3 | _TIED, 151_936, 2560, 9728, 36, 32, 8),
    "qwen3-8b": _shape(_QWEN_3, 151_936, 4096, 12_288, 36, 32, 8),
    "qwen3-14b": _shape(_QWEN_3, 151_936, 5120, 17_408, 40, 40, 8),
    "qwen3-32b": _shape(_QWEN_3, 151_936, 5120, 25_600, 64, 64, 8),
    "qwen3-30b-a3b": _shape(_QWEN_3_MOE, 151_936, 2048, 6144, 48, 32, 4, moe_intermediate_size=768),
    "qwen3-235b-a22b": _shape(_QWEN_3_MOE, 151_936, 4096, 12_288, 94, 64, 4, moe_intermediate_size=1536),
    "gpt-oss-20b": _shape(_GPT_OSS, 201_088, 2880, 2880, 24, 64, 8, num_local_experts=32),
    "gpt-oss-120b": _shape(_GPT_OSS, 201_088, 2880, 2880, 36, 64, 8),
    "smollm2-135m": _shape(_SMOLLM_2, 49_152, 576, 1536, 30, 9, 3),
    "smollm2-360m": _shape(_SMOLLM_2, 49_152, 960, 2560, 32, 15, 5),
    "tiny": _shape(_LLAMA_2, 257, 64, 160, 2, 4, 2),  # for tests: the vocabulary of ByteTokenizer
}
