"""Models with offloaded matrices, and the parts of their products."""

import torch
from torch import Tensor

from neo_desktop import native
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear import unpack
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.linear.offloaded import Kernels, OffloadedFormat, OffloadedLinear
from neo_desktop.models.linear.protocol import WeightFormat


def random_split(
    config: ModelConfig,
    seed: int,
    *,
    device_form: WeightFormat,
    host_form: Dense,
    kernels: Kernels = unpack,
) -> OffloadedFormat:
    """Make none, some or all rows of every layer matrix resident; of experts, whole ones."""
    generator = torch.Generator().manual_seed(seed)

    def chosen(most: int) -> int:
        return int(torch.randint(0, most + 1, (1,), generator=generator))

    resident, counts = dict[str, int](), dict[str, int]()
    for name, matrix in config.each_matrix():
        if matrix.experts:
            count = counts.setdefault(name.partition(".")[0], chosen(matrix.experts))
            resident[name] = count * matrix.rows // matrix.experts
        elif name != "head":
            resident[name] = min(64 * chosen(-(-matrix.rows // 64)), matrix.rows)
    return OffloadedFormat(device_form, host_form, resident, kernels)


def multiply_in_parts(linear: OffloadedLinear, x: Tensor, out: Tensor, share: float) -> None:
    """Multiply like a pipeline: stage bytes before unpacking; the CPU uses memory of its own."""
    streamed_rows = linear.streamed(share)
    linear.multiply_resident(x, out)
    pieces = linear.pieces(streamed_rows)
    for piece in pieces:
        staged = torch.full((piece.packed.nbytes,), 0xFF, dtype=torch.uint8)
        staged.copy_(piece.packed)
        room = torch.full((piece.elements,), torch.nan, dtype=x.dtype)
        linear.multiply_piece(piece, staged, room, x, out)
    host_rows = linear.host_rows - streamed_rows
    product = torch.full((len(x), host_rows), torch.nan, dtype=x.dtype)
    matrix = linear.host_matrix(streamed_rows)
    if matrix is not None:
        native.packed_linear(x, *matrix, product)
    out[:, linear.rows - host_rows :] = product
