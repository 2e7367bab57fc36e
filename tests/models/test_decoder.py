"""The decoder against `transformers`, on every family and in every variant that config.json can describe."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.layers import rotary, rotate
from neo_desktop.models.registry import load_model, random_model
from neo_desktop.models.rope import RopeConfig
from neo_desktop.models.shapes import shape

CPU = torch.device("cpu")
NUM_TOKENS = 80

LLAMA, MISTRAL, QWEN2, QWEN3 = (f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3"))
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama-multi-head": (LLAMA, {"num_key_value_heads": 4}),
    "llama-multi-query": (LLAMA, {"num_key_value_heads": 1}),
    "llama-one-head": (LLAMA, {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "llama-head-dim": (LLAMA, {"head_dim": 32}),
    "llama-tied": (LLAMA, {"tie_word_embeddings": True}),
    "llama-biases": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama-eps": (LLAMA, {"rms_norm_eps": 0.1}),
    "llama-theta": (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}),
    "llama3-rope": (LLAMA, {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (LLAMA, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 3.0}}),
    "mistral": (MISTRAL, {"sliding_window": None}),
    "mistral-window": (MISTRAL, {"sliding_window": 9}),
    "qwen2": (QWEN2, {}),
    "qwen2-tied": (QWEN2, {"tie_word_embeddings": True}),
    "qwen2-window": (QWEN2, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2-yarn": (QWEN2, {"rope_parameters": YARN_ROPE}),
    "yarn-temperature": (QWEN2, {"rope_parameters": YARN_ROPE | {"attention_factor": 1.3}}),
    "yarn-two-scales": (QWEN2, {"rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "yarn-betas": (
        LLAMA,
        {
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "truncate": False,
            },
        },
    ),
    "qwen3": (QWEN3, {"head_dim": 16}),
    "qwen3-tied": (QWEN3, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biases": (QWEN3, {"head_dim": 16, "attention_bias": True}),
    "qwen3-window": (
        QWEN3,
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def logits_of_all(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """Run one sequence `[n]` with plain dense attention; returns `[n, vocab]`."""
    positions = torch.arange(len(token_ids))
    hidden, rotation = decoder.embed(token_ids), decoder.rotary(positions)
    for layer, window in enumerate(decoder.config.layer_windows):
        qkv = decoder.pre_attention(layer, hidden, rotation)
        distance = positions[:, None] - positions
        visible = (distance >= 0) & (distance < (window or len(token_ids)))
        attended = scaled_dot_product_attention(
            *(heads.transpose(0, 1) for heads in qkv),
            attn_mask=visible,
            scale=decoder.config.attention_scale,
            enable_gqa=True,
        )
        hidden = decoder.post_attention(layer, hidden, attended.transpose(0, 1))
    return decoder.logits(hidden)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_with_transformers(variant, make_checkpoint):
    architecture, settings = VARIANTS[variant]
    path, reference = make_checkpoint(architecture, **settings)
    config = ModelConfig.from_pretrained(path)
    decoder = load_model(path, config, dtype=torch.float32, device=CPU)
    token_ids = torch.randint(0, config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))

    with torch.no_grad():
        expected = reference(token_ids[None]).logits[0]
    logits = logits_of_all(decoder, token_ids)

    assert expected.std() > 0.3  # or agreement would say little
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert config.num_parameters == sum(weight.numel() for weight in reference.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["llama3-rope", "qwen2", "qwen3"])
def test_16_bit_logits_are_as_exact_as_those_of_transformers(variant, dtype, make_checkpoint):
    architecture, settings = VARIANTS[variant]
    path, reference = make_checkpoint(architecture, dtype=dtype, **settings)
    config = ModelConfig.from_pretrained(path)
    assert config.dtype == dtype
    token_ids = torch.randint(0, config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))

    with torch.no_grad():
        theirs = reference(token_ids[None]).logits[0].float()
        exact = reference.double()(token_ids[None]).logits[0]
    ours = logits_of_all(load_model(path, config, dtype=dtype, device=CPU), token_ids)

    assert (ours - exact).square().mean() <= 1.5 * (theirs - exact).square().mean()


def test_tokens_of_a_sub_batch_do_not_influence_each_other():
    decoder = random_model(shape("tiny"), dtype=torch.float32, device=CPU)
    token_ids = torch.randint(0, 257, (9,), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([5, 0, 4000, 1, 2, 3, 77, 8, 9])
    whole = decoder.pre_attention(0, decoder.embed(token_ids), decoder.rotary(positions))
    for row in range(9):
        one = slice(row, row + 1)
        alone = decoder.pre_attention(0, decoder.embed(token_ids[one]), decoder.rotary(positions[one]))
        for heads_alone, heads_whole in zip(alone, whole, strict=True):
            torch.testing.assert_close(heads_alone, heads_whole[one], rtol=0, atol=1e-6)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    frequencies = RopeConfig(theta=10_000.0).inverse_frequencies(64)
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, 1, 5, 64, generator=generator)

    def score(query_position: int, key_position: int) -> Tensor:
        rotations = [rotary(torch.tensor([at]), frequencies, 1.0) for at in (query_position, key_position)]
        return (rotate(query, rotations[0]) * rotate(key, rotations[1])).sum(-1)

    torch.testing.assert_close(score(900, 880), score(20, 0), rtol=0, atol=1e-3)
    torch.testing.assert_close(score(33, 33), (query * key).sum(-1), rtol=0, atol=1e-4)
    assert (score(900, 880) - score(900, 881)).abs().max() > 0.1


def test_random_models_are_the_same_for_the_same_seed():
    first, same, other = (
        random_model(shape("tiny"), dtype=torch.float16, device=CPU, seed=seed) for seed in (7, 7, 8)
    )
    token_ids = torch.arange(20)
    assert torch.equal(logits_of_all(first, token_ids), logits_of_all(same, token_ids))
    assert not torch.equal(logits_of_all(first, token_ids), logits_of_all(other, token_ids))
    assert first.layers[0].qkv.dense().std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.all(first.final_norm == 1)


def test_each_token_has_contiguous_heads():
    decoder = random_model(shape("tiny"), dtype=torch.float32, device=CPU)
    for heads in decoder.pre_attention(0, decoder.embed(torch.arange(6)), decoder.rotary(torch.arange(6))):
        assert heads.stride()[1:] == (16, 1)
