"""Layers of multi-token prediction: the numbers of a reference in torch."""

from pathlib import Path

import pytest
import torch
from dense_model import logits_of_all
from predicting_models import Reference, save_predicting, write_predicting

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.registry import check_model, load_model, load_prediction, open_prediction, stages_of
from neo_desktop.models.traced.config import TracedConfig

CPU = torch.device("cpu")


def assert_same_predictions(path: Path, reference: Reference) -> None:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    main = load_model(checkpoint, config, dtype=torch.float32, device=CPU)
    assert isinstance(config, TracedConfig)
    tensors = check_model(checkpoint, config).predicting
    layer = load_prediction(*open_prediction(checkpoint, config, tensors), main)
    assert layer.embedding is main.embedding
    tokens = torch.randint(3, 300, (30,), generator=torch.Generator().manual_seed(1))
    hidden = reference.hidden(tokens[:-1])
    expected, _ = reference.predict(tokens[1:], hidden)
    layer.given = torch.arange(29), hidden
    logits = logits_of_all(layer, tokens[1:], stages=stages_of(layer, None))
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3.5", "qwen3.5-moe", "qwen3-next", "glm4-moe", "glm4-moe-lite", "deepseek-v3"),
        *("nemotron-h-moe",),
    ],
)
def test_a_layer_predicts_what_the_reference_predicts(family: str, tmp_path: Path) -> None:
    assert_same_predictions(tmp_path, save_predicting(tmp_path, family))


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5 moe", "glm4 moe", "nemotron-h moe latent"])
def test_a_layer_in_a_gguf_file_predicts_the_same(family: str, tmp_path: Path) -> None:
    assert_same_predictions(*write_predicting(tmp_path, family))
