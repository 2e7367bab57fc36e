"""The decoder against `transformers`, for every family and every variant that config.json can describe."""

from typing import Any

import pytest
import torch
from dense_model import logits_of_all
from torch import Tensor

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.registry import load_model, random_model
from neo_desktop.models.shapes import shape
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import Scratch, State

CPU = torch.device("cpu")
NUM_TOKENS = 80

LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GPT_OSS = (
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "GptOss")
)
EXPERTS = {"hidden_size": 64, "num_experts": 6}
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
GPT_OSS_SIZES = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
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
    "mixtral": (MIXTRAL, {"hidden_size": 64, "intermediate_size": 128}),
    "mixtral-window": (
        MIXTRAL,
        {"hidden_size": 64, "intermediate_size": 64, "sliding_window": 9, "num_experts_per_tok": 3},
    ),
    "qwen3-moe": (QWEN3_MOE, EXPERTS | {"moe_intermediate_size": 64, "num_experts_per_tok": 2}),
    "qwen3-moe-normalised": (
        QWEN3_MOE,
        EXPERTS | {"moe_intermediate_size": 128, "num_experts_per_tok": 5, "norm_topk_prob": True},
    ),
    "qwen3-moe-few-layers": (
        QWEN3_MOE,
        EXPERTS | {"moe_intermediate_size": 64, "num_experts_per_tok": 1, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-step": (
        QWEN3_MOE,
        EXPERTS | {"moe_intermediate_size": 64, "num_experts_per_tok": 6, "decoder_sparse_step": 2},
    ),
    "qwen3-moe-window": (
        QWEN3_MOE,
        EXPERTS
        | {
            "moe_intermediate_size": 64,
            "num_experts_per_tok": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "gpt-oss": (GPT_OSS, GPT_OSS_SIZES),
    "gpt-oss-clamped": (GPT_OSS, GPT_OSS_SIZES | {"swiglu_limit": 0.4, "swiglu_alpha": 2.0}),
    "gpt-oss-windows": (
        GPT_OSS,
        GPT_OSS_SIZES
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 5},
    ),
    "gpt-oss-yarn": (
        GPT_OSS,
        GPT_OSS_SIZES | {"rope_parameters": YARN_ROPE | {"truncate": False, "beta_fast": 32.0}},
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


def state_of(stages: Stages, token_ids: Tensor, positions: Tensor) -> State:
    """Return a state that is ready for the first layer."""
    of = stages.config, len(token_ids), stages.decoder.dtype, CPU
    state = State.empty(*of, Scratch.empty(*of))
    stages.embed(token_ids, positions, state)
    return state


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_with_transformers(variant, make_checkpoint):
    architecture, settings = VARIANTS[variant]
    path, reference = make_checkpoint(architecture, **settings)
    config = ModelConfig.from_pretrained(path)
    decoder = load_model(open_checkpoint(path), config, dtype=torch.float32, device=CPU)
    token_ids = torch.randint(0, config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))

    with torch.no_grad():
        expected = reference(token_ids[None]).logits[0]
    logits = logits_of_all(decoder, token_ids)

    assert expected.std() > 0.3  # otherwise agreement would mean little
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert config.num_parameters == sum(weight.numel() for weight in reference.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["llama3-rope", "qwen2", "qwen3", "qwen3-moe", "mixtral"])
def test_16_bit_logits_are_as_exact_as_those_of_transformers(variant, dtype, make_checkpoint):
    architecture, settings = VARIANTS[variant]
    path, reference = make_checkpoint(architecture, dtype=dtype, **settings)
    config = ModelConfig.from_pretrained(path)
    assert config.dtype == dtype
    token_ids = torch.randint(0, config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))

    with torch.no_grad():
        theirs = reference(token_ids[None]).logits[0].float()
        exact = reference.double()(token_ids[None]).logits[0]
    ours = logits_of_all(load_model(open_checkpoint(path), config, dtype=dtype, device=CPU), token_ids)

    # The median over the tokens: near a tie, a token may choose other experts.
    errors, of_theirs = ((logits - exact).square().mean(1).median() for logits in (ours, theirs))
    assert errors <= 1.5 * of_theirs


def test_tokens_of_a_sub_batch_do_not_influence_each_other():
    decoder = random_model(shape("tiny"), dtype=torch.float32, device=CPU)
    token_ids = torch.randint(0, 257, (9,), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([5, 0, 4000, 1, 2, 3, 77, 8, 9])
    stages = Stages(decoder)
    whole = state_of(stages, token_ids, positions)
    stages.advance(0, whole)
    for row in range(9):
        one = slice(row, row + 1)
        alone = state_of(stages, token_ids[one], positions[one])
        stages.advance(0, alone)
        for heads_alone, heads_whole in zip(stages.heads(alone), stages.heads(whole), strict=True):
            torch.testing.assert_close(heads_alone, heads_whole[one], rtol=0, atol=1e-6)


def test_states_of_more_rows_and_selections_of_rows_give_the_same():
    """An executor keeps one state for all iterations, and takes only the last rows of prompts at the end."""
    stages = Stages(random_model(shape("tiny"), dtype=torch.float32, device=CPU))
    config = stages.config
    token_ids, positions = torch.arange(7), torch.arange(20, 27)
    expected = state_of(stages, token_ids, positions)
    attention = torch.randn(expected.attention.shape, generator=torch.Generator().manual_seed(4))
    large = State.empty(config, 9, torch.float32, CPU, Scratch.empty(config, 9, torch.float32, CPU))
    for tensor in (large.residual, large.x, large.qkv, large.attention, large.cos, large.sin):
        tensor.fill_(torch.nan)
    found = large.first(7)
    stages.embed(token_ids.int(), positions.int(), found)
    for state in (expected, found):
        stages.advance(0, state)
        state.attention.copy_(attention)
    rows = torch.tensor([6, 2])
    room = state_of(stages, token_ids, positions)
    for first, row in enumerate(rows):  # as from two sub-batches
        found.select(row.view(1), room, first)
    selected = room.first(len(rows))
    normed = [torch.empty_like(state.residual) for state in (expected, found, selected)]
    for state, out in zip((expected, found, selected), normed, strict=True):
        stages.advance(stages.config.num_layers, state)
        stages.final_norm(state, out)
    for out, at in ((normed[1], slice(None)), (normed[2], rows)):
        torch.testing.assert_close(out, normed[0][at], rtol=1e-5, atol=1e-5)


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
    stages = Stages(random_model(shape("tiny"), dtype=torch.float32, device=CPU))
    state = state_of(stages, torch.arange(6), torch.arange(6))
    stages.advance(0, state)
    for heads in stages.heads(state):
        assert heads.stride()[1:] == (16, 1)
