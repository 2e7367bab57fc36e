"""The interface of a tensor in a checkpoint, the same for all formats."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from neo_desktop.models.gguf.types import Blocks


class StoredTensor(Protocol):
    """A tensor of a checkpoint, still in its file."""

    @property
    def file(self) -> Path:
        """File with the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, rows first."""

    @property
    def type_name(self) -> str:
        """Name of its type in the file's format."""

    @property
    def is_quantised(self) -> bool:
        """True if its numbers have fewer than 16 bits."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""

    @property
    def blocks(self) -> Blocks | None:
        """Its bytes in the file's format, for kernels that accept them; None: it is read as floats."""

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensor in pieces: the first row, and floats of some rows."""
