"""Which matrices of a checkpoint stay as they are stored."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.linear.protocol import Embedding, Linear
from neo_desktop.models.linear.quantised import PartShape, Quantised, has_kernel, packed_bytes
from neo_desktop.models.weights import Weights, matrix_names


@dataclass(frozen=True, slots=True)
class StoredForm(Dense):
    """See `protocol.LinearForm`: matrices with kernels for their types stay packed, others are dequantised.

    Args:
        matrices: by the names of `LinearForm.named`: the parts of those that stay.
        parts: of the one that is meant; none: it is dequantised.
        without_kernel: types of quantised matrices that are dequantised.
    """

    matrices: Mapping[str, tuple[PartShape, ...]] = field(default_factory=dict)
    parts: tuple[PartShape, ...] = ()
    without_kernel: tuple[str, ...] = ()

    def named(self, name: str) -> "StoredForm":
        """See `LinearForm`, likewise the others."""
        return replace(self, parts=self.matrices.get(name, ()))

    def empty(  # noqa: D102
        self, rows: int, columns: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        if not self.parts:
            return Dense.empty(self, rows, columns, has_bias=has_bias, dtype=dtype, device=device)
        bias = torch.empty(rows, dtype=dtype, device=device) if has_bias else None
        return Quantised(self.parts, columns, bias, dtype)

    def embedding(  # noqa: D102
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | Embedding:
        parts = self.matrices.get("embedding")
        return (
            Quantised(parts, columns, None, dtype)
            if parts
            else Dense.embedding(self, rows, columns, dtype, device)
        )

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:  # noqa: D102
        if not self.parts:
            return Dense.nbytes(self, rows, columns, dtype)
        return sum(packed_bytes(part.type_name, part.rows, columns) for part in self.parts)

    def embedding_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:  # noqa: D102
        return replace(self, parts=self.matrices.get("embedding", ())).nbytes(rows, columns, dtype)

    def loading_bytes(  # noqa: D102
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        return 0 if self.parts else Dense.loading_bytes(self, rows, columns, dtype, device)


def stored_form(weights: Weights, config: ModelConfig) -> StoredForm:
    """Return the form in which a CPU keeps as much as it can as it is stored.

    Matrices that were fused stay if all their parts can.
    """
    matrices: dict[str, tuple[PartShape, ...]] = {}
    missing = set[str]()
    for name, tensors in matrix_names(config).items():
        stored = [weights.tensors[tensor] for tensor in tensors]
        parts = tuple(
            PartShape(each.blocks.type_name, each.shape[0])
            for each in stored
            if each.blocks is not None and has_kernel(each.blocks.type_name, each.shape[1])
        )
        if len(parts) == len(stored):
            matrices[name] = parts
        else:
            missing |= {each.type_name for each in stored if each.is_quantised}
    return StoredForm(matrices=matrices, without_kernel=tuple(sorted(missing)))
