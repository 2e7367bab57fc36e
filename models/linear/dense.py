"""Matrices of numbers of the model's dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.models.linear.onednn import OneDNN, why_plain
from neo_desktop.models.linear.plain import Plain
from neo_desktop.models.linear.protocol import Embedding, Linear

# MKL has multiplied one row with so small a matrix before oneDNN has woken its threads (measured).
SMALL_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class Dense:
    """See `protocol.LinearForm`.

    Args:
        uses_onednn: where it serves.
    """

    uses_onednn: bool = True

    def named(self, name: str) -> "Dense":
        """See `LinearForm`, likewise the others: all are alike."""
        return self

    def embedding(  # noqa: D102
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | Embedding:
        return torch.empty(rows, columns, dtype=dtype, device=device)

    def embedding_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:  # noqa: D102
        return rows * columns * dtype.itemsize

    def empty(
        self, rows: int, columns: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        """Packed once it is loaded, unless it is small."""
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        bias = torch.empty(rows, dtype=dtype, device=device) if has_bias else None
        if not self._is_onednn(dtype, device):
            return Plain(weight, bias)
        return OneDNN(weight, bias, "small" if _is_small(weight) else "packed")

    def tied(self, weight: Tensor) -> Linear:
        """Not packed, because a second copy would take more memory than it is worth."""
        if not self._is_onednn(weight.dtype, weight.device):
            return Plain(weight)
        return OneDNN(weight, None, "small" if _is_small(weight) else "shared")

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:  # noqa: D102
        return rows * columns * dtype.itemsize

    def loading_bytes(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
        """Of a matrix that is packed, there are two copies."""
        return self.nbytes(rows, columns, dtype) if self._is_onednn(dtype, device) else 0

    def _is_onednn(self, dtype: torch.dtype, device: torch.device) -> bool:
        return self.uses_onednn and why_plain(device, dtype) is None


def _is_small(weight: Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.nbytes <= SMALL_BYTES


DENSE = Dense()
