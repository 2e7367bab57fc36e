"""Images in a prompt: rows of the prompt whose embeddings come from a vision tower instead of a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from neo_desktop.models.marks import ChatText


class Sight(Enum):
    """Layers in which a row of an image also sees the later rows of its image."""

    CAUSAL = "no layers"
    WINDOWED = "layers with a window"
    ALL = "all layers"


@dataclass(frozen=True, slots=True)
class Grid:
    """Rotations of an image's rows by time, height and width (mRoPE).

    Args:
        axes: index of the position that rotates each pair of numbers: 0: time, 1: height, 2: width.
    """

    height: int
    width: int
    axes: tuple[int, ...]

    def positions(self, first: int) -> NDArray[np.int64]:
        """Return the positions of the image's rows, [3, rows], if `first` is the next one."""
        height, width = np.divmod(np.arange(self.height * self.width), self.width)
        return first + np.stack([np.zeros_like(height), height, width])


@dataclass(frozen=True, slots=True, eq=False)
class SeenImage:
    """An image, read by a vision tower.

    Args:
        mark: of an image in chat templates.
        text: replaces the mark in the prompt; its rows have the token `token_id`.
        embeddings: [rows, hidden] float32.
        sight: layers in which the rows see all rows of their image.
        grid: see `Grid`.
    """

    digest: bytes
    mark: str
    text: ChatText
    token_id: int
    embeddings: NDArray[np.float32]
    sight: Sight = Sight.CAUSAL
    grid: Grid | None = None

    @property
    def nbytes(self) -> int:
        return self.embeddings.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """The rows of a prompt that come from images.

    Args:
        positions: [rows], ascending, of the prompt.
        embeddings: [rows, hidden] float32.
        starts: first positions and digests of the images.
        sight: see `SeenImage`.
        ends: positions after the last rows of the images; empty if the rows see earlier rows only.
        axes: see `Grid`; empty: rows are rotated by their position alone.
        rotations: [tokens of the prompt]: positions of the first axis; or empty.
        others: [other axes, rows]: positions of the other axes.
    """

    positions: NDArray[np.int64]
    embeddings: NDArray[np.float32]
    starts: tuple[tuple[int, bytes], ...]
    sight: Sight
    ends: tuple[int, ...]
    axes: tuple[int, ...]
    rotations: NDArray[np.int64]
    others: NDArray[np.int64]

    def rotation(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions by which tokens are rotated, those of the first axis."""
        if not self.axes:
            return positions
        last = len(self.rotations) - 1
        known = self.rotations[np.minimum(positions, last)]
        return known + np.maximum(positions - last, 0)

    def spans(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the images with rows that see later ones, cut to the positions from `start` to `end`."""
        starts = (position for position, _ in self.starts)
        spans = ((max(first, start), last) for first, last in zip(starts, self.ends, strict=False))
        return tuple((first, last) for first, last in spans if first < last <= end)

    def chunk_of(self, start: int, num_tokens: int) -> int:
        """Return the tokens of a chunk from `start` on, about `num_tokens`, that cut no image."""
        end = start + num_tokens
        for (first, _), last in zip(self.starts, self.ends, strict=False):
            if first < end < last:
                return (first if first > start else last) - start
        return num_tokens

    def within(self, start: int, end: int) -> slice:
        first, last = np.searchsorted(self.positions, (start, end)).tolist()
        return slice(first, last)

    def digests(self, start: int, end: int) -> bytes:
        """Return the digests of the images that start at positions from `start` to `end`."""
        return b"".join(digest for position, digest in self.starts if start <= position < end)

    @classmethod
    def of(cls, images: Sequence[SeenImage], token_ids: Sequence[int]) -> Self:
        """Find the rows of images in a prompt.

        Raise ValueError if the prompt has another number of rows for images.
        """
        found = np.flatnonzero(np.isin(token_ids, [image.token_id for image in images]))
        lengths = [len(image.embeddings) for image in images]
        if len(found) != sum(lengths):
            raise ValueError(
                f"the prompt has {len(found)} tokens for images, but the images have {sum(lengths)}"
            )
        lasts = np.cumsum(lengths)
        starts = [int(found[last - count]) for last, count in zip(lasts, lengths, strict=True)]
        sight = images[0].sight
        rotations = _rotations(len(token_ids), starts, [image.grid for image in images])
        return cls(
            found,
            np.concatenate([image.embeddings for image in images]),
            tuple((start, image.digest) for start, image in zip(starts, images, strict=True)),
            sight,
            () if sight is Sight.CAUSAL else tuple(int(found[last - 1]) + 1 for last in lasts),
            () if images[0].grid is None else images[0].grid.axes,
            rotations[0],
            rotations[1:, found] if rotations.size else np.empty((0, len(found)), np.int64),
        )


def _rotations(num_tokens: int, starts: Sequence[int], grids: Sequence[Grid | None]) -> NDArray[np.int64]:
    """Return the positions by which tokens are rotated, [3, tokens]; empty if there is one axis."""
    parts: list[NDArray[np.int64]] = []
    done = following = 0
    for start, grid in zip(starts, grids, strict=True):
        if grid is None:
            return np.empty((3, 0), np.int64)
        parts.append(np.tile(np.arange(following, following + start - done), (3, 1)))
        following += start - done
        parts.append(grid.positions(following))
        done, following = start + grid.height * grid.width, following + max(grid.height, grid.width)
    parts.append(np.tile(np.arange(following, following + num_tokens - done), (3, 1)))
    return np.concatenate(parts, axis=1)


@dataclass(frozen=True, slots=True)
class ImageText(ChatText):
    """A chat with images; its text has the marks of their rows."""

    images: tuple[SeenImage, ...] = ()


def with_images(text: ChatText, images: Sequence[SeenImage]) -> ImageText:
    """Replace the marks of images in a chat by the text of their rows.

    Raise ValueError if the chat has another number of marks.
    """
    marks = {image.mark for image in images}
    count = sum(found in marks for found in text.pieces[1::2])
    if count != len(images):
        raise ValueError(f"the chat template shows {count} of {len(images)} images")
    left, pieces = iter(images), [text.pieces[0]]
    for found, after in zip(text.pieces[1::2], text.pieces[2::2], strict=True):
        inserted = next(left).text.pieces if found in marks else ("", found, "")
        pieces[-1] += inserted[0]
        pieces += inserted[1:]
        pieces[-1] += after
    return ImageText(tuple(pieces), tuple(images))
