"""Keys of config.json, absent, null, in older places, or per layer: transformers' scores or a refusal."""

import os
from pathlib import Path

import pytest
import torch
from config_cases import (
    ABSENT,
    MODEL_TYPES,
    Edit,
    config_of,
    edits_of,
    expected_scores,
    own_scores,
    sample,
)

ALL = "NEO_DESKTOP_ALL_KEYS"  # environment variable: try every edit, also with traced models
SAMPLED = 7  # edits per family
YARN: Edit = {"rope_type": "yarn", "factor": 4.0}
LONG: Edit = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
WINDOWS: Edit = {"use_sliding_window": True, "sliding_window": 9}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# Edits that once gave wrong tokens, or a wrong refusal.
FOUND: list[tuple[str, Edit]] = [
    ("mistral", {"layer_types": MIXED, "sliding_window": 9}),
    ("mixtral", {}),  # without rope_theta
    ("gpt_oss", {"rope_parameters": ABSENT}),
    ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 16}),
    ("llama", {"rope_parameters": YARN | {"truncate": None, "original_max_position_embeddings": 16}}),
    ("llama", {"rope_parameters": YARN | {"original_max_position_embeddings": 3}}),
    ("llama", {"rope_scaling": {}, "rope_parameters": YARN | {"original_max_position_embeddings": 16}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ("llama", {"hidden_act": "swish"}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
    ("qwen3", WINDOWS | {"layer_types": MIXED}),
    ("qwen3_moe", {"num_local_experts": 2}),
    ("mixtral", {"num_experts": 2}),
    ("mixtral", {"decoder_sparse_step": 2}),
]
BY_TRANSFORMERS: list[tuple[str, Edit]] = [
    ("llama", {"hidden_act": "gelu"}),
    ("mistral", {"hidden_act": "relu"}),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("mistral", {"rope_parameters": LONG, "original_max_position_embeddings": 58}),
]


def check(folder: Path, model_type: str, edit: Edit, *, with_traced: bool) -> bool:
    """Return True if both computed scores; assert that these agree."""
    folder.mkdir()
    expected = expected_scores(folder, config_of(model_type, edit))
    if expected is None:
        return False
    found = own_scores(folder, with_traced=with_traced)
    if found is None:
        return False
    error = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
    assert error < 1e-3, (model_type, edit)
    return True


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_edit_gives_the_scores_of_transformers_or_is_refused(model_type: str, tmp_path: Path) -> None:
    every = ALL in os.environ
    edits = list(edits_of(model_type)) if every else sample(model_type, SAMPLED, seed=0)
    computed = [
        check(tmp_path / str(number), model_type, edit, with_traced=every)
        for number, edit in enumerate(edits)
    ]
    assert sum(computed) >= len(edits) / 3


@pytest.mark.parametrize(("model_type", "edit"), FOUND)
def test_edits_that_were_computed_wrongly_are_computed(model_type: str, edit: Edit, tmp_path: Path) -> None:
    assert check(tmp_path / "model", model_type, edit, with_traced=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model_type", "edit"), BY_TRANSFORMERS)
def test_what_the_written_decoder_lacks_is_computed_by_transformers(
    model_type: str, edit: Edit, tmp_path: Path
) -> None:
    assert check(tmp_path / "model", model_type, edit, with_traced=True)
