"""Hugging Face folders with quantised matrices: AWQ, GPTQ, compressed-tensors, FP8."""

from typing import Any

import pytest
import torch
from checkpoints import save_tokenizer
from dense_model import logits_of_all
from quantised_folders import Tensors, quantise
from quantised_formats import CPU, FORMATS, SIZES, edit, load
from safetensors.torch import load_file

from neo_desktop import Engine
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.stored_form import stored_form
from neo_desktop.models.weights import named_weights

TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1))


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_each_format_is_what_it_is_described_to_be(
    name: str, architecture: str, make_checkpoint: Any
) -> None:
    config, make, type_name, _ = FORMATS[name]
    path, _ = make_checkpoint(architecture, **SIZES)
    exact = quantise(path, config, make)
    weights = open_checkpoint(path).weights()
    assert weights.is_quantised
    assert weights.tensors["model.layers.0.mlp.up_proj.weight"].type_name == type_name
    assert (
        sum(each.nbytes for each in weights.tensors.values()) <= (path / "model.safetensors").stat().st_size
    )
    found = {weight.name: weight for weight in named_weights(load(path, keep=False))}
    assert found.keys() == exact.keys()
    for weight in found.values():
        assert torch.equal(weight.dense(), exact[weight.name]), weight.name


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", FORMATS)
def test_groups_of_whole_blocks_stay_in_their_bits(name: str, make_checkpoint: Any) -> None:
    """Minima are rounded to float16, which shifts a whole group; symmetric groups are exact."""
    config, make, _, form = FORMATS[name]
    path, _ = make_checkpoint(**SIZES)
    exact = quantise(path, config, make)
    kept = load(path, keep=True)
    for layer in kept.layers:
        for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
            assert (linear.form == form) == (form is not None)
            assert linear.form.startswith("Q") == (form is not None)
    if form is None:
        return
    found = {weight.name: weight.dense() for weight in named_weights(kept)}
    for weight_name, weight in found.items():
        difference = (weight - exact[weight_name]).abs()
        if form != "Q4_1" or weight.ndim == 1:
            assert not difference.any()
        else:  # zero * scale has been rounded, to 11 bits
            assert difference.max() <= exact[weight_name].abs().max() * 2**-10
    dequantised = load(path, keep=False)
    assert kept.nbytes < 0.7 * dequantised.nbytes
    logits = [logits_of_all(each, TOKENS) for each in (kept, dequantised)]
    assert 0 < (logits[0] - logits[1]).norm() < 0.1 * logits[1].norm()  # matmul inputs are rounded to 8 bits


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["awq", "gptq, symmetric", "gptq, 8 bits, symmetric", "gptq, reordered"])
def test_a_gpu_has_the_numbers_of_a_cpu(name: str, make_checkpoint: Any) -> None:
    path, _ = make_checkpoint(**SIZES)
    quantise(path, *FORMATS[name][:2])
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    form = stored_form(check_model(checkpoint, config), config).on_gpu(dispatch)
    on_gpu = load_model(checkpoint, config, dtype=torch.float32, device=CPU, form=form)
    for ours, theirs in zip(on_gpu.linears(), load(path, keep=True).linears(), strict=True):
        assert torch.equal(ours.dense(), theirs.dense())
        assert ours.form == theirs.form


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("name", ["awq", "gptq", "gptq, reordered", "packed, asymmetric", "fp8, blocks"])
def test_an_engine_gives_the_tokens_of_the_dequantised_weights(
    name: str, architecture: str, make_checkpoint: Any
) -> None:
    config, make, _, form = FORMATS[name]
    path, model = make_checkpoint(architecture, **SIZES)
    model.load_state_dict(quantise(path, config, make))
    prompts = [TOKENS[:3].tolist(), TOKENS[5:35].tolist()]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0]
        for prompt in prompts
    ]
    save_tokenizer(path)
    for weights_dtype, forms in (("float32", None), ("auto", form)):
        with Engine.from_pretrained(
            path, device="cpu", policy="gpu-only", gpu_cache_tokens=1024, weights_dtype=weights_dtype
        ) as engine:
            outputs = [output.token_ids for output in engine.generate(prompts, GREEDY)]
            assert {linear.form for linear in engine._decoder.linears()} >= ({forms} if forms else set())
        if weights_dtype == "float32":
            found = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
            assert found == [each.tolist() for each in expected]


def test_modules_that_were_left_out_stay_floats(make_checkpoint: Any) -> None:
    path, _ = make_checkpoint(**SIZES)
    config, make, _, _ = FORMATS["awq"]
    left_out = load_file(path / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    quantise(path, config | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"]}, make)

    def put_back(tensors: Tensors) -> None:
        for kind in ("qweight", "qzeros", "scales"):
            del tensors[f"model.layers.1.mlp.down_proj.{kind}"]
        tensors["model.layers.1.mlp.down_proj.weight"] = left_out

    edit(path, put_back)
    kept = load(path, keep=True)
    assert torch.equal(kept.layers[1].mlp.down.dense(), left_out)
    assert kept.layers[0].mlp.down.form == "Q4_1"
    assert not kept.lm_head.form.startswith("Q")


def test_biases_of_zeros_that_no_layer_has_are_dropped(make_checkpoint: Any) -> None:
    path, _ = make_checkpoint(**SIZES)
    config, make, _, _ = FORMATS["gptq"]
    name = "model.layers.0.self_attn.o_proj.bias"
    quantise(path, config, make, {name: torch.zeros(128, dtype=torch.float16)})
    load(path, keep=True)
    edit(path, lambda tensors: tensors[name].__setitem__(5, 1.0))
    with pytest.raises(ModelError, match=r"does not describe, model\.layers\.0\.self_attn\.o_proj\.bias"):
        load(path, keep=True)
