"""More traced models, each with a feature that the main families lack."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import logits_of_all
from traced_models import EXPERTS, save
from transformers import AutoModelForCausalLM

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.registry import load_model, stages_of
from neo_desktop.models.traced.config import read_traced

CPU = torch.device("cpu")
TOKENS = torch.randint(3, 300, (20,), generator=torch.Generator().manual_seed(1))
OTHERS: dict[str, dict[str, Any]] = {
    # Shared experts beside routed ones; gated attention.
    "afmoe": EXPERTS | {"moe_intermediate_size": 128, "num_experts": 8, "head_dim": 16},
    "bitnet": {},  # a norm between attention and the output matmul
    "glm4": {"head_dim": 16},  # rotates only a part of a head, in adjacent pairs
    "gpt_bigcode": {"n_inner": 96},  # one key-value head; learned positions
    "nemotron": {"head_dim": 16},  # norms add one to their weights
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", OTHERS)
def test_scores_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    path = save(tmp_path, model_type, OTHERS[model_type])
    make: Any = AutoModelForCausalLM
    model = make.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(TOKENS[None]).logits[0]
    decoder = load_model(open_checkpoint(path), read_traced(path), dtype=torch.float32, device=CPU)
    found = logits_of_all(decoder, TOKENS, stages=stages_of(decoder, None))
    assert torch.linalg.vector_norm(found - expected) <= 1e-4 * torch.linalg.vector_norm(expected)
