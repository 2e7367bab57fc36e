"""A model written as a GGUF file reads back unchanged."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import CONFIGS, made

from benchmarks.gguf_writer import write_gguf
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.gguf.checkpoint import GGUFCheckpoint
from neo_desktop.models.rope import RopeConfig
from neo_desktop.models.weights import named_weights

gguf = pytest.importorskip("gguf")


def read(config: ModelConfig, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
    """Write a model and read the file back."""
    decoder = made(config, dtype)
    write_gguf(gguf, decoder, folder / "model.gguf")
    return gguf.GGUFReader(folder / "model.gguf"), decoder


def test_the_file_describes_the_model(tmp_path: Path) -> None:
    config = replace(CONFIGS["qwen3"], rope=RopeConfig(1e3, (3.0,) * 16))
    reader, _ = read(config, tmp_path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.architecture"] == "qwen3"
    assert len(values["tokenizer.ggml.tokens"]) == 257
    expected = {
        "vocab_size": 257,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 160,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 32,
        "rope.freq_base": 1e3,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 3.0,
    }
    assert {name: values[f"qwen3.{name}"] for name in expected} == expected
    assert values["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_written_is_read_as_it_was(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    _, decoder = read(config, tmp_path, dtype)
    found = GGUFCheckpoint(tmp_path / "model.gguf").weights().tensors
    weights = {weight.name: weight.dense() for weight in named_weights(decoder)}
    assert found.keys() == weights.keys()
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    for each, weight in weights.items():
        assert found[each].type_name == (kinds[dtype] if weight.ndim == 2 else "F32")
        assert torch.equal(found[each].read().float(), weight.float())
