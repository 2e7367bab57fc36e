"""The interfaces of linear layers and weight formats."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from neo_desktop.models.linear.packed import Room


class Linear(Protocol):
    """`x @ weight.T + bias`; the weight `[out, in]` is loaded in parts."""

    bias: Tensor | None  # [out], of the model's dtype

    @property
    def form(self) -> str:
        """Name of the format."""

    def memory(self) -> Mapping[torch.device, int]:
        """Return the bytes of weight and bias per device."""

    def load(self, row: int, weight: Tensor) -> None:
        """Load some rows [rows, in], of any floating-point dtype and on any device.

        All rows must be loaded before the first matmul.
        """

    def dense(self) -> Tensor:
        """Return the weight in the model's dtype; a copy if it is stored differently."""

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        """Write the product of x [n, in] to `out` [n, out], both in the model's dtype; return it.

        `out` must not alias x.
        """


@runtime_checkable
class Embedding(Linear, Protocol):
    """A matrix that is also used for lookups."""

    def look_up(self, rows: Tensor, out: Tensor) -> None:
        """Write rows `[n]` to `out` `[n, in]`, in the model's dtype."""


class WeightFormat(Protocol):
    """Storage format of a model's matrices."""

    @property
    def tables(self) -> Room | None:
        """Allocates host memory for a GPU's tables, as the GPU sees it; None: tables are in device memory."""

    def named(self, name: str) -> "WeightFormat":
        """Return the format of one matrix: "3.qkv", "head" or "embedding", whose layer is an `Embedding`."""

    def of_rows(self, rows: slice) -> "WeightFormat":
        """Return the format of consecutive rows of the selected matrix."""

    def empty(
        self, rows: int, columns: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        """Allocate an empty linear, to be loaded later."""

    def table(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Linear:
        """Return a table to be loaded, an `Embedding`."""

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Return the bytes of a weight."""

    def loading_bytes(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return the additional bytes while a weight is loaded."""
