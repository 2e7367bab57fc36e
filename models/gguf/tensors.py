"""Tensors of GGUF files, with rows in the decoder's order."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.models.gguf.container import GGUFFile, TensorPlace
from neo_desktop.models.gguf.types import PIECE_ELEMENTS
from neo_desktop.models.stored_tensor import Blocks, Rows, StoredTensor

STORED_PIECE_ELEMENTS = 2**25  # of rows kept in the file's format; one piece occupies many threads
ROPE_FACTORS = "rope_freqs.weight"  # part of the configuration
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # as above, of LongRoPE


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of a GGUF file.

    Args:
        order: indices of the stored rows, in the parameter's order; None: it is the same.
        undo: reverts the converter's function of the floats.
        reshaped: the parameter's shape, if the file has other dimensions of size 1, or a vector's groups.
    """

    source: GGUFFile
    place: TensorPlace
    order: Tensor | None = None
    undo: Callable[[Tensor], Tensor] | None = None
    reshaped: tuple[int, ...] | None = None

    @property
    def is_quantised(self) -> bool:
        return self.place.type.dtype is None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reshaped or (self.num_rows, *self.place.shape[1:])

    @property
    def num_rows(self) -> int:
        """Rows in the file, or chosen by `order`."""
        return self.place.shape[0] if self.order is None else len(self.order)

    @property
    def nbytes(self) -> int:
        return self.place.nbytes * self.num_rows // self.place.shape[0]

    def raw(self, first: int, end: int) -> Tensor:
        """Return rows in the file's format but the decoder's order: `[rows, bytes of a row]` uint8.

        If the order is the same, it is a read-only view of the file.
        """
        with warnings.catch_warnings():  # torch warns that the view is read-only
            warnings.simplefilter("ignore")
            stored = torch.from_numpy(self.source.raw(self.place))
        rows = stored.view(self.place.shape[0], -1)
        return rows[first:end] if self.order is None else rows[self.order[first:end]]

    def dequantised(self, first: int, end: int) -> Tensor:
        """Return rows as floats: `[rows, columns]`, or `[rows]` for a vector."""
        numbers = self.place.type.dequantised(self.raw(first, end)).view(-1, *self.shape[1:])
        return numbers if self.undo is None else self.undo(numbers)

    def raw_pieces(self, rows: int) -> Rows:
        """Yield the bytes of rows; all pieces but the last have a multiple of `rows` rows."""
        step = max(STORED_PIECE_ELEMENTS // self.place.shape[1] // rows, 1) * rows
        for first, end in self._pieces_of(step):
            yield first, self.raw(first, end)

    def pieces(self) -> Rows:
        step = max(PIECE_ELEMENTS // math.prod(self.shape[1:]), 1)
        if len(self.shape) == 1 or self.reshaped is not None:
            step = self.num_rows
        for first, end in self._pieces_of(step):
            yield first, self.dequantised(first, end)

    def _pieces_of(self, step: int) -> Iterator[tuple[int, int]]:
        for first in range(0, self.num_rows, step):
            self.source.read_ahead.at(self.place.offset + first * (self.nbytes // self.num_rows))
            yield first, min(first + step, self.num_rows)


def joined(name: str, parts: Sequence[GGUFTensor]) -> StoredTensor:
    """Return the parameter that files store in these parts, its rows in order."""
    types = {part.place.type.name for part in parts}
    is_turned = any(part.undo is not None for part in parts)
    is_quantised = any(part.is_quantised for part in parts)
    type_name = " and ".join(sorted(types)) + " by columns" * (is_turned and is_quantised)

    def raw_pieces(rows: int) -> Rows:
        if all(part.num_rows % rows == 0 for part in parts[:-1]):
            yield from _in_order(parts, [part.raw_pieces(rows) for part in parts])
        else:  # parts end within a tile
            yield 0, torch.cat([part.raw(0, part.num_rows) for part in parts])

    is_kept = is_quantised and len(types) == 1 and not is_turned
    return StoredTensor(
        name,
        parts[0].source.path,
        (sum(part.shape[0] for part in parts), *parts[0].shape[1:]),
        type_name,
        sum(part.nbytes for part in parts),
        lambda: _in_order(parts, [part.pieces() for part in parts]),
        Blocks(type_name, raw_pieces) if is_kept else None,
        is_quantised,
    )


def halves_apart(rows: int, heads: int) -> Tensor:
    """Return the order of queries' or keys' rows in which RoPE pairs i with i + head_dim / 2.

    The file pairs neighbours.
    """
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _in_order(parts: Sequence[GGUFTensor], pieces: Sequence[Rows]) -> Rows:
    start = 0
    for part, own in zip(parts, pieces, strict=True):
        for first, piece in own:
            yield start + first, piece
        start += part.shape[0]
