"""Hugging Face folders with quantised matrices, packed number by number from the formats' descriptions."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # order of the numbers in a word, from its lowest bits


@dataclass(frozen=True)
class Grid:
    """A matrix in integers."""

    numbers: Tensor  # [out, in], from 0
    zeros: Tensor  # [out, groups]
    scales: Tensor  # [out, groups]
    groups: Tensor  # [in], group per column
    bits: int

    @property
    def exact(self) -> Tensor:
        """The matrix in float32: each step is exact, or rounded once."""
        zeros, scales = self.zeros[:, self.groups], self.scales[:, self.groups].float()
        return (self.numbers - zeros).float() * scales


def grid(
    weight: Tensor,
    *,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = False,
    order: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Grid:
    """Round a matrix to integers.

    Args:
        group: columns per group; -1: all.
        order: [in], column order for consecutive groups.
    """
    rows, columns = weight.shape
    size = columns if group == -1 else group
    groups = torch.empty(columns, dtype=torch.long)
    groups[torch.arange(columns) if order is None else order] = torch.arange(columns) // size
    largest = 2**bits - 1
    zeros, scales = [], []
    for index in range(int(groups.max()) + 1):
        part = weight[:, groups == index]
        if symmetric:
            scale = (part.abs().amax(1) / (largest / 2)).to(dtype)
            zero = torch.full((rows,), (largest + 1) // 2)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / largest).to(dtype)
            zero = (-low / scale.float()).round().clamp(0, largest).long()
        zeros.append(zero)
        scales.append(scale)
    zero, scale = torch.stack(zeros, 1), torch.stack(scales, 1)
    numbers = (weight / scale.float()[:, groups]).round() + zero[:, groups]
    return Grid(numbers.clamp(0, largest).long(), zero, scale, groups, bits)


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack the columns of `[n, m]` into words, lowest bits first; missing columns are zeros."""
    per_word = 32 // bits
    packed = torch.zeros(len(numbers), -(-numbers.shape[1] // per_word), dtype=torch.int64)
    for word in range(packed.shape[1]):
        for place in range(per_word):
            column = word * per_word + (place if order is None else order[place])
            if column < numbers.shape[1]:
                packed[:, word] |= numbers[:, column] << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def awq(of: Grid) -> Tensors:
    return {
        "qweight": words(of.numbers.T, 4, _AWQ_ORDER),
        "qzeros": words(of.zeros.T, 4, _AWQ_ORDER),
        "scales": of.scales.T.contiguous(),
    }


def gptq(of: Grid, *, version: int = 1) -> Tensors:
    stored_zeros = (of.zeros - (2 - version)) % 2**of.bits
    return {
        "qweight": words(of.numbers, of.bits).T.contiguous(),
        "qzeros": words(stored_zeros.T, of.bits),
        "scales": of.scales.T.contiguous(),
        "g_idx": of.groups.int(),
    }


def compressed(of: Grid, *, symmetric: bool, reordered: bool = False) -> Tensors:
    tensors = {
        "weight_packed": words(of.numbers, of.bits),
        "weight_scale": of.scales,
        "weight_shape": torch.tensor(of.numbers.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(of.zeros.T, of.bits).T.contiguous()
    return tensors | ({"weight_g_idx": of.groups.int()} if reordered else {})


def fp8(weight: Tensor, blocks: tuple[int, int], suffix: str) -> tuple[Tensors, Tensor]:
    """Round to float8 in blocks of rows and columns; return the tensors and their exact value."""
    rows, columns = weight.shape
    numbers, exact = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-rows // blocks[0]), -(-columns // blocks[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (
                slice(i * blocks[0], (i + 1) * blocks[0]),
                slice(j * blocks[1], (j + 1) * blocks[1]),
            )
            scales[i, j] = weight[part].abs().max() / 448
            numbers[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            exact[part] = numbers[part].float() * scales[i, j]
    return {"weight": numbers, f"weight_{suffix}": scales}, exact


def quantise(
    folder: Path,
    config: dict[str, Any],
    make: Callable[[Tensor], tuple[Tensors, Tensor]],
    extra: Tensors | None = None,
) -> Tensors:
    """Quantise all layer matrices in a folder; return its weights after dequantisation.

    Args:
        config: the `quantization_config`.
        make: returns a module's tensors by their last names, and the dequantised matrix.
        extra: additional tensors.
    """
    file = folder / "model.safetensors"
    exact = {name: value.float() for name, value in load_file(file).items()}
    stored = load_file(file)
    for name, value in exact.items():
        if value.ndim == 2 and ".layers." in name:
            module = name.removesuffix(".weight")
            del stored[name]
            tensors, exact[name] = make(value)
            stored |= {f"{module}.{kind}": tensor for kind, tensor in tensors.items()}
    save_file(stored | (extra or {}), file)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return exact
