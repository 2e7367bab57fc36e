"""Small models of transformers with random weights."""

from pathlib import Path
from typing import Any

import torch
from checkpoints import save_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Multiples of 64, as in expert matrices.
EXPERTS = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
}
SWA = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Two sizes of heads, and layers with different numbers of KV heads; keys are values in layers without window.
GEMMA_4 = SWA | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 30.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gemma2": (  # query_pre_attn_scalar and softcaps have effects here
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 9}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 3.0}),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "gpt-neox": ("gpt_neox", {}),
    "falcon": ("falcon", {}),
    "falcon-grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "starcoder2": ("starcoder2", {}),
    "cohere2": (  # rotations pair neighboring numbers; full layers have none
        "cohere2",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "apertus": ("apertus", {}),  # the checkpoint holds activation parameters
    "olmoe": ("olmoe", EXPERTS | {"num_experts": 8}),
    "qwen2-moe": ("qwen2_moe", EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 64}),
    # Attention sinks; full layers have no rotations.
    "granite-swa": ("granite_swa", SWA | {"attention_multiplier": 0.3, "layer_rope_theta": [1e4, 0]}),
    "granite-moe-swa": ("granitemoe_swa", EXPERTS | SWA | {"num_local_experts": 8}),
    "flint": (
        "flint",
        EXPERTS | SWA | {"head_dim": 16, "num_experts": 8, "shared_expert_intermediate_size": 64},
    ),
    # A layer's experts in one tensor.
    "granite-moe": ("granitemoe", EXPERTS | {"num_local_experts": 8, "residual_multiplier": 0.7}),
    # Values narrower than keys; complex rotations; experts chosen by groups.
    "deepseek-v2": (
        "deepseek_v2",
        EXPERTS | LATENT | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "gemma4": ("gemma4_text", GEMMA_4),
    "gemma4-odd": (  # heads that are padded with zeros
        "gemma4_text",
        GEMMA_4
        | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24, "global_head_dim": 40}
        | {"num_global_key_value_heads": 1},
    ),
    "gemma4-moe": (  # experts with GELU beside a dense network
        "gemma4_text",
        GEMMA_4
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    ),
    "gemma4-e": (  # embeddings per layer; the last layers read earlier layers' keys and values
        "gemma4_text",
        GEMMA_4
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "num_key_value_heads": 2,
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": 300,
            "use_double_wide_mlp": True,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "olmo3": ("olmo3", SWA | {"rope_parameters": YARN}),
    "ministral3": (  # queries are scaled by position
        "ministral3",
        {"head_dim": 16, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    ),
    "glm4-moe": (
        "glm4_moe",
        EXPERTS
        | {"head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", EXPERTS | LATENT | {"n_group": 1, "topk_group": 1}),
    # Router biases in float32 in checkpoints.
    "deepseek-v3": ("deepseek_v3", EXPERTS | LATENT | {"n_group": 4, "topk_group": 2}),
    # Shared experts beside routed ones; gated attention.
    "afmoe": ("afmoe", EXPERTS | {"moe_intermediate_size": 128, "num_experts": 8, "head_dim": 16}),
    "bitnet": ("bitnet", {}),  # a norm between attention and the output matmul
    "glm4": ("glm4", {"head_dim": 16}),  # rotates only a part of a head, in adjacent pairs
    "gpt-bigcode": ("gpt_bigcode", {"n_inner": 96}),  # one key-value head; learned positions
    "nemotron": ("nemotron", {"head_dim": 16}),  # norms add one to their weights
}


def save(folder: Path, model_type: str, changes: dict[str, Any], seed: int = 0) -> Path:
    """Write a checkpoint of a small model with random weights."""
    torch.manual_seed(seed)
    names = dict(SIZES)
    if model_type in ("opt", "gpt_neox", "falcon"):
        del names["num_key_value_heads"]
    make: Any = AutoModelForCausalLM
    model = make.from_config(CONFIG_MAPPING[model_type](**(names | changes)))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.normal_(parameter, mean=0.8, std=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.0)
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(0.0, 0.3)
    model.eval().save_pretrained(folder)
    save_tokenizer(folder)
    return folder
