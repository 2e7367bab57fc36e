"""The named shapes against their publishers' figures."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.shapes import SHAPES, shape
from neo_desktop.models.traced_shapes import TRACED_SHAPES
from neo_desktop.models.weights import named_weights

PUBLISHED_PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
}

# As in the releases' config.json files, written by earlier versions of transformers.
PUBLISHED_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32768,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_counts_are_the_published_ones(name):
    assert shape(name).num_parameters == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_shapes_are_what_the_published_config_describes(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_CONFIGS[name]))
    published = ModelConfig.from_pretrained(tmp_path)
    assert dataclasses.replace(published, eos_token_ids=(), bos_token_id=None) == shape(name)


@pytest.mark.parametrize("name", SHAPES)
def test_num_parameters_counts_the_decoders_weights(name):
    decoder = Decoder(shape(name), dtype=torch.float16, device=torch.device("meta"))
    assert sum(math.prod(weight.shape) for weight in named_weights(decoder)) == shape(name).num_parameters


def test_parameters_that_a_token_meets_are_the_published_ones():
    for name, billions in (("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("mixtral-8x7b", 12.9)):
        assert shape(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_kv_bytes_per_token():
    assert shape("llama-2-7b").kv_bytes_per_token(torch.float16) == 524_288
    assert shape("llama-3.1-8b").kv_bytes_per_token(torch.bfloat16) == 131_072


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'gpt-5'.*llama-2-7b.*qwen3-8b"):
        shape("gpt-5")


@pytest.mark.parametrize(
    ("name", "parameters", "active", "kv_bytes", "state_bytes"),
    [  # the publishers' rounded numbers of parameters; KV rows of the engine in 16 bits
        ("qwen3.6-35b-a3b", 35e9, 3e9, 10 * 2048, 66e6),
        ("qwen3.8-27b", 27e9, 27e9, 16 * 4096, 157e6),
        ("gemma-4-26b-a4b", 25.2e9, 3.8e9, 30 * 8192, 0),
        ("lfm2.5-8b-a1b", 8.3e9, 1.5e9, 6 * 2048, 0.3e6),
        ("nemotron-3-nano", 31.6e9, 3.6e9, 6 * 1024, 50e6),
        ("glm-4.7-flash", 30e9, 3.9e9, 47 * 2304, 0),
    ],
)
def test_simulated_shapes_have_the_published_sizes(
    name: str, parameters: float, active: float, kv_bytes: int, state_bytes: float
) -> None:
    config = TRACED_SHAPES[name]
    assert config.num_parameters == pytest.approx(parameters, rel=0.03)
    assert config.active_parameters == pytest.approx(active, rel=0.16)
    assert config.kv_bytes_per_token(torch.float16) == kv_bytes
    assert config.state_bytes == pytest.approx(state_bytes, rel=0.05)
