"""A tensor of a checkpoint, still in its file: the same for all formats."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from neo_desktop.models.json_file import ModelError

FLOATS = ("F32", "F16", "BF16")  # in both formats
Rows = Iterator[tuple[int, Tensor]]
"""The first row, and consecutive rows, of each piece of a tensor."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix that is available in the blocks of one GGUF type.

    Args:
        pieces: given a number of rows, yields rows of bytes; every piece but the last has a multiple of that
            number.
    """

    type_name: str
    pieces: Callable[[int], Rows]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        shape: rows first.
        blocks: for kernels that accept them; None: the tensor is read as floats.
        is_quantised: its numbers have fewer than 16 bits.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    type_name: str
    nbytes: int
    pieces: Callable[[], Rows]
    blocks: Blocks | None = None
    is_quantised: bool = False

    def read(self) -> Tensor:
        """Return all numbers; a view of the file if possible."""
        pieces = [piece for _, piece in self.pieces()]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def part(self, name: str, shape: tuple[int, ...], take: Callable[[Tensor], Tensor]) -> "StoredTensor":
        """Return a part of the numbers as floats; `take`: of the whole tensor, in the part's shape."""
        nbytes = self.nbytes * prod(shape) // max(prod(self.shape), 1)
        return replace(
            self,
            name=name,
            shape=shape,
            nbytes=nbytes,
            pieces=lambda: iter([(0, take(self.read()))]),
            blocks=None,
        )

    def sides(self) -> tuple[int, int]:
        """Return rows and columns. Raise ModelError if it is not a matrix, or empty."""
        if len(self.shape) != 2 or 0 in self.shape:
            raise ModelError(
                f"{self.name} in {self.file} has the shape {list(self.shape)}, which is not a matrix: "
                "download the model again."
            )
        return self.shape[0], self.shape[1]

    def check(self, shapes: list[tuple[int, ...]], types: tuple[str, ...]) -> None:
        """Raise ModelError unless the tensor has one of the shapes and one of the types."""
        if self.shape not in shapes or self.type_name not in types:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelError(
                f"{self.name} in {self.file} has the shape {list(self.shape)} in {self.type_name}, but its "
                f"matrix needs {wanted} in {' or '.join(types)}: download the model again."
            )
