"""A tensor of a safetensors file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neo_desktop.models.gguf.types import Blocks
from neo_desktop.models.json_file import ModelError

FLOATS = ("F32", "F16", "BF16")
_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "F8_E4M3": 1}  # bytes of a number


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A `weights.StoredTensor` in a safetensors file.

    Args:
        file: its file.
        name: in the file.
        shape: from the header, checked against the file's size.
        type_name: safetensors' name of the dtype.
        opened: the open file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    type_name: str
    opened: Any

    @property
    def is_quantised(self) -> bool:
        return False

    @property
    def blocks(self) -> Blocks | None:
        return None

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * _SIZES.get(self.type_name, 1)

    def read(self) -> Tensor:
        """Return the whole tensor; a view of the file if possible."""
        tensor: Tensor = self.opened.get_tensor(self.name)
        return tensor

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.read()

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
