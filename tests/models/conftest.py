"""Small random checkpoints, saved by `transformers`, the reference for all models."""

import copy
import shutil
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


@pytest.fixture(scope="session")
def saved_checkpoints() -> dict[str, tuple[Path, Any]]:
    """Folders and models that `make_checkpoint` has made, by its arguments."""
    return {}


@pytest.fixture
def make_checkpoint(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    saved_checkpoints: dict[str, tuple[Path, Any]],
) -> MakeCheckpoint:
    """`make(architecture, dtype=..., **config)` saves a checkpoint; returns folder and reference model."""

    def make(architecture: str = "LlamaForCausalLM", **settings: Any) -> tuple[Path, Any]:
        key = f"{architecture} {sorted(settings.items())}"
        if key not in saved_checkpoints:
            folder = tmp_path_factory.mktemp("saved")
            saved_checkpoints[key] = folder, save(folder, architecture, **settings)
        folder, model = saved_checkpoints[key]
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        return tmp_path, copy.deepcopy(model)

    return make


def save(
    folder: Path,
    architecture: str,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **settings: Any,
) -> Any:
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    model = getattr(transformers, architecture)(config_class(**SIZES | EAGER | settings)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # Wide enough that every weight, bias and norm matters to the logits.
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.15, generator=generator)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
