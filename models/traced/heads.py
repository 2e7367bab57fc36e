"""Attention heads of different sizes, brought to one shape, because KV rows are alike in all layers.

Narrow KV heads are put side by side in wide ones (Gemma 4: two of 256 in one of 512), with zeros in the other
heads' part of their queries. The rest is padding with zeros, and repetition of KV heads.
"""

from collections.abc import Set
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from neo_desktop.models.limits import HEAD_UNIT


class HeadShape(NamedTuple):
    """The shape of a token's keys in the KV cache."""

    kv_heads: int
    head_dim: int


def common_shape(sizes: Set[tuple[int, int]]) -> HeadShape:
    """Return the smallest shape that holds every layer's heads; sizes: (kv_heads, head_dim)."""
    widest = -(-max(dim for _, dim in sizes) // HEAD_UNIT) * HEAD_UNIT
    return HeadShape(lcm(*(count // _together(count, dim, widest) for count, dim in sizes)), widest)


def _together(kv_heads: int, head_dim: int, width: int) -> int:
    """Return the number of heads that share a wide one."""
    return max(some for some in range(1, width // head_dim + 1) if kv_heads % some == 0)


class Packing:
    """The heads of a layer in those of another shape."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, shape: HeadShape) -> None:
        self._together = _together(kv_heads, head_dim, shape.head_dim)
        self._wide = kv_heads // self._together
        self._group, self._dim = heads // kv_heads, head_dim
        self._shape = shape
        self.is_idle = (kv_heads, head_dim) == shape

    def keys(self, x: Tensor) -> Tensor:
        """Return keys or values [1, kv_heads, rows, head_dim] in the cache's shape."""
        together = torch.unflatten(x, 1, (self._wide, self._together)).transpose(2, 3).flatten(3)
        missing = self._shape.head_dim - together.shape[-1]
        if missing:
            zeros = _zeros(x, missing).expand(-1, self._wide, -1, -1)
            together = torch.cat((together, zeros), dim=-1)
        times = self._shape.kv_heads // self._wide
        return together[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)

    def queries(self, x: Tensor) -> Tensor:
        """Return queries [1, heads, rows, head_dim] in the cache's shape."""
        each = torch.unflatten(x, 1, (self._wide, self._together, self._group))
        parts = []
        for index in range(self._together):
            own, before = each[:, :, index], index * self._dim
            after = self._shape.head_dim - before - self._dim
            shape = (-1, self._wide, self._group, -1, -1)
            zeros = [_zeros(x, size)[:, None].expand(shape) if size else None for size in (before, after)]
            given = [part for part in (zeros[0], own, zeros[1]) if part is not None]
            parts.append(torch.cat(given, dim=-1))
        return torch.stack(parts, dim=2).flatten(1, 3)

    def results(self, x: Tensor) -> Tensor:
        """Return the layer's part of attention's output: [1, rows, heads, head_dim]."""
        each = torch.unflatten(x, 2, (self._wide, self._together, self._group))
        parts = [
            each[:, :, :, index, :, index * self._dim : (index + 1) * self._dim]
            for index in range(self._together)
        ]
        return torch.stack(parts, dim=3).flatten(2, 4)


def _zeros(x: Tensor, width: int) -> Tensor:
    """Return zeros [1, 1, rows, width]; x: [1, heads, rows, head_dim]."""
    times = -(-width // x.shape[-1])
    zeros = torch.zeros_like(x[:, :1])
    return torch.cat([zeros] * times, dim=-1)[..., :width]
