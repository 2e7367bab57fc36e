"""Measurement of a case, beside the limits of memory and cores."""

import statistics
import time
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from benchmarks.cpu_attention.options import Options, Shape
from benchmarks.cpu_attention.pool import Caches, Pool, seeded
from neo_desktop import native

_MIN_SAMPLES = 3
_SAMPLE_BYTES = 256 << 20  # short calls form a sample of about the bytes that are read before and after it
_FMA_SECONDS = 0.003


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of memory and cores at one moment."""

    read_bytes_per_s: float
    multiply_adds_per_s: float

    def bytes_per_s(self, multiply_adds_per_byte: float) -> float:
        """Return the roofline: bytes of KV per second at this arithmetic intensity."""
        return min(self.read_bytes_per_s, self.multiply_adds_per_s / multiply_adds_per_byte)

    def mean(self, other: "Limits") -> "Limits":
        """Return the mean of two moments."""
        return Limits(
            (self.read_bytes_per_s + other.read_bytes_per_s) / 2,
            (self.multiply_adds_per_s + other.multiply_adds_per_s) / 2,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table; medians over samples of calls."""

    seconds: float  # per call
    kv_bytes: int  # keys and values of one call, including int8's scales
    read_bytes_per_s: float  # plain reads around the calls, same threads
    fma_bytes_per_s: float  # rate of KV whose multiply-adds take this arithmetic, same threads
    limit_share: float  # of the smaller limit: the headline
    relative_error: float  # worst checked head, against float64

    @property
    def cells(self) -> tuple[str, ...]:
        """Milliseconds, 1e9 bytes of KV per second and the limits, as the table has them."""
        rates = (self.kv_bytes / self.seconds, self.read_bytes_per_s, self.fma_bytes_per_s)
        gb_per_s = (f"{rate / 1e9:.{digits}f}" for rate, digits in zip(rates, (1, 1, 0), strict=True))
        return (f"{self.seconds * 1e3:.2f}", *gb_per_s, f"{self.limit_share:.0%}")


def measure(pool: Pool, options: Options, shape: Shape, seconds: float) -> Case:
    """Call the kernel for about this time."""
    caches = pool.caches(shape.group, shape.head_dim)
    tables = pool.block_tables(shape)
    in_turn = len(tables)  # calls that use different blocks
    lens = torch.full((shape.batch,), shape.context_tokens, dtype=torch.int32)
    q = torch.randn(shape.batch, shape.kv_heads * shape.group, shape.head_dim, generator=seeded())
    q = q.to(options.compute_dtype)
    out = torch.empty_like(q)
    kv_bytes = shape.kv_bytes(options.dtype)
    calls_per_sample = max(1, min(_SAMPLE_BYTES // kv_bytes, in_turn))
    threads = options.threads  # counts the CPUs, which takes a tenth of a short call

    def sample(turn: int) -> float:
        chosen = [tables[(turn * calls_per_sample + i) % in_turn] for i in range(calls_per_sample)]
        start = time.perf_counter()
        for table in chosen:
            caches.decode(q, table, lens, out, threads)
        return (time.perf_counter() - start) / calls_per_sample

    caches.decode(q, tables[0], lens, out, threads)
    error = _worst_error(q, caches, tables[0], shape.context_tokens, out)
    calls: list[float] = []
    limits = [_limits(pool, options, 0)]
    shares: list[float] = []
    end = time.perf_counter() + seconds
    while len(calls) < _MIN_SAMPLES or time.perf_counter() < end:
        turn = len(calls) + 1
        calls.append(sample(turn))
        limits.append(_limits(pool, options, turn))
        around = limits[-2].mean(limits[-1])
        shares.append(kv_bytes / calls[-1] / around.bytes_per_s(shape.multiply_adds / kv_bytes))
    multiply_adds_per_s = statistics.median(each.multiply_adds_per_s for each in limits)
    return Case(
        seconds=statistics.median(calls),
        kv_bytes=kv_bytes,
        read_bytes_per_s=statistics.median(each.read_bytes_per_s for each in limits),
        fma_bytes_per_s=multiply_adds_per_s * kv_bytes / shape.multiply_adds,
        limit_share=statistics.median(shares),
        relative_error=error,
    )


def _limits(pool: Pool, options: Options, turn: int) -> Limits:
    """Read for a moment, and multiply for another."""
    read_bytes_per_s = pool.read_bytes_per_s(turn)
    # Queries in bf16 use dot products if available, others fp32.
    dtype = torch.bfloat16 if options.compute_dtype is torch.bfloat16 else torch.float32
    return Limits(read_bytes_per_s, native.fma_rate(_FMA_SECONDS, options.threads, dtype=dtype))


def _worst_error(q: Tensor, caches: Caches, table: Tensor, tokens: int, out: Tensor) -> float:
    """Return the worst error against float64, of the first and last requests and KV heads."""
    kv_heads = caches.v.shape[1]
    group = q.shape[1] // kv_heads
    worst = 0.0
    for request, head in product({0, len(q) - 1}, {0, kv_heads - 1}):
        k, v = caches.rows(table[request], head, tokens)
        heads = slice(head * group, (head + 1) * group)
        worst = max(worst, _relative_error(out[request, heads], q[request, heads], k, v))
    return worst


def _relative_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the worst error against float64 of the query heads that share a KV head.

    Args:
        out: [heads, head_dim], to be checked.
        q: [heads, head_dim].
        k: [tokens, head_dim].
        v: [tokens, head_dim].
    """
    scores = q.double() @ k.double().T * q.shape[-1] ** -0.5
    expected = scores.softmax(-1) @ v.double()
    return float(((out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
