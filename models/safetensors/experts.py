"""gpt-oss's tensors with all experts of a layer, cut into a tensor per expert.

A tensor is [experts, columns, rows] of floats, or [experts, rows, columns / 32, 16] of bytes with two MXFP4
numbers each, and scales [experts, rows, columns / 32]; a bias is [experts, rows]. One tensor interleaves the
rows of gates and ups.
"""

import re
from functools import partial

import torch
from torch import Tensor

from neo_desktop.models.experts_config import ExpertNames
from neo_desktop.models.gguf.types import BY_NAME
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.stored_tensor import Blocks, Rows, StoredTensor

_BLOCK = 32  # numbers that share a scale
_NAME = re.compile(r"(?P<prefix>.+)\.experts\.(?P<kind>gate_up|down)_proj(?P<end>|_bias|_blocks|_scales)")
# kind -> the matrices interleaved in its rows
_MATRICES = {"gate_up": ("gate", "up"), "down": ("down",)}


def take_experts(tensors: dict[str, StoredTensor], names: ExpertNames) -> dict[str, StoredTensor]:
    """Return the matrices and biases of single experts; remove the stacked tensors from `tensors`.

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
        shape = (source.shape[-1] // len(matrices), *source.shape[1:-1])
        for first, kind in enumerate(matrices):
            for expert, module in enumerate(names.of_each(kind, range(source.shape[0]))):
                own, rows = f"{layer}.{module}.{end}", slice(first, None, len(matrices))
                if scales is None:
                    experts[own] = source.part(own, shape, partial(_of_expert, expert, rows))
                else:
                    experts[own] = _in_blocks(own, source, scales, expert, rows)
    for name, left in tensors.items():
        match = _NAME.fullmatch(name)
        if match is not None and match["end"] == "_scales":
            blocks = name.removesuffix("_scales") + "_blocks"
            raise ModelError(f"{left.file.parent} lacks {blocks}: complete the download.")
    return experts


def _of_expert(expert: int, rows: slice, stack: Tensor) -> Tensor:
    return stack[expert].t()[rows].contiguous()


def _in_blocks(
    name: str, source: StoredTensor, scales: StoredTensor, expert: int, rows: slice
) -> StoredTensor:
    count, all_rows, blocks, _ = source.shape
    nbytes = (source.nbytes + scales.nbytes) // count // rows.step

    def raw(_: int = 0) -> Rows:
        yield 0, _as_in_gguf(*(tensor.read()[expert, rows] for tensor in (source, scales)))

    return StoredTensor(
        name,
        source.file,
        (all_rows // rows.step, blocks * _BLOCK),
        "MXFP4",
        nbytes,
        lambda: ((first, BY_NAME["MXFP4"].dequantised(piece)) for first, piece in raw()),
        Blocks("MXFP4", raw),
        is_quantised=True,
    )


def _as_in_gguf(pairs: Tensor, scales: Tensor) -> Tensor:
    """Return rows in GGUF's format: the numbers in the halves of a byte are 16 columns apart."""
    numbers = torch.stack((pairs & 15, pairs >> 4), 3).flatten(2)
    data = numbers[:, :, :16] | (numbers[:, :, 16:] << 4)
    return torch.cat((scales[:, :, None], data), 2).flatten(1)


def _scales(tensors: dict[str, StoredTensor], source: StoredTensor) -> StoredTensor:
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
