"""Small random checkpoints, saved by `transformers`, the reference for all models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}

MakeCheckpoint = Callable[..., tuple[Path, Any]]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """`make(architecture, dtype=..., **config)` saves a checkpoint; returns folder and reference model."""

    def make(
        architecture: str = "LlamaForCausalLM",
        *,
        dtype: torch.dtype = torch.float32,
        max_shard_size: str = "5GB",
        **settings: Any,
    ) -> tuple[Path, Any]:
        config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
        config = config_class(
            **SIZES | {"attn_implementation": "eager", "experts_implementation": "eager"} | settings
        )
        model = getattr(transformers, architecture)(config).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            # Wide enough that every weight, bias and norm matters to the logits.
            for name, weight in model.named_parameters():
                weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.15, generator=generator)
        model = model.to(dtype)
        model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
        return tmp_path, model

    return make
