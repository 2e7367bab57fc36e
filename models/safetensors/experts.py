"""gpt-oss's tensors with all experts of a layer, cut into a tensor per expert.

A tensor is [experts, columns, rows] of floats, or [experts, rows, columns / 32, 16] of bytes with two MXFP4
numbers each, and scales [experts, rows, columns / 32]; a bias is [experts, rows]. One tensor interleaves the
rows of gates and ups.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from neo_desktop.models.experts_config import ExpertNames
from neo_desktop.models.gguf.types import TYPES, Blocks
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.safetensors.tensor import SafeTensor
from neo_desktop.models.stored_tensor import StoredTensor

_MXFP4 = next(stored for stored in TYPES.values() if stored.name == "MXFP4")
_BLOCK = 32  # numbers that share a scale
_NAME = re.compile(r"(?P<prefix>.+)\.experts\.(?P<kind>gate_up|down)_proj(?P<end>|_bias|_blocks|_scales)")
# kind -> the matrices interleaved in its rows
_MATRICES = {"gate_up": ("gate", "up"), "down": ("down",)}


@dataclass(frozen=True, slots=True)
class _OfExpert:
    """One expert's part of a tensor.

    Args:
        source: the tensor with every expert.
        expert: index of the expert.
        first: the expert's first row.
        step: distance between its rows.
    """

    source: SafeTensor
    expert: int
    first: int
    step: int

    @property
    def file(self) -> Path:
        return self.source.file


class ExpertTensor(_OfExpert):
    """A `weights.StoredTensor`: an expert's matrix or bias in floats."""

    __slots__ = ()

    @property
    def type_name(self) -> str:
        return self.source.type_name

    @property
    def shape(self) -> tuple[int, ...]:
        _, *columns, rows = self.source.shape
        return rows // self.step, *columns

    @property
    def is_quantised(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return self.source.nbytes // self.source.shape[0] // self.step

    @property
    def blocks(self) -> Blocks | None:
        return None

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, _of_expert(self.source, self.expert).t()[self.first :: self.step].contiguous()


@dataclass(frozen=True, slots=True)
class ExpertInBlocks(_OfExpert):
    """A `weights.StoredTensor`: an expert's matrix in MXFP4."""

    scales: SafeTensor

    @property
    def type_name(self) -> str:
        return _MXFP4.name

    @property
    def shape(self) -> tuple[int, ...]:
        _, rows, blocks, _ = self.source.shape
        return rows // self.step, blocks * _BLOCK

    @property
    def is_quantised(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return (self.source.nbytes + self.scales.nbytes) // self.source.shape[0] // self.step

    @property
    def blocks(self) -> Blocks | None:
        return Blocks(_MXFP4.name, lambda _: iter([(0, self._raw())]))

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, _MXFP4.dequantised(self._raw())

    def _raw(self) -> Tensor:
        """Return the rows in GGUF's format: the numbers in the halves of a byte are 16 columns apart."""
        pairs, scales = (
            _of_expert(tensor, self.expert)[self.first :: self.step] for tensor in (self.source, self.scales)
        )
        numbers = torch.stack((pairs & 15, pairs >> 4), 3).flatten(2)
        data = numbers[:, :, :16] | (numbers[:, :, 16:] << 4)
        return torch.cat((scales[:, :, None], data), 2).flatten(1)


def _of_expert(source: SafeTensor, expert: int) -> Tensor:
    expert_slice: Tensor = source.opened.get_slice(source.name)[expert : expert + 1]
    return expert_slice[0]


def take_experts(tensors: dict[str, SafeTensor], names: ExpertNames) -> dict[str, StoredTensor]:
    """Return the matrices and biases of single experts; remove the stacked tensors from `tensors`.

    Args:
        tensors: of a checkpoint.
        names: of single experts' modules.

    Raises ModelError for tensors that do not fit together.
    """
    experts: dict[str, StoredTensor] = {}
    for name in list(tensors):
        match = _NAME.fullmatch(name)
        if match is None or match["end"] == "_scales" or name not in tensors:
            continue
        source, matrices = tensors.pop(name), _MATRICES[match["kind"]]
        scales = None
        if match["end"] == "_blocks":
            scales = _scales(tensors, source)
        elif len(source.shape) != (2 if match["end"] else 3) or source.shape[-1] % len(matrices):
            raise ModelError(
                f"{name} in {source.file} has the shape {list(source.shape)}, which tensors of experts "
                "never have: download the model again."
            )
        layer = match["prefix"].removesuffix(f".{names.block}")
        end = "bias" if match["end"] == "_bias" else "weight"
        for first, kind in enumerate(matrices):
            for expert, module in enumerate(names.of_each(kind, range(source.shape[0]))):
                place = expert, first, len(matrices)
                experts[f"{layer}.{module}.{end}"] = (
                    ExpertTensor(source, *place) if scales is None else ExpertInBlocks(source, *place, scales)
                )
    for name, left in tensors.items():
        match = _NAME.fullmatch(name)
        if match is not None and match["end"] == "_scales":
            blocks = name.removesuffix("_scales") + "_blocks"
            raise ModelError(f"{left.file.parent} lacks {blocks}: complete the download.")
    return experts


def _scales(tensors: dict[str, SafeTensor], source: SafeTensor) -> SafeTensor:
    name = source.name.removesuffix("_blocks") + "_scales"
    scales = tensors.pop(name, None)
    if scales is None:
        raise ModelError(f"{source.file.parent} lacks {name}: complete the download.")
    if len(source.shape) != 4 or source.shape[3] != _BLOCK // 2 or source.shape[1] % 2:
        raise ModelError(
            f"{source.name} in {source.file} has the shape {list(source.shape)}, which blocks of experts "
            "never have: download the model again."
        )
    source.check([source.shape], ("U8",))
    scales.check([source.shape[:3]], ("U8",))
    return scales
