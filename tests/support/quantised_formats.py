"""Every format of quantised Hugging Face folders: its configuration, packing, name and form in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quantised_folders import Grid, Tensors, awq, compressed, fp8, gptq, grid
from safetensors.torch import load_file, save_file
from torch import Tensor

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.stored_form import stored_form

CPU = torch.device("cpu")


SIZES = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


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
    tensors, exact = fp8(weight, (weight.shape[0], weight.shape[1]), "scale")
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
