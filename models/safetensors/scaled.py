"""Matrices of 8-bit numbers with a scale per row, per block or per matrix."""

from functools import partial

import torch

from neo_desktop.models.gguf.types import PIECE_ELEMENTS
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.safetensors.scheme import Scaled
from neo_desktop.models.stored_tensor import FLOATS, Rows, StoredTensor

TYPES = {"F8_E4M3": "FP8", "I8": "INT8"}
# `inv` means that it was the inverse at quantisation; reading multiplies by either.
_SCALES = ("weight_scale", "weight_scale_inv")


def scaled_tensor(tensors: dict[str, StoredTensor], module: str, scheme: Scaled) -> StoredTensor:
    """Return the matrix of a module; remove its tensors from `tensors`.

    Raises ModelError for tensors that are missing or do not fit together.
    """
    numbers = tensors.pop(f"{module}.weight")
    scales = [scale for kind in _SCALES if (scale := tensors.pop(f"{module}.{kind}", None)) is not None]
    rows, columns = numbers.sides()
    if len(scales) != 1:
        raise ModelError(
            f"{numbers.file.parent} has {len(scales)} of {module}.weight_scale and .weight_scale_inv, but "
            "needs one: download the model again."
        )
    (scale,) = scales
    if scheme.block is not None:
        block = scheme.block
        scale.check([(-(-rows // block[0]), -(-columns // block[1]))], FLOATS)
    else:
        one, per_row = [(), (1,), (1, 1)], [(rows,), (rows, 1)]
        scale.check([*one, *per_row], FLOATS)
        block = (rows if scale.shape in one else 1, columns)
    return StoredTensor(
        f"{module}.weight",
        numbers.file,
        numbers.shape,
        TYPES[numbers.type_name],
        numbers.nbytes + scale.nbytes,
        partial(_pieces, numbers, scale, block),
        is_quantised=True,
    )


def _pieces(numbers: StoredTensor, scale: StoredTensor, block: tuple[int, int]) -> Rows:
    (rows, columns), (block_rows, block_columns) = numbers.shape, block
    stored = numbers.read()
    # A lookup is faster than torch's conversion of float8.
    table = torch.arange(256, dtype=torch.uint8).view(stored.dtype).float()
    codes = stored.view(torch.uint8)
    scales = scale.read().float().view(-(-rows // block_rows), -1)
    block_of_column = torch.arange(columns) // block_columns
    step = max(PIECE_ELEMENTS // columns, 1)
    for first in range(0, rows, step):
        data = codes[first : first + step]
        piece = table.index_select(0, data.flatten().int()).view(data.shape)
        row_scales = scales[torch.arange(first, first + len(piece)) // block_rows]
        is_one = scales.shape[1] == 1
        yield first, piece.mul_(row_scales if is_one else row_scales.index_select(1, block_of_column))
