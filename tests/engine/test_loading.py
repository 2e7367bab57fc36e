"""Unusable devices and dtypes are refused before anything is loaded."""

from dataclasses import replace

import pytest
import torch

from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import toolchain
from neo_desktop.engine.loading import choose_device, choose_dtype
from neo_desktop.models.shapes import shape

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
CONFIG = shape("qwen3-0.6b")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_does_without_triton(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(toolchain, "find_spec", lambda module: None)
    assert choose_device("cpu").type == "cpu"
    assert not fallbacks.limits()
    for _ in range(2):
        assert choose_device(name) == CUDA
    assert fallbacks.limits() == dict.fromkeys(toolchain.KERNELS, "torch")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "pip install triton" in line


def test_without_a_gpu_nothing_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(toolchain, "find_spec", lambda module: None)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="finds no usable GPU"):
        choose_device("cuda")
    with pytest.raises(ValueError, match="'tpu' is unknown; choose one of: auto, cpu, cuda"):
        choose_device("tpu")


def test_bfloat16_is_refused_by_a_gpu_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONFIG.dtype is torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match="Tesla T4 has no bfloat16: use dtype 'float16', or 'auto'"):
        choose_dtype("bfloat16", CONFIG, CUDA)
    assert choose_dtype("auto", CONFIG, CUDA) is torch.float16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_dtype("bfloat16", CONFIG, CUDA) is choose_dtype("auto", CONFIG, CUDA) is torch.bfloat16


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("architecture", "is_beyond"),
    [
        ("Gemma3ForCausalLM", True),
        ("Gemma3ForConditionalGeneration", True),
        ("Gemma3nForConditionalGeneration", True),
        ("Gemma2ForCausalLM", True),
        ("GptOssForCausalLM", True),
        ("Glm4ForCausalLM", True),
        ("GemmaForCausalLM", False),
        ("Qwen3ForCausalLM", False),
    ],
)
def test_activations_beyond_float16_are_not_computed_in_it(
    architecture: str, is_beyond: bool, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, architecture=architecture, dtype=stored)
    for capability, otherwise in (((7, 5), torch.float32), ((8, 6), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, has=capability: has)
        usual = torch.float16 if capability < (8, 0) else stored
        assert choose_dtype("auto", config, CUDA) is (otherwise if is_beyond else usual)
        assert choose_dtype("float16", config, CUDA) is torch.float16  # an explicit request is granted
    assert choose_dtype("auto", config, CPU, 0) is (torch.bfloat16 if is_beyond else stored)
    assert choose_dtype("auto", replace(config, dtype=torch.float32), CUDA) is torch.float32
