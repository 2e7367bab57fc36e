"""Models with quantised weights on a GPU, with imitated memory and interpreted kernels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import logits_of_all
from fallback_levels import Levels, kernels_on
from gguf_files import write_gguf

from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.loading import gpu_form, kept_form
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.profiling.budget import (
    DEVICE_RESERVE_BYTES,
    GIB,
    activation_bytes,
    limits_of,
)
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.stored_form import StoredForm, stored_form

CPU = torch.device("cpu")
SIZES = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
TOKENS = torch.randint(0, 320, (18,), generator=torch.Generator().manual_seed(1))


def form_of(path: Path) -> StoredForm:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    return stored_form(check_model(checkpoint, config), config)


def kept_and_dequantised(path: Path, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    form = form_of(path).on_gpu(dispatch)
    kept = load_model(checkpoint, config, dtype=dtype, device=CPU, form=form)
    assert kept.nbytes == config.weight_bytes(dtype, form)
    assert config.loading_bytes(dtype, CPU, form) > kept.nbytes
    return kept, load_model(checkpoint, config, dtype=dtype, device=CPU)


@pytest.mark.sample(0)
@pytest.mark.parametrize(("type_name", "tied", "level"), [("Q4_1", True, "exact"), ("Q8_0", False, "torch")])
def test_a_model_computes_with_the_weights_of_its_file(
    type_name: str, tied: bool, level: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """The prompt is too long for packed-weight kernels; its first token alone uses them."""
    sizes = SIZES | {"vocab_size": 272, "num_hidden_layers": 1, "intermediate_size": 64}
    _, model = make_checkpoint(**sizes, tie_word_embeddings=tied, attention_bias=True)
    path = write_gguf(tmp_path / "model.gguf", model, type_name=type_name)
    with kernels_on(level):
        kept, dequantised = kept_and_dequantised(path, torch.float32)
        assert {linear.form for linear in kept.linears()} == {type_name}
        for tokens in (TOKENS % 272, TOKENS[:1] % 272):
            found, expected = (logits_of_all(each, tokens) for each in (kept, dequantised))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_fused_matrix_with_floats_is_dequantised_and_it_is_said(
    make_checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    _, model = make_checkpoint(**SIZES)
    names = {"attn_v": "Q8_0", "ffn_up": "BF16", "ffn_down": "IQ4_NL"}
    path = write_gguf(tmp_path / "a.gguf", model, type_name="Q4_0", type_names=names)
    kept, dequantised = kept_and_dequantised(path, torch.float32)
    assert "a: weights in Q4_0, BF16 and IQ4_NL, some Q4_0 dequantised to float32, others kept" in caplog.text
    for layer, other in zip(kept.layers, dequantised.layers, strict=True):
        assert (layer.qkv.form, layer.output.form) == ("Q4_0+Q8_0", "Q4_0")
        assert layer.mlp.gate_up.form == other.mlp.gate_up.form
        assert layer.mlp.down.form == "IQ4_NL"
    assert kept.lm_head.form == "Q4_0"


def test_a_gpu_keeps_weights_as_they_are_stored_unless_asked_otherwise(
    make_checkpoint: Any, tmp_path: Path, levels: Levels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs without kernels keep weights quantised only if floats do not fit."""
    _, model = make_checkpoint(**SIZES)
    form = form_of(write_gguf(tmp_path / "a.gguf", model, type_name="Q4_1"))
    options, cuda = EngineOptions(max_batch_tokens=256), torch.device("cuda")
    config = open_checkpoint(tmp_path / "a.gguf").config()
    assert kept_form(form, options, CPU, config) == form
    assert kept_form(form, options, cuda, config) == gpu_form(form)
    assert kept_form(form, replace(options, weights_dtype="float16"), cuda, config) == gpu_form(DENSE)
    levels(quantised="torch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    iteration = activation_bytes(config, limits_of(options, cuda), torch.bfloat16) + DEVICE_RESERVE_BYTES
    room = iteration + config.weight_bytes(torch.bfloat16, gpu_form(DENSE))
    for gpu_bytes, expected in ((room, gpu_form(DENSE)), (room - 1, gpu_form(form))):
        assert kept_form(form, options, cuda, config, gpu_bytes) == expected
    capped = replace(options, gpu_memory_gib=iteration / GIB)
    assert kept_form(form, capped, cuda, config, room) == gpu_form(form)
