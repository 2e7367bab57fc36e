"""A model written as a GGUF file reads back unchanged."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import CONFIGS, LLAMA3, TINY, made
from torch import Tensor

from benchmarks.llama_cpp import check_expressible
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.gguf.checkpoint import GGUFCheckpoint
from neo_desktop.models.gguf.writer import write_gguf
from neo_desktop.models.rope import FactorScaling, LinearScaling, RopeConfig, YarnScaling
from neo_desktop.models.weights import named_weights

gguf = pytest.importorskip("gguf")


def read(config: ModelConfig, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
    """Write a model and read the file back."""
    decoder = made(config, dtype)
    write_gguf(gguf, decoder, folder / "model.gguf")
    return gguf.GGUFReader(folder / "model.gguf"), decoder


def tensors_of(reader: Any) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in reader.tensors}


def values_of(tensor: Any) -> Tensor:
    """Return a tensor's values in 32 bits; reads the file's bytes without the library."""
    shape_of = tuple(int(size) for size in reversed(tensor.shape))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[tensor.tensor_type.name]
    return torch.frombuffer(bytearray(tensor.data.tobytes()), dtype=dtype).reshape(shape_of).float()


def test_the_file_describes_the_model(tmp_path: Path) -> None:
    config = replace(CONFIGS["qwen3"], rope=RopeConfig(1e3, LinearScaling(3.0)))
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


def test_a_rotation_that_was_read_from_a_file_is_written_again(tmp_path: Path) -> None:
    read(CONFIGS["llama3-rope"], tmp_path)
    first = rope_of(tmp_path / "model.gguf")
    assert isinstance(first.scaling, FactorScaling)
    read(replace(TINY, rope=first), tmp_path)
    found, expected = (rope.inverse_frequencies(16) for rope in (rope_of(tmp_path / "model.gguf"), first))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, LLAMA3.inverse_frequencies(16))


def rope_of(path: Path) -> RopeConfig:
    return GGUFCheckpoint(path).config().rope


def test_rows_of_q_and_k_are_ordered_for_the_rotation_of_neighbours(tmp_path: Path) -> None:
    reader, decoder = read(CONFIGS["llama-biases"], tmp_path)
    tensors = tensors_of(reader)
    layer = decoder.layers[0]
    qkv, bias = layer.qkv.dense(), layer.qkv.bias
    assert bias is not None
    for begin, num_heads, name in ((0, 4, "attn_q"), (64, 2, "attn_k")):
        for kind, ours in (("weight", qkv), ("bias", bias)):
            theirs = values_of(tensors[f"blk.0.{name}.{kind}"])
            for head in range(num_heads):
                for channel in range(8):  # rotates with the channel half a head further on
                    row = begin + 16 * head + channel
                    assert torch.equal(theirs[16 * head + 2 * channel], ours[row])
                    assert torch.equal(theirs[16 * head + 2 * channel + 1], ours[row + 8])
    assert torch.equal(values_of(tensors["blk.0.attn_v.weight"]), qkv[96:])


@pytest.mark.parametrize(
    "config",
    [
        replace(TINY, architecture="GptForCausalLM"),
        replace(TINY, layer_windows=(None, 16)),
        replace(CONFIGS["qwen2"], rope=LLAMA3),
        replace(CONFIGS["qwen2"], rope=RopeConfig(1e4, FactorScaling((1.0,) * 8))),
        replace(TINY, rope=RopeConfig(1e4, YarnScaling(4.0, 32, 32.0, 1.0, True, 1.1))),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(config: ModelConfig) -> None:
    with pytest.raises(ValueError, match=r"llama\.cpp cannot run this model"):
        check_expressible(config)
