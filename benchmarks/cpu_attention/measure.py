"""Measurement of the cases, with notes on their validity."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from benchmarks.cpu_attention.options import CpuAttentionOptions, Shape
from benchmarks.cpu_attention.pool import Caches, Pool, seeded
from benchmarks.cpu_attention.report import CpuAttentionCase, CpuAttentionReport
from benchmarks.cpu_attention.rivals import (
    LlamaCpp,
    NoLlamaCppError,
    Rival,
    TorchSdpa,
    measure_rival,
    relative_error,
)
from neo_desktop import native
from neo_desktop.engine.profiling.hardware import last_level_cache_bytes
from neo_desktop.engine.progress import Progress

_MIN_SAMPLES = 3
_SAMPLE_BYTES = 256 << 20  # short calls form a sample of about the bytes that are read before and after it
_FMA_SECONDS = 0.003


def run_cpu_attention(options: CpuAttentionOptions, progress: Progress) -> Iterator[CpuAttentionReport]:
    """Measure every case; yield the growing report after each.

    A case that does not fit the cache is omitted with a note.

    Raises MemoryError if the cache could not hold a single case.
    """
    progress(0.0, "making the KV cache")
    pool = Pool(options)
    wanted = [
        shape
        for group, head_dim in product(options.groups, options.head_dims)
        for shape in options.shapes(group, head_dim, pool.num_blocks(group, head_dim))
    ]
    fitting = [shape for shape in wanted if shape is not None]
    if not fitting:
        raise MemoryError(f"{pool.nbytes / 1e6:.0f} MB for the KV cache hold no case; free some memory")
    last_level_bytes = last_level_cache_bytes()
    rivals, missing = _find_rivals(options)

    notes = [
        f"KV cache of {pool.nbytes / 1e6:.0f} MB; the last-level cache has {last_level_bytes / 1e6:.0f} MB."
    ]
    if len(fitting) < len(wanted):
        notes.append(f"{len(wanted) - len(fitting)} cases do not fit into the KV cache and were left out.")
    notes += missing

    cases: list[CpuAttentionCase] = []
    for shape in fitting:
        sizes = f"{shape.batch} x {shape.context_tokens} tokens"
        what = f"group {shape.group}, head_dim {shape.head_dim}, {sizes}"
        progress(len(cases) / len(fitting), what)
        case = measure(pool, options, shape, options.seconds / len(fitting))
        seconds = options.rival_seconds / len(fitting) / max(len(rivals), 1)
        results = {key: measure_rival(each, pool, options, shape, seconds) for key, each in rivals.items()}
        cases.append(replace(case, rivals=results))
        yield CpuAttentionReport(
            dtype=str(options.dtype).removeprefix("torch."),
            block_size=options.block_size,
            page_tokens=options.page_tokens,
            fragmented=options.fragmented,
            num_threads=options.threads,
            isa=native.default_isa(),
            cache_bytes=pool.nbytes,
            last_level_cache_bytes=last_level_bytes,
            huge_pages=pool.huge_pages,
            notes=tuple(notes),
            cases=tuple(cases),
        )
    progress(1.0, "done")


def _find_rivals(options: CpuAttentionOptions) -> tuple[dict[str, Rival], list[str]]:
    """Return `key of RIVALS` → rival, and notes on missing ones."""
    if options.rival_seconds <= 0:
        return {}, []
    if options.dtype is torch.int8:
        return {}, ["torch SDPA and llama.cpp are compared with float16 and bfloat16 KV only."]
    rivals: dict[str, Rival] = {"torch_sdpa": TorchSdpa()}
    try:
        rivals["llama_cpp"] = LlamaCpp()
    except NoLlamaCppError as error:
        return rivals, [f"{error}: not compared."]
    return rivals, []


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


def measure(pool: Pool, options: CpuAttentionOptions, shape: Shape, seconds: float) -> CpuAttentionCase:
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
    read_fractions: list[float] = []
    limit_fractions: list[float] = []
    end = time.perf_counter() + seconds
    while len(calls) < _MIN_SAMPLES or time.perf_counter() < end:
        turn = len(calls) + 1
        calls.append(sample(turn))
        limits.append(_limits(pool, options, turn))
        around = limits[-2].mean(limits[-1])
        reached = kv_bytes / calls[-1]
        read_fractions.append(reached / around.read_bytes_per_s)
        limit_fractions.append(reached / around.bytes_per_s(shape.multiply_adds / kv_bytes))
    call_s = statistics.median(calls)
    multiply_adds_per_s = statistics.median(each.multiply_adds_per_s for each in limits)
    return CpuAttentionCase(
        group=shape.group,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        batch=shape.batch,
        context_tokens=shape.context_tokens,
        kv_bytes=kv_bytes,
        calls=len(calls) * calls_per_sample,
        milliseconds=call_s * 1e3,
        gb_per_s=kv_bytes / call_s / 1e9,
        read_gb_per_s=statistics.median(each.read_bytes_per_s for each in limits) / 1e9,
        multiply_adds_per_s=multiply_adds_per_s,
        fma_gb_per_s=multiply_adds_per_s * kv_bytes / shape.multiply_adds / 1e9,
        fraction=statistics.median(read_fractions),
        limit_fraction=statistics.median(limit_fractions),
        relative_error=error,
    )


def _limits(pool: Pool, options: CpuAttentionOptions, turn: int) -> Limits:
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
        worst = max(worst, relative_error(out[request, heads], q[request, heads], k, v))
    return worst
