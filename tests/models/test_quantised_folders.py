"""Hugging Face folders with quantised matrices: AWQ, GPTQ, compressed-tensors, FP8."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_tokenizer
from dense_model import logits_of_all
from quantised_folders import Grid, Tensors, awq, compressed, fp8, gptq, grid, quantise
from safetensors.torch import load_file, save_file
from torch import Tensor

from neo_desktop import Engine
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.stored_form import stored_form
from neo_desktop.models.weights import named_weights

CPU = torch.device("cpu")
SIZES = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1))
Make = Callable[[Tensor], tuple[Tensors, Tensor]]


def of_grid(pack: Callable[[Grid], Tensors], **settings: Any) -> Make:
    def make(weight: Tensor) -> tuple[Tensors, Tensor]:
        rounded = grid(weight, **settings)
        return pack(rounded), rounded.exact

    return make


def shuffled(pack: Callable[[Grid], Tensors], **settings: Any) -> Make:
    def make(weight: Tensor) -> tuple[Tensors, Tensor]:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
        rounded = grid(weight, order=order, **settings)
        return pack(rounded), rounded.exact

    return make


def per_row(weight: Tensor) -> tuple[Tensors, Tensor]:
    return fp8(weight, (1, weight.shape[1]), "scale")


def per_matrix(weight: Tensor) -> tuple[Tensors, Tensor]:
    tensors, exact = fp8(weight, weight.shape, "scale")
    return tensors | {"weight_scale": tensors["weight_scale"].view(()), "input_scale": torch.ones(1)}, exact


def whole_numbers(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales.float()


def groups_of(kind: str, **weights: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def gptq_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False} | changes


AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
PACKED = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLOATS = {"type": "float", "num_bits": 8, "symmetric": True}

# name: its configuration, its packing function, its display name, its matrices' format in memory
FORMATS: dict[str, tuple[dict[str, Any], Make, str, str | None]] = {
    "awq": (AWQ | {"group_size": 64}, of_grid(awq, group=64), "AWQ 4-bit, group 64", "Q4_1"),
    "awq, whole rows": (AWQ | {"group_size": -1}, of_grid(awq, group=-1), "AWQ 4-bit", "Q4_1"),
    "awq, wide groups": (AWQ | {"group_size": 128}, of_grid(awq), "AWQ 4-bit, group 128", "Q4_1"),
    "awq, narrow groups": (AWQ | {"group_size": 16}, of_grid(awq, group=16), "AWQ 4-bit, group 16", None),
    "gptq": (gptq_config(), of_grid(gptq, group=32), "GPTQ 4-bit, group 32", "Q4_1"),
    "gptq, v2": (
        gptq_config(checkpoint_format="gptq_v2"),
        of_grid(lambda each: gptq(each, version=2), group=32),
        "GPTQ 4-bit, group 32",
        "Q4_1",
    ),
    "gptq, symmetric": (
        gptq_config(sym=True, group_size=-1),
        of_grid(gptq, group=-1, symmetric=True),
        "GPTQ 4-bit",
        "Q4_0",
    ),
    "gptq, symmetric, v2 without saying so": (
        gptq_config(sym=True, group_size=64),
        of_grid(lambda each: gptq(each, version=2), group=64, symmetric=True),
        "GPTQ 4-bit, group 64",
        "Q4_0",
    ),
    "gptq, reordered": (
        gptq_config(desc_act=True),
        shuffled(gptq, group=32),
        "GPTQ 4-bit, group 32, reordered",
        None,
    ),
    "gptq, whole rows reordered": (
        gptq_config(desc_act=True, group_size=-1),
        of_grid(gptq, group=-1),
        "GPTQ 4-bit",
        "Q4_1",
    ),
    "gptq, as GPTQModel says it": (
        {"method": "gptq", "format": "gptq_v2", "bits": 4, "group_size": 32, "sym": False},
        of_grid(lambda each: gptq(each, version=2), group=32),
        "GPTQ 4-bit, group 32",
        "Q4_1",
    ),
    "gptq, 8 bits": (gptq_config(bits=8), of_grid(gptq, bits=8, group=32), "GPTQ 8-bit, group 32", None),
    "gptq, 8 bits, symmetric": (
        gptq_config(bits=8, sym=True),
        of_grid(gptq, bits=8, group=32, symmetric=True),
        "GPTQ 8-bit, group 32",
        "Q8_0",
    ),
    "gptq, scales of float32": (
        gptq_config(),
        of_grid(gptq, group=32, dtype=torch.float32),
        "GPTQ 4-bit, group 32",
        None,
    ),
    "packed": (
        groups_of("pack-quantized", **PACKED),
        of_grid(
            lambda each: compressed(each, symmetric=True), group=32, symmetric=True, dtype=torch.bfloat16
        ),
        "compressed-tensors 4-bit, group 32",
        "Q4_0",
    ),
    "packed, asymmetric": (
        groups_of("pack-quantized", **PACKED | {"symmetric": False}),
        of_grid(lambda each: compressed(each, symmetric=False), group=32, dtype=torch.bfloat16),
        "compressed-tensors 4-bit, group 32",
        "Q4_1",
    ),
    "packed, reordered": (
        groups_of("pack-quantized", **PACKED | {"actorder": "group"}),
        shuffled(lambda each: compressed(each, symmetric=True, reordered=True), group=32, symmetric=True),
        "compressed-tensors 4-bit, group 32, reordered",
        None,
    ),
    "packed, 8 bits for each row": (
        groups_of("pack-quantized", **PACKED | {"num_bits": 8, "strategy": "channel", "group_size": None}),
        of_grid(lambda each: compressed(each, symmetric=True), bits=8, group=-1, symmetric=True),
        "compressed-tensors 8-bit",
        "Q8_0",
    ),
    "fp8, blocks": (BLOCKS, lambda weight: fp8(weight, (128, 128), "scale_inv"), "FP8", None),
    "fp8, small blocks": (
        BLOCKS | {"weight_block_size": [48, 80]},
        lambda weight: fp8(weight, (48, 80), "scale_inv"),
        "FP8",
        None,
    ),
    "fp8, one scale": ({"quant_method": "fp8", "activation_scheme": "static"}, per_matrix, "FP8", None),
    "fp8, rows": ({"quant_method": "fbgemm_fp8"}, per_row, "FP8", None),
    "fp8 of compressed-tensors": (
        groups_of("float-quantized", **FLOATS, strategy="channel"),
        per_row,
        "FP8",
        None,
    ),
    "fp8 of compressed-tensors, one scale": (
        groups_of("naive-quantized", **FLOATS, strategy="tensor"),
        per_matrix,
        "FP8",
        None,
    ),
    "fp8 of compressed-tensors, blocks": (
        groups_of("float-quantized", **FLOATS, strategy="block", block_structure=[128, 128]),
        lambda weight: fp8(weight, (128, 128), "scale"),
        "FP8",
        None,
    ),
    "int8 of compressed-tensors": (
        groups_of("int-quantized", type="int", num_bits=8, symmetric=True, strategy="channel"),
        whole_numbers,
        "INT8",
        None,
    ),
}


def load(path: Path, *, keep: bool, dtype: torch.dtype = torch.float32) -> Decoder:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    weights = check_model(checkpoint, config)
    if not keep:
        return load_model(checkpoint, config, dtype=dtype, device=CPU)
    form = stored_form(weights, config)
    decoder = load_model(checkpoint, config, dtype=dtype, device=CPU, form=form)
    assert decoder.nbytes == config.weight_bytes(dtype, form)
    return decoder


def edit(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


@pytest.mark.sample(20)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_minimum_is_off_by_a_2048th_of_itself(dtype: torch.dtype, make_checkpoint: Any) -> None:
    path, _ = make_checkpoint(**SIZES)
    grids: list[Grid] = []

    def make(weight: Tensor) -> tuple[Tensors, Tensor]:
        grids.append(grid(weight, group=32, dtype=dtype))
        return gptq(grids[-1]), grids[-1].exact

    exact = quantise(path, gptq_config(), make)
    names = [name for name, weight in exact.items() if weight.ndim == 2 and ".layers." in name]
    found = {weight.name: weight.dense() for weight in named_weights(load(path, keep=True))}
    for name, of in zip(names, grids, strict=True):
        minima = (of.zeros * of.scales.float())[:, of.groups]
        assert (
            (found[name] - exact[name]).abs() <= minima / 2048 + 2**-25 + exact[name].abs() * 2**-22
        ).all()


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


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "auto-round", "bits": 4}, "'auto-round'"),
        ({"quant_method": "x" * 10**6}, "'xxx"),
        (gptq_config(bits=3), "'gptq' to 3 bits"),
        (gptq_config(checkpoint_format="marlin"), "in the format 'marlin'"),
        (gptq_config(is_marlin_format=True), "in the format 'marlin'"),
        (AWQ | {"bits": 8}, "'awq' to 8 bits"),
        (AWQ | {"version": "gemv"}, "in the format 'gemv'"),
        (BLOCKS | {"fmt": "e5m2"}, "'fp8' in the format 'e5m2'"),
        (groups_of("nvfp4-pack-quantized", **FLOATS | {"num_bits": 4}), "'nvfp4-pack-quantized', 4 bits"),
        (groups_of("marlin-24", **PACKED), "in the format 'marlin-24'"),
        (groups_of("pack-quantized", **PACKED | {"num_bits": 3}), "3 bits"),
        (groups_of("int-quantized", **FLOATS | {"type": "int", "symmetric": False}), "8 bits"),
        (groups_of("pack-quantized", **PACKED) | {"sparsity_config": {"format": "sparse-24"}}, "sparse"),
        (
            groups_of("pack-quantized", **PACKED) | {"transform_config": {"config_groups": {"a": 1}}},
            "rotated",
        ),
        (groups_of("pack-quantized", **PACKED) | {"config_groups": {"a": {"weights": None}}}, "several ways"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], said: str, make_checkpoint: Any
) -> None:
    path, _ = make_checkpoint(**SIZES)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(ModelError, match=r"which is not supported: choose .* AWQ, GPTQ or FP8") as error:
        open_checkpoint(path).config()
    assert said in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (gptq_config(group_size=0), "'group_size' = 0"),
        (gptq_config(group_size=None), "lacks 'group_size'"),
        (gptq_config(group_size="many"), "'group_size' = 'many'"),
        (gptq_config(bits=None), "lacks 'bits'"),
        (gptq_config(sym="no"), "'sym' = 'no'"),
        (BLOCKS | {"weight_block_size": [0, 128]}, "weight_block_size of two numbers above zero"),
        (BLOCKS | {"weight_block_size": 128}, "weight_block_size of two numbers above zero"),
        ({"bits": 4}, "lacks 'quant_method'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "lacks 'config_groups'"),
        ([], "'quantization_config' = "),
    ],
)
def test_settings_that_cannot_be_are_named(config: Any, said: str, make_checkpoint: Any) -> None:
    path, _ = make_checkpoint(**SIZES)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(ModelError) as error:
        open_checkpoint(path).config()
    assert said in str(error.value)


LAYER = "model.layers.0.mlp.up_proj."


def changed(kind: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Tensors], None]:
    def edit_it(tensors: Tensors) -> None:
        tensor = change(tensors.pop(LAYER + kind))
        if tensor is not None:
            tensors[LAYER + kind] = tensor

    return edit_it


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


DAMAGE: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "no zeros": ("awq", changed("qzeros", lambda _: None), r"lacks .*up_proj\.qzeros"),
    "no scales": ("gptq", changed("scales", lambda _: None), r"lacks .*up_proj\.scales"),
    "no order": ("gptq, reordered", changed("g_idx", lambda _: None), r"lacks .*up_proj\.g_idx"),
    "no numbers": ("awq", changed("qweight", lambda _: None), r"qzeros .* stored as I32"),
    "short scales": ("awq", changed("scales", lambda t: t[1:]), r"scales .* has the shape \[1, 192\]"),
    "other scales": ("gptq", changed("scales", lambda t: t.int()), r"scales .* in I32"),
    "short zeros": ("gptq", changed("qzeros", lambda t: t[:, 1:]), r"qzeros .* has the shape \[4, 23\]"),
    "a vector": ("awq", changed("qweight", lambda t: t.flatten()), r"qweight .* which is not a matrix"),
    "nothing": ("gptq", changed("qweight", lambda t: t[:0]), r"qweight .* which is not a matrix"),
    "narrow numbers": ("awq", changed("qweight", lambda t: t[:, :-1]), r"scales .* needs \[2, 184\]"),
    "floats": ("gptq", changed("qweight", lambda t: t.float()), r"qweight .* in F32"),
    "a group beyond": ("gptq, reordered", changed("g_idx", filled(4)), "a group that is not one of the 4"),
    "a group below": ("gptq, reordered", changed("g_idx", filled(-1)), "a group that is not one of the 4"),
    "a hidden order": ("gptq", changed("g_idx", filled(0)), "orders columns differently than config"),
    "a short order": ("gptq, reordered", changed("g_idx", lambda t: t[1:]), r"g_idx .* needs \[128\]"),
    "NaN": ("awq", changed("scales", filled(float("nan"))), r"up_proj\.weight .* not finite"),
    "infinite": ("gptq", changed("scales", filled(float("inf"))), r"up_proj\.weight .* not finite"),
    "NaN in a reordered one": (
        "gptq, reordered",
        changed("scales", filled(float("nan"))),
        r"up_proj\.weight .* not finite .* GPTQ 4-bit, group 32, reordered",
    ),
    "asymmetric": ("gptq, symmetric", changed("qzeros", filled(5)), "other zero points than the symmetric"),
    "no scale of FP8": ("fp8, blocks", changed("weight_scale_inv", lambda _: None), "has 0 of .*up_proj"),
    "blocks of another size": (
        "fp8, blocks",
        changed("weight_scale_inv", lambda t: t.repeat(2, 1)),
        r"shape \[4, 1\] in F32, but .* needs \[2, 1\]",
    ),
    "NaN of FP8": (
        "fp8, rows",
        changed("weight", lambda t: torch.full(t.shape, float("nan")).to(torch.float8_e4m3fn)),
        r"up_proj\.weight .* not finite .*stored as FP8",
    ),
    "twice": (
        "gptq",
        lambda tensors: tensors.update({LAYER + "weight": torch.ones(192, 128)}),
        r"has .*up_proj\.weight twice",
    ),
}


@pytest.mark.sample(16)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_go_together_is_told_in_a_sentence(
    damage: str, keep: bool, make_checkpoint: Any
) -> None:
    name, change, said = DAMAGE[damage]
    path, _ = make_checkpoint(**SIZES)
    quantise(path, *FORMATS[name][:2])
    load(path, keep=keep)
    edit(path, change)
    with pytest.raises(ModelError, match=said) as error:
        load(path, keep=keep)
    assert str(error.value).endswith(".")
    assert len(str(error.value)) < 1000
