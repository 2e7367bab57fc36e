"""Random decode-attention problems over a paged cache, and their solutions in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.native import empty_paired_keys, paged_attention_decode

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Relative error of a head's output vector, including rounding to the output's dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@dataclass
class PagedCase:
    """Arguments of one call; unused slots of the caches are NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    scale: float
    window: int = 0
    block_size: int | None = None  # None: a page of the caches
    sinks: Tensor | None = None  # [heads]
    softcap: float = 0.0  # 0: no cap

    def run(self, *, num_threads: int = 0, isa: str | None = None, out: Tensor | None = None) -> Tensor:
        """Return the native kernel's answer."""
        return paged_attention_decode(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.context_lens,
            self.scale,
            out,
            num_threads,
            block_size=self.block_size,
            window=self.window,
            sinks=self.sinks,
            softcap=self.softcap,
            isa=isa,
        )

    def context(self, cache: Tensor, request: int) -> Tensor:
        """Return a request's K or V, [tokens, heads, head_dim] float64, KV heads repeated per group."""
        length = int(self.context_lens[request])
        first = max(0, length - self.window) if self.window else 0
        page_tokens = cache.shape[2]
        slots = self.slots(request, torch.arange(first, length))
        rows = cache[slots // page_tokens, :, slots % page_tokens].flatten(2)
        return rows.double().repeat_interleave(self.q.shape[1] // cache.shape[1], dim=1)

    def slots(self, request: int, tokens: Tensor) -> Tensor:
        """Return the slots of a request's tokens."""
        block_size = self.block_size or self.k_cache.shape[2]
        return self.block_tables[request, tokens // block_size].long() * block_size + tokens % block_size

    def reference(self) -> Tensor:
        """Return the answer in float64, computed request by request."""
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for request, q in enumerate(self.q.double()):
            scores = torch.einsum("hd,thd->ht", q, self.context(self.k_cache, request)) * self.scale
            if self.softcap:
                scores = self.softcap * (scores / self.softcap).tanh()
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.double()[:, None]), 1)
            values = self.context(self.v_cache, request)
            out[request] = torch.einsum("ht,thd->hd", scores.softmax(-1)[:, : len(values)], values)
        return out

    def error_from_scores(self) -> Tensor:
        """Return the effect of rounded fp32 scores on each head's output vector, [batch, heads] float64.

        In any order of summation, a sum of n products is off by at most n roundings of the products' total
        size. (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1.) Scores off by e change
        a weight by a factor within exp(±2e). Scores near 1e5, with a rounding of 0.004, are the worst case.
        """
        bound = torch.zeros(self.q.shape[:2], dtype=torch.float64)
        roundings = (self.q.shape[-1] + 2) * torch.finfo(torch.float32).eps / 2  # two roundings for the scale
        for request in range(len(self.q)):
            q, k, v = (
                self.q[request].double(),
                *(self.context(c, request) for c in (self.k_cache, self.v_cache)),
            )
            if not len(k):
                continue
            products = torch.einsum("hd,thd->thd", q, k) * self.scale
            off = roundings * products.abs().sum(-1).amax(0)
            weights = products.sum(-1).softmax(0)
            out = torch.einsum("th,thd->hd", weights, v)
            bound[request] = torch.expm1(2 * off) * (weights * (v - out).norm(dim=-1)).sum(0)
        return bound

    def error_from_least_numbers(self) -> Tensor:
        """Return the effect of subnormal spacing on each head's output vector, [batch, heads] float64.

        A large sink makes the weights, which kernels may round to the dtype of V, and the output that small.
        """
        of = torch.finfo(self.q.dtype)
        bound = torch.full(self.q.shape[:2], self.q.shape[2] ** 0.5, dtype=torch.float64)
        for request in range(len(self.q)):
            bound[request] += self.context(self.v_cache, request).norm(dim=-1).sum(0)
        return bound * of.smallest_normal * of.eps

    def error(self, out: Tensor) -> float:
        """Return the largest relative error of any head's output vector."""
        reference = self.reference()
        return float(((out.double() - reference).norm(dim=-1) / reference.norm(dim=-1)).max())


def make_case(
    lengths: list[int],
    *,
    kv_heads: int = 2,
    group: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    blocks_per_page: int = 1,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    seed: int = 0,
    paired: bool = False,
) -> PagedCase:
    """Return random normal q, k, v in scattered blocks; unused table entries are far out of range.

    `paired` stores keys in pairs of dimensions; block_size must be a multiple of 16 then. The call gets a
    block_size only with several `blocks_per_page`.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_size) for length in lengths]
    page_tokens = block_size * blocks_per_page
    num_pages = -(-(sum(blocks) + 2) // blocks_per_page)
    num_blocks = num_pages * blocks_per_page
    order = torch.randperm(num_blocks, generator=generator).int()
    tables = torch.full((len(lengths), max(blocks) + 1), 2**31 - 1, dtype=torch.int32)
    shape = (num_pages, kv_heads, page_tokens, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    start = 0
    for request, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        own = order[start : start + count]
        start += count
        tables[request, :count] = own
        first = max(0, length - window) if window else 0
        tables[request, : first // block_size] = -1
        positions = torch.arange(first, length)
        slots = own[positions // block_size].long() * block_size + positions % block_size
        for cache in caches:
            rows = torch.randn(length - first, kv_heads, head_dim, generator=generator)
            cache[slots // page_tokens, :, slots % page_tokens] = rows.to(dtype)
    q = torch.randn(len(lengths), kv_heads * group, head_dim, generator=generator).to(dtype)
    lens = torch.tensor(lengths, dtype=torch.int32)
    if paired:
        keys = empty_paired_keys(
            num_pages, kv_heads=kv_heads, page_tokens=page_tokens, head_dim=head_dim, dtype=dtype
        )
        caches[0] = keys.copy_(caches[0].unflatten(-1, (-1, 2)))
    return PagedCase(
        q,
        caches[0],
        caches[1],
        tables,
        lens,
        head_dim**-0.5,
        window,
        block_size if blocks_per_page > 1 else None,
    )
