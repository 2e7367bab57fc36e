"""Matrices of numbers of 8 bits, each times a scale that it shares with its row, a block, or all others."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from neo_desktop.models.gguf.types import PIECE_ELEMENTS, Blocks
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.safetensors.scheme import Scaled
from neo_desktop.models.safetensors.tensor import FLOATS, SafeTensor

TYPES = {"F8_E4M3": "FP8", "I8": "INT8"}
# `inv` means that it was the inverse before: numbers are multiplied by all of them.
_SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """See `weights.StoredTensor`.

    Args:
        numbers: `[out, in]`
        scales: one, `[out]`, or of each block `[rows of blocks, columns of blocks]`.
        block: its rows and columns.
    """

    numbers: SafeTensor
    scales: SafeTensor
    block: tuple[int, int]

    @property
    def file(self) -> Path:
        """See `StoredTensor`, likewise the others."""
        return self.numbers.file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def type_name(self) -> str:
        return TYPES[self.numbers.type_name]

    @property
    def is_quantised(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    @property
    def blocks(self) -> Blocks | None:
        return None

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        (rows, columns), (block_rows, block_columns) = self.shape, self.block
        stored = self.numbers.read()
        # Looked up, which is faster than torch's conversion of float8.
        table = torch.arange(256, dtype=torch.uint8).view(stored.dtype).float()
        numbers = stored.view(torch.uint8)
        scales = self.scales.read().float().view(-(-rows // block_rows), -1)
        block_of_column = torch.arange(columns) // block_columns
        step = max(PIECE_ELEMENTS // columns, 1)
        for first in range(0, rows, step):
            data = numbers[first : first + step]
            piece = table.index_select(0, data.flatten().int()).view(data.shape)
            of_rows = scales[torch.arange(first, first + len(piece)) // block_rows]
            is_one = scales.shape[1] == 1
            yield first, piece.mul_(of_rows if is_one else of_rows.index_select(1, block_of_column))


def scaled_tensor(tensors: dict[str, SafeTensor], module: str, scheme: Scaled) -> ScaledTensor:
    """Return the matrix of a module, whose tensors are taken out.

    Raises ModelError for tensors that are missing, or do not go together.
    """
    numbers = tensors.pop(f"{module}.weight")
    scales = [found for kind in _SCALES if (found := tensors.pop(f"{module}.{kind}", None)) is not None]
    rows, columns = numbers.sides()
    if len(scales) != 1:
        raise ModelError(
            f"{numbers.file.parent} has {len(scales)} of {module}.weight_scale and .weight_scale_inv, where "
            "one belongs: download the model again."
        )
    (scale,) = scales
    if scheme.block is not None:
        block = scheme.block
        scale.check([(-(-rows // block[0]), -(-columns // block[1]))], FLOATS)
    else:
        one, each = [(), (1,), (1, 1)], [(rows,), (rows, 1)]
        scale.check([*one, *each], FLOATS)
        block = (rows if scale.shape in one else 1, columns)
    return ScaledTensor(numbers, scale, block)
