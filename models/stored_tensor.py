"""The interface of a tensor in a checkpoint, the same for all formats."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from neo_desktop.models.gguf.types import Blocks


class StoredTensor(Protocol):
    """One tensor of a checkpoint, still in its file."""

    @property
    def file(self) -> Path:
        """The file that holds it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""

    @property
    def type_name(self) -> str:
        """The name of its type in its format."""

    @property
    def is_quantised(self) -> bool:
        """True if its numbers have less than 16 bits."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""

    @property
    def blocks(self) -> Blocks | None:
        """Its bytes as stored, for kernels that take them; None: it is read as floats."""

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Read it: yield the first row and floats of some rows, until all were there."""
