"""How the K and V of a block lie in memory, and the way to rows and back.

Rows are what models make and what the attention of prompts reads: [tokens, kv_heads, head_dim].
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neo_desktop.models.config import ModelConfig

Rows = tuple[Tensor, Tensor]  # K and V, [tokens, kv_heads, head_dim] each
Parts = tuple[Tensor, ...]  # of some blocks, [blocks, ...] each; see BlockLayout

PAIRED_TOKENS = 16  # the native kernels take K in pairs if block_size is a multiple of this
INT8_STEPS = 127  # of a row's largest element

_PAIR_DTYPES = {1: torch.int16, 2: torch.int32, 4: torch.int64}  # bytes of an element -> what holds two


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The parts of a block, of one layer.

        K         [kv_heads, block_size, head_dim], or [kv_heads, head_dim / 2, block_size, 2] in pairs
        V         [kv_heads, block_size, head_dim]
        K scales  [kv_heads, block_size] fp32, of int8 only: a row is its elements times its scale
        V scales  likewise

    All methods run on the device of the tensors that they are given.
    """

    kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype  # of K and V
    in_pairs: bool  # K: two dimensions of all tokens side by side, the CPU kernel's fast layout

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Return the best layout for a memory: K in pairs on a CPU, in rows elsewhere.

        With a block_size that is no multiple of 16, K lies in rows on a CPU, too.

        Raises:
            ValueError: int8 was asked for where K cannot lie in pairs.
        """
        in_pairs = device.type == "cpu" and block_size % PAIRED_TOKENS == 0
        if dtype is torch.int8 and not in_pairs:
            raise ValueError(
                f"KV in 8 bits needs host memory and blocks of a multiple of {PAIRED_TOKENS} tokens, "
                f"not {device.type} memory and blocks of {block_size}"
            )
        return cls(config.num_kv_heads, block_size, config.head_dim, dtype, in_pairs)

    @property
    def is_scaled(self) -> bool:
        """Whether rows have scales."""
        return self.dtype is torch.int8

    @property
    def parts(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and dtype of each part."""
        rows = (self.kv_heads, self.block_size, self.head_dim)
        pairs = (self.kv_heads, self.head_dim // 2, self.block_size, 2)
        scales = ((rows[:2], torch.float32),) * 2 if self.is_scaled else ()
        return ((pairs if self.in_pairs else rows, self.dtype), (rows, self.dtype), *scales)

    @property
    def block_bytes(self) -> int:
        """What all parts take."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts)

    def rows(self, parts: Parts, dtype: torch.dtype, out: Rows | None = None) -> Rows:
        """Return blocks as rows of a dtype, [blocks * block_size, kv_heads, head_dim], in `out` if given."""
        num_tokens = len(parts[0]) * self.block_size
        if out is None:
            size = (num_tokens, self.kv_heads, self.head_dim)
            out = (parts[0].new_empty(size, dtype=dtype), parts[0].new_empty(size, dtype=dtype))
        for index, (part, target) in enumerate(zip(parts[:2], out, strict=True)):
            rows = target if target.dtype is self.dtype else target.new_empty(target.shape, dtype=self.dtype)
            self._to_rows(part, rows, in_pairs=self.in_pairs and index == 0)
            if self.is_scaled:
                scale = parts[2 + index].transpose(1, 2).reshape(num_tokens, self.kv_heads, 1)
                torch.mul(rows, scale, out=target)
            elif rows is not target:
                target.copy_(rows)
        return out

    def blocks(self, k: Tensor, v: Tensor) -> Parts:
        """Return rows, [blocks * block_size, kv_heads, head_dim], as blocks; inverse of `rows`."""
        scales: tuple[Tensor, ...] = ()
        if self.is_scaled:
            (k, k_scale), (v, v_scale) = quantized(k), quantized(v)
            by_block = (-1, self.block_size, self.kv_heads)
            scales = (k_scale.view(by_block).transpose(1, 2), v_scale.view(by_block).transpose(1, 2))
        v = v.view(-1, self.block_size, self.kv_heads, self.head_dim).transpose(1, 2)
        if not self.in_pairs:
            return k.view(-1, self.block_size, self.kv_heads, self.head_dim).transpose(1, 2), v
        k = k.view(-1, self.block_size, self.kv_heads, self.head_dim // 2, 2)
        pairs = k.view(_PAIR_DTYPES[k.itemsize]).permute(0, 2, 3, 1, 4).contiguous()
        return (pairs.view(k.dtype), v, *scales)

    def adopted(self, parts: Parts, layout: "BlockLayout") -> Parts:
        """Return blocks that lie in another layout in this one."""
        if layout == self:
            return parts
        return self.blocks(*layout.rows(parts, layout.dtype if self.is_scaled else self.dtype))

    def _to_rows(self, part: Tensor, out: Tensor, *, in_pairs: bool) -> None:
        """Put K or V into rows of the same dtype."""
        by_block = out.view(-1, self.block_size, self.kv_heads, self.head_dim)
        if in_pairs:  # a pair is moved as one element: several times faster than two by two
            pair = _PAIR_DTYPES[part.itemsize]
            by_block.view(pair).unsqueeze(-1).copy_(part.view(pair).permute(0, 3, 1, 2, 4))
        else:
            by_block.copy_(part.transpose(1, 2))


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in int8 and their scales, [..., head_dim] and [...] fp32, as `native.paged_kv_write` would.

    A row that is not finite gets a scale of NaN: what attends to it is not finite either.
    """
    largest = rows.abs().amax(-1).float()
    scale = torch.where(largest.isfinite(), largest / INT8_STEPS, torch.nan)
    steps = rows / scale.unsqueeze(-1)  # 0 / 0 for a row of zeros
    return steps.round_().clamp_(-INT8_STEPS, INT8_STEPS).nan_to_num_(0.0).to(torch.int8), scale
