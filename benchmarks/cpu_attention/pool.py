"""Memory of the measurement, allocated once, with a view for every case's shape."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cpu_attention.options import HEAD_DIMS, PAGE_TOKENS, Options, Shape, kv_heads, row_bytes
from neo_desktop import native
from neo_desktop.app.bench.host_rates import bytes_beyond_caches
from neo_desktop.engine.kv.host_layer import empty_aligned
from neo_desktop.engine.kv.layer import slots_of
from neo_desktop.engine.kv.layout import BLOCK_SIZE, BLOCKS_PER_RUN

_READ_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Caches:
    """A paged KV cache, with scales for int8."""

    k: Tensor  # [num_pages, kv_heads, page_tokens, head_dim / 2, 2], in pairs of dimensions
    v: Tensor  # [num_pages, kv_heads, page_tokens, head_dim]
    k_scale: Tensor | None  # [num_pages, kv_heads, page_tokens]
    v_scale: Tensor | None

    def decode(self, q: Tensor, table: Tensor, lens: Tensor, out: Tensor, num_threads: int) -> None:
        """Attend to the blocks of `table`."""
        native.paged_attention_decode(
            *(q, self.k, self.v, table, lens, q.shape[-1] ** -0.5, out, num_threads),
            block_size=BLOCK_SIZE,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    def rows(self, blocks: Tensor, head: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the first keys and values of some blocks in float64, each [tokens, head_dim]."""
        slots = slots_of(blocks.long(), BLOCK_SIZE)[:tokens]
        pages, rows = slots // self.v.shape[2], slots % self.v.shape[2]
        k, v = self.k[pages, head, rows].flatten(1).double(), self.v[pages, head, rows].double()
        if self.k_scale is not None and self.v_scale is not None:
            k *= self.k_scale[pages, head, rows, None]
            v *= self.v_scale[pages, head, rows, None]
        return k, v


class Pool:
    """Keys and values for any shape: flat memory, full of random numbers."""

    def __init__(self, options: Options) -> None:
        self._options = options
        dtype, nbytes = options.dtype, bytes_beyond_caches()
        head_dim = min(HEAD_DIMS)  # the one with the most rows and scales
        rows = nbytes // 2 // row_bytes(head_dim, dtype)
        self._memory = empty_aligned((2 * rows * head_dim,), dtype)
        self.k, self.v = self._memory.chunk(2)  # contiguous tensors of keys and of values
        scale_rows = rows if dtype is torch.int8 else 0
        self._k_scale, self._v_scale = (torch.empty(scale_rows) for _ in range(2))
        numbers = torch.randn(min(self._memory.numel(), 9_999_991), generator=seeded())
        if dtype is torch.int8:
            numbers = (numbers * 40).round().clamp(-127, 127)
        _fill(self._memory, numbers)
        for scales in (self._k_scale, self._v_scale):
            _fill(scales, 0.02 + 0.01 * torch.rand(min(scale_rows, 999_983), generator=seeded()))

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return sum(tensor.nbytes for tensor in (self._memory, self._k_scale, self._v_scale))

    def num_blocks(self, group: int, head_dim: int) -> int:
        """Return the number of blocks of this shape in the pool, in whole pages."""
        num_pages = self.k.numel() // (kv_heads(group) * PAGE_TOKENS * head_dim)
        return num_pages * BLOCKS_PER_RUN

    def caches(self, group: int, head_dim: int) -> Caches:
        """View the pool as the engine's paged KV cache."""
        leading = (self.num_blocks(group, head_dim) // BLOCKS_PER_RUN, kv_heads(group))
        k, v = _view(self._memory, (*leading, 2, PAGE_TOKENS * head_dim)).unbind(-2)
        return Caches(
            k=k.view(*leading, head_dim // 2, PAGE_TOKENS, 2).transpose(-3, -2),
            v=v.view(*leading, PAGE_TOKENS, head_dim),
            k_scale=_view(self._k_scale, (*leading, PAGE_TOKENS)) if len(self._k_scale) else None,
            v_scale=_view(self._v_scale, (*leading, PAGE_TOKENS)) if len(self._v_scale) else None,
        )

    def block_tables(self, shape: Shape) -> Tensor:
        """Return tables of calls that use different blocks, [calls, batch, blocks] int32.

        Contiguous pieces, whole runs or single blocks, are scattered at random over memory.
        """
        together = self._options.blocks_together
        pieces = self._options.num_pieces(shape.context_tokens)
        order = torch.randperm(self.num_blocks(shape.group, shape.head_dim) // together, generator=seeded())
        calls = len(order) // (shape.batch * pieces)
        firsts = order[: calls * shape.batch * pieces].view(calls, shape.batch, pieces, 1) * together
        blocks = (firsts + torch.arange(together)).flatten(-2)
        return blocks[..., : -(-shape.context_tokens // BLOCK_SIZE)].int()

    def read_bytes_per_s(self, turn: int) -> float:
        """Read part of the pool front to back, a different part each turn; return bytes per second."""
        elements = min(len(self.k), _READ_BYTES // self.k.itemsize)
        part = self.k[turn % (len(self.k) // elements) * elements :][:elements]
        return part.nbytes / native.read_seconds(part, self._options.threads)

    def gathered(self, shape: Shape, turn: int) -> tuple[Tensor, Tensor]:
        """View part of the pool as contiguous keys and values, both [batch, kv_heads, tokens, head_dim].

        Each turn has a different part, if the pool holds several.
        """
        dims = (shape.batch, shape.kv_heads, shape.context_tokens, shape.head_dim)
        size = math.prod(dims)
        start = turn % (self.k.numel() // size) * size
        return self.k[start : start + size].view(dims), self.v[start : start + size].view(dims)


def seeded() -> torch.Generator:
    """Return random numbers that are equal in every run."""
    return torch.Generator().manual_seed(0)


def _fill(tensor: Tensor, numbers: Tensor) -> None:
    """Repeat the numbers, of odd length so that rows differ, in huge pages where there are some."""
    native.advise_huge_pages(tensor)
    piece = numbers.to(tensor.dtype)
    for start in range(0, tensor.numel(), max(len(piece), 1)):
        part = tensor[start : start + len(piece)]
        part.copy_(piece[: len(part)])


def _view(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor[: math.prod(shape)].view(shape)
