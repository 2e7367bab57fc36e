"""Quantised Hugging Face folders that are damaged or not supported are refused in a sentence."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantised_folders import Tensors, quantise
from quantised_formats import (
    AWQ,
    BLOCKS,
    FLOATS,
    FORMATS,
    PACKED,
    SIZES,
    edit,
    gptq_config,
    groups_of,
    load,
)
from torch import Tensor

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError


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
