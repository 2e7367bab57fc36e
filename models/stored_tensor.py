"""What is asked of a tensor in a checkpoint, whatever its format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from neo_desktop.models.gguf.types import Blocks


class StoredTensor(Protocol):
    """One tensor of a checkpoint, still in its file."""

    @property
    def file(self) -> Path:
        """Where it lies."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""

    @property
    def type_name(self) -> str:
        """How it is stored, as its format calls it."""

    @property
    def is_quantised(self) -> bool:
        """Whether its numbers are stored with less than 16 bits."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""

    @property
    def blocks(self) -> Blocks | None:
        """How it can be had without becoming floats; None: it cannot."""

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Read it: yield the first row and floats of some rows, until all were there."""
