"""gpt-oss from every published format: the same numbers, and 4-bit weights stay in 4 bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import logits_of_all
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder, Experts
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.stored_form import stored_form

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
}
NUMBERS = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1))


def loaded(path: Path, *, keeps: bool = False) -> Decoder:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    if not keeps:
        return load_model(checkpoint, config, dtype=torch.float32, device=CPU)
    form = stored_form(check_model(checkpoint, config), config)
    kept = load_model(checkpoint, config, dtype=torch.float32, device=CPU, form=form)
    assert kept.nbytes == config.weight_bytes(torch.float32, form)
    return kept


def in_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Store a checkpoint's experts in OpenAI's MXFP4 layout; return their new values as floats."""
    tensors, floats = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator
        )
        scales = torch.randint(120, 125, blocks.shape[:3], dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        pairs = torch.stack((NUMBERS[(blocks & 15).int()], NUMBERS[(blocks >> 4).int()]), -1)
        values = pairs.flatten(3) * torch.exp2(scales.float() - 127).unsqueeze(-1)
        floats[name] = values.flatten(2).transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    description = json.loads((folder / "config.json").read_text())
    description["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(description))
    return floats


def test_experts_in_mxfp4_stay_so(make_checkpoint: Any) -> None:
    path, reference = make_checkpoint("GptOssForCausalLM", **SIZES)
    floats = in_mxfp4(path)
    for name, value in floats.items():
        reference.get_parameter(name).data.copy_(value)
    with torch.no_grad():
        expected = reference(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of_all(loaded(path), TOKENS), expected, rtol=0, atol=1e-4)
    kept = loaded(path, keeps=True)
    for layer in kept.layers:
        assert isinstance(layer.mlp, Experts)
        assert {each.form for each in (layer.mlp.gate, layer.mlp.up, layer.mlp.down)} == {"MXFP4"}
        assert layer.qkv.form != "MXFP4"
    found = logits_of_all(kept, TOKENS)
    # The median over the tokens: near a tie, a token may choose other experts.
    assert 0 < (found - expected).norm(dim=1).median() < 0.03 * expected.norm(dim=1).median()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_llama_cpp_give_the_same(dtype: torch.dtype, make_checkpoint: Any, tmp_path: Path) -> None:
    folder, reference = make_checkpoint("GptOssForCausalLM", dtype=dtype, **SIZES)
    type_name = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    path = write_gguf(tmp_path / "model.gguf", reference, architecture="gpt-oss", type_name=type_name)
    ours, theirs = open_checkpoint(path).config(), open_checkpoint(folder).config()
    assert ours.layer_windows == theirs.layer_windows == (9, None, 9)
    assert (ours.experts, ours.rope, ours.attention_sinks) == (theirs.experts, theirs.rope, True)
    assert torch.equal(logits_of_all(loaded(path), TOKENS), logits_of_all(loaded(folder), TOKENS))


def test_files_of_llama_cpp_in_mxfp4_stay_so(make_checkpoint: Any, tmp_path: Path) -> None:
    _, reference = make_checkpoint("GptOssForCausalLM", **SIZES)
    kinds = {"_exps.weight": "MXFP4"}
    path = write_gguf(tmp_path / "model.gguf", reference, architecture="gpt-oss", type_names=kinds)
    kept, dense = loaded(path, keeps=True), loaded(path)
    assert {layer.mlp.gate.form for layer in kept.layers if isinstance(layer.mlp, Experts)} == {"MXFP4"}
    expected = logits_of_all(dense, TOKENS)
    error = (logits_of_all(kept, TOKENS) - expected).norm(dim=1).median()
    assert 0 < error < 0.03 * expected.norm(dim=1).median()


def _drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _cut(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()})


PREFIX = "model.layers.1.mlp.experts."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop(f"{PREFIX}down_proj_scales"), r"lacks .*experts\.down_proj_scales: complete the download"),
        (_drop(f"{PREFIX}down_proj_blocks"), r"lacks .*experts\.down_proj_blocks: complete the download"),
        (_drop(f"{PREFIX}gate_up_proj_bias"), r"lacks the weights .*experts\.0\.gate_proj\.bias"),
        (_cut(f"{PREFIX}gate_up_proj_scales"), r"gate_up_proj_scales .* has the shape \[6, 255, 2\]"),
        (_cut(f"{PREFIX}gate_up_proj_blocks"), r"gate_up_proj_blocks .* has the shape \[6, 255, 2, 16\]"),
        (_cut(f"{PREFIX}gate_up_proj_bias"), r"gate_up_proj_bias .* has the shape \[6, 255\]"),
        (_drop("model.layers.0.self_attn.sinks"), r"lacks the weights .*self_attn\.sinks"),
    ],
)
def test_what_does_not_go_together_is_told(change: Any, message: str, make_checkpoint: Any) -> None:
    path, _ = make_checkpoint("GptOssForCausalLM", **SIZES)
    in_mxfp4(path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        loaded(path)


def test_scales_that_are_none_are_refused(make_checkpoint: Any) -> None:
    path, _ = make_checkpoint("GptOssForCausalLM", **SIZES)
    in_mxfp4(path)
    tensors = load_file(path / "model.safetensors")
    tensors[f"{PREFIX}down_proj_scales"][3, 2, 1] = 255
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    for keeps in (False, True):
        with pytest.raises(ModelError, match=r"experts\.3\.down_proj\.weight .* not finite"):
            loaded(path, keeps=keeps)
