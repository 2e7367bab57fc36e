"""Damaged and malicious folders with quantised matrices: one sentence each, or an unharmed model."""

import contextlib
import json
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from quantised_folders import Grid, Tensors, awq, compressed, fp8, gptq, grid, quantise
from safetensors.torch import load_file, save_file
from torch import Tensor

from neo_desktop.app.shelf.checkpoint_summary import summarize
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.stored_form import stored_form

CPU = torch.device("cpu")
GROUPS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": GROUPS}},
    },
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
PACKS: dict[str, Callable[[Grid], Tensors]] = {
    "awq": awq,
    "gptq": gptq,
    "compressed": lambda each: compressed(each, symmetric=False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model in every format."""

    def make(name: str) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
        def packed(weight: Tensor) -> tuple[Tensors, Tensor]:
            if name == "fp8":
                return fp8(weight, (128, 128), "scale_inv")
            rounded = grid(weight, group=32)
            return PACKS[name](rounded), rounded.exact

        return packed

    found = {}
    for name, config in CONFIGS.items():
        found[name] = save_checkpoint(tmp_path_factory.mktemp(name), "qwen3")
        quantise(found[name], config, make(name))
    return found


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    form = stored_form(check_model(checkpoint, config), config)
    load_model(checkpoint, config, dtype=torch.float32, device=CPU, form=form)
    load_model(checkpoint, config, dtype=torch.float32, device=CPU)


def refused(path: Path) -> str | None:
    """Return the reason for a refusal, or None."""
    try:
        read_all(path)
    except ModelError as error:
        return str(error)
    return None


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_or_refuse(path: Path) -> None:
    """Read a folder, or refuse it in a sentence, with little memory: the whole model has half a megabyte."""
    before = peak_bytes()
    refusal = refused(path)
    if refusal is None:
        assert summarize(path).reason is None
    else:
        summarize(path)
        assert len(refusal) < 1500
        assert refusal.endswith(".")
    assert peak_bytes() - before < 256 << 20


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([2**31 - 1, -(2**31), 10**30, 0.5, "gptq", "awq", "fp8", "gemm", "x" * 10**4])
    | st.lists(st.integers(-1, 2**40), max_size=3)
    | st.dictionaries(
        st.sampled_from(["weights", "group_0", "num_bits", "format"]), st.none() | st.integers()
    )
)
KEYS = [
    "quant_method", "bits", "group_size", "version", "checkpoint_format", "sym", "desc_act", "zero_point",
    "weight_block_size", "fmt", "format", "config_groups", "quantization_status", "sparsity_config",
    "transform_config", "num_bits", "type", "strategy", "symmetric", "actorder", "block_structure",
]  # fmt: skip


def copied(folder: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    return target


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CONFIGS)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_settings_are_read_or_refused(
    name: str, folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = copied(folders[name], tmp_path / "edited")
    config = json.loads((path / "config.json").read_text())
    changed = config["quantization_config"]
    if "config_groups" in changed:
        changed["config_groups"]["group_0"]["weights"] |= changes
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": changed | changes}))
    read_or_refuse(path)


EDITS: list[Callable[[Tensor, int], Tensor | None]] = [
    lambda tensor, number: None,
    lambda tensor, number: tensor.flatten(),
    lambda tensor, number: tensor[None],
    lambda tensor, number: tensor[: number % (len(tensor) + 1)] if tensor.ndim else tensor[None],
    lambda tensor, number: tensor[..., : number % (tensor.shape[-1] + 1)] if tensor.ndim else tensor,
    lambda tensor, number: tensor.T if tensor.ndim == 2 else tensor,
    lambda tensor, number: torch.full_like(tensor.float(), number).to(tensor.dtype),
    lambda tensor, number: torch.full_like(tensor.float(), float("nan")).to(tensor.dtype),
    lambda tensor, number: tensor.view(torch.uint8),
    lambda tensor, number: tensor.float().to(torch.float16),
    lambda tensor, number: tensor.float().to(torch.int32),
    lambda tensor, number: torch.randint(-128, 128, tensor.shape, dtype=torch.int8),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CONFIGS)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 10**4), st.sampled_from(EDITS), st.integers(-(2**31), 2**31 - 1)),
        min_size=1,
        max_size=3,
    )
)
def test_any_tensors_are_read_or_refused(
    name: str,
    folders: dict[str, Path],
    tmp_path: Path,
    edits: list[tuple[int, Callable[[Tensor, int], Tensor | None], int]],
) -> None:
    path = copied(folders[name], tmp_path / "edited")
    tensors = load_file(path / "model.safetensors")
    for which, edit, number in edits:
        names = sorted(tensors)
        chosen = names[which % len(names)]
        with contextlib.suppress(RuntimeError):  # torch cannot make every shape and stride
            tensor = edit(tensors.pop(chosen), number)
            if tensor is not None:
                tensors[chosen] = tensor
    stored = {each: tensor.contiguous().clone() for each, tensor in tensors.items()}
    save_file(stored, path / "model.safetensors")
    read_or_refuse(path)


BYTES: list[Callable[[bytearray, int, int], Any]] = [
    lambda data, at, value: data.__setitem__(at, value & 255),
    lambda data, at, value: data.__setitem__(slice(at, at + 1), str(value).encode()),
    lambda data, at, value: data.__setitem__(slice(at, at), b'"a":[0],'),
    lambda data, at, value: data.__delitem__(slice(at, at + value % 64)),
    lambda data, at, value: data.__delitem__(slice(at, None)),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("keeps_length", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
@given(
    edits=st.lists(
        st.tuples(st.sampled_from(BYTES), st.floats(0, 1), st.integers(0, 2**64 - 1) | st.integers(0, 64)),
        min_size=1,
        max_size=4,
    )
)
def test_any_header_is_read_or_refused(
    name: str,
    keeps_length: bool,
    folders: dict[str, Path],
    tmp_path: Path,
    edits: list[tuple[Callable[[bytearray, int, int], Any], float, int]],
) -> None:
    path = copied(folders[name], tmp_path / "edited")
    whole = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = bytearray(whole[8 : 8 + length])
    for edit, where, value in edits:
        if header:
            edit(header, min(int(where * len(header)), len(header) - 1), value)
    told = length if keeps_length else len(header)
    (path / "model.safetensors").write_bytes(told.to_bytes(8, "little") + header + whole[8 + length :])
    read_or_refuse(path)
