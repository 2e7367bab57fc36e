"""What a linear layer is, and what is asked of a form of them before a model is loaded."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor


class Linear(Protocol):
    """`x @ weight.T + bias`; its weight `[out, in]` is loaded part by part, and then multiplied with."""

    bias: Tensor | None  # [out], of the model's dtype

    @property
    def form(self) -> str:
        """Its name."""

    @property
    def writes_in_place(self) -> bool:
        """Whether products always lie in the memory that was given for them, as CUDA graphs need it."""

    def memory(self) -> Mapping[torch.device, int]:
        """Return the bytes that weight and bias take, by where they lie."""

    def load(self, row: int, weight: Tensor) -> None:
        """Take some rows from a checkpoint; once all have come, products can be asked for.

        Args:
            row: the first of them.
            weight: [rows, in], of any floating-point dtype and on any device.
        """

    def dense(self) -> Tensor:
        """Return the weight, of the model's dtype: a copy if it is not kept like that."""

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the product `[n, out]`, of the model's dtype.

        Args:
            x: [n, in], of that dtype.
            out: [n, out]: room for the product, not of x; it may lie elsewhere (`writes_in_place`).
        """


class Embedding(Linear, Protocol):
    """A matrix whose rows are looked up, too."""

    def look_up(self, rows: Tensor, out: Tensor) -> None:
        """Put some rows `[n]` into `out` `[n, in]`, of the model's dtype."""


class WeightFormat(Protocol):
    """How the matrices of a model are kept."""

    def named(self, name: str) -> "WeightFormat":
        """Return the form of one matrix: "3.qkv", or "head"; all may have the same."""

    def of_rows(self, rows: slice) -> "WeightFormat":
        """Return the form of some rows of the matrix that is meant, from the first to the last of them."""

    def embedding(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> "Tensor | Embedding":
        """Return the embeddings, to be loaded; where they are no tensor, a tied head is the same object."""

    def embedding_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Return the bytes that embeddings take."""

    def empty(
        self, rows: int, columns: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        """Return a layer to be loaded, for a model of this dtype on this device."""

    def tied(self, weight: Tensor) -> Linear:
        """Return the head that shares its weight with the embeddings, which are loaded as such."""

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Return the bytes that a weight takes."""

    def loading_bytes(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
        """Return the bytes that it takes beside them while it is loaded."""
