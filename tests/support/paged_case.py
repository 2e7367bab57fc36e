"""Random decode-attention problems over a paged cache, and their solution in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.native import empty_paired_keys, paged_attention_decode

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Relative error of a head's output vector, rounding to the output's dtype included.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@dataclass
class PagedCase:
    """The arguments of one call. Whatever no request attends to is NaN in the caches."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    scale: float
    window: int = 0

    def run(self, *, num_threads: int = 0, isa: str | None = None, out: Tensor | None = None) -> Tensor:
        """The native kernel's answer."""
        return paged_attention_decode(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.context_lens,
            self.scale,
            out,
            num_threads,
            window=self.window,
            isa=isa,
        )

    def context(self, cache: Tensor, request: int) -> Tensor:
        """What a request attends to: [tokens, heads, head_dim] in float64, KV heads repeated per group."""
        length = int(self.context_lens[request])
        first = max(0, length - self.window) if self.window else 0
        blocks = -(-length // cache.shape[2])
        own = cache[self.block_tables[request, :blocks].long()]
        rows = own.flatten(3).transpose(1, 2).flatten(0, 1)[first:length]
        return rows.double().repeat_interleave(self.q.shape[1] // cache.shape[1], dim=1)

    def reference(self) -> Tensor:
        """The answer in float64, one request at a time."""
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for request, q in enumerate(self.q.double()):
            scores = torch.einsum("hd,thd->ht", q, self.context(self.k_cache, request)) * self.scale
            out[request] = torch.einsum("ht,thd->hd", scores.softmax(-1), self.context(self.v_cache, request))
        return out

    def error(self, out: Tensor) -> float:
        """The largest relative error of any head's output vector."""
        reference = self.reference()
        return float(((out.double() - reference).norm(dim=-1) / reference.norm(dim=-1)).max())


def make_case(
    lengths: list[int],
    *,
    kv_heads: int = 2,
    group: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    seed: int = 0,
    paired: bool = False,
) -> PagedCase:
    """Normal random q, k, v; blocks scattered over the cache; unused table entries far out of range.

    `paired` lays the keys out in pairs of dimensions, which wants a block_size that is a multiple of 16.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_size) for length in lengths]
    num_blocks = sum(blocks) + 2
    order = torch.randperm(num_blocks, generator=generator).int()
    tables = torch.full((len(lengths), max(blocks) + 1), 2**31 - 1, dtype=torch.int32)
    shape = (num_blocks, kv_heads, block_size, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    start = 0
    for request, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        own = order[start : start + count]
        start += count
        tables[request, :count] = own
        first = max(0, length - window) if window else 0
        tables[request, : first // block_size] = -1
        positions = torch.arange(first, length)
        for cache in caches:
            rows = torch.randn(length - first, kv_heads, head_dim, generator=generator)
            cache[own[positions // block_size].long(), :, positions % block_size] = rows.to(dtype)
    q = torch.randn(len(lengths), kv_heads * group, head_dim, generator=generator).to(dtype)
    lens = torch.tensor(lengths, dtype=torch.int32)
    if paired:
        keys = empty_paired_keys(
            num_blocks, kv_heads=kv_heads, block_size=block_size, head_dim=head_dim, dtype=dtype
        )
        caches[0] = keys.copy_(caches[0].unflatten(-1, (-1, 2)))
    return PagedCase(q, caches[0], caches[1], tables, lens, head_dim**-0.5, window)
