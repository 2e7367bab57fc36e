"""Small models of transformers with recurrent layers, for `traced_models.save`."""

from typing import Any

_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": _LINEAR,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "head_dim": 16,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "chunk_size": 16,
}
_CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
GRANITE_MOE: tuple[str, dict[str, Any]] = (
    "granitemoehybrid",
    _MAMBA
    | {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "shared_intermediate_size": 96,
    },
)
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5_text", _DELTA),
    "qwen3.5-moe": ("qwen3_5_moe_text", _DELTA | _EXPERTS),
    "qwen3-next": (
        "qwen3_next",
        _DELTA | _EXPERTS | {"linear_num_value_heads": 6, "linear_num_key_heads": 3},
    ),
    "olmo-hybrid": ("olmo_hybrid", _DELTA | {"linear_num_key_heads": 4}),
    "lfm2": ("lfm2", _CONV | {"conv_L_cache": 3}),
    "lfm2-moe": ("lfm2_moe", _CONV | _EXPERTS | {"num_dense_layers": 1}),
    "nemotron-h": (
        "nemotron_h",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            **_NEMOTRON,
        },
    ),
    "nemotron-h-moe": (  # experts without gates, also before the first attention
        "nemotron_h",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["moe", "mamba", "attention", "moe"],
            **_NEMOTRON,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 96,
        },
    ),
    "mamba-2": (  # no attention
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "expand": 2, "chunk_size": 16},
    ),
    "granite-4-h": (
        "granitemoehybrid",
        _MAMBA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
        },
    ),
    "falcon-h1": ("falcon_h1", _MAMBA | {"mamba_d_ssm": 128, "head_dim": 16, "mamba_n_groups": 1}),
    "zamba-2": (  # one attention, with adapters, serves several layers
        "zamba2",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "hybrid_layer_ids": [1, 3],
            "num_mem_blocks": 1,
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "chunk_size": 16,
        },
    ),
    "bamba": ("bamba", _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
}
"""Name -> type and changes of its configuration. Layers of both kinds alternate in various orders."""
SEVERAL_ATTENTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": (
        "qwen3_5_text",
        _DELTA | {"num_hidden_layers": 5, "layer_types": [*_LINEAR, "full_attention", "linear_attention"]},
    ),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", "conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 3,
        },
    ),
    "granite-4-h": (
        "granitemoehybrid",
        RECURRENT["granite-4-h"][1]
        | {"num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "attention"]},
    ),
    "falcon-h1": ("falcon_h1", RECURRENT["falcon-h1"][1] | {"num_hidden_layers": 3}),
}
"""As `RECURRENT`, with two or three attentions, so that async decodes pass stages in between."""
