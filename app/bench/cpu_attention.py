"""Suite `cpu-attention`: decode attention on the CPU against the speed at which this machine reads memory.

Decode attention reads every key and value once and does little with them, so the time to read them is the
limit. A case calls the kernel again and again on blocks scattered over one large KV cache, other blocks each
time, so that none is found in the processor's caches; before and after each call the same threads read part
of the cache front to back. The fraction reached is the median over calls of (bytes per second of the call) /
(bytes per second of the reads around it): other programs on the machine disturb both alike.
"""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import psutil
import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor

from neo_desktop import native
from neo_desktop.app.bench.report import Progress
from neo_desktop.engine.profiling.hardware import last_level_cache_bytes

_MIN_CALLS = 3
_READ_BYTES = 256 << 20  # read before and after every call


@dataclass(frozen=True, slots=True)
class CpuAttentionOptions:
    """What to measure and how much memory and time to take."""

    groups: tuple[int, ...] = (1, 4, 8)  # query heads per KV head
    head_dims: tuple[int, ...] = (64, 128)
    context_tokens: tuple[int, ...] = (512, 2048, 8192, 32768)  # with the batch that fills the cache
    long_tokens: int = 32768  # one request alone
    short_requests: int = 256
    short_tokens: int = 64
    dtype: torch.dtype = torch.float16
    block_size: int = 16
    memory_bytes: int | None = (
        None  # for the KV cache; None: 4x the last-level cache, within a quarter of free memory
    )
    seconds: float = 60.0  # for all calls together; a case makes at least three
    num_threads: int = 0  # 0: what the kernel takes by itself


@dataclass(frozen=True, slots=True)
class CpuAttentionCase:
    """One line of the table."""

    group: int
    kv_heads: int
    head_dim: int
    batch: int
    context_tokens: int
    kv_bytes: int  # read by one call
    calls: int
    milliseconds: float  # median of the calls
    gb_per_s: float
    read_gb_per_s: float  # plain reads around the calls, same threads
    fraction: float  # median over the calls
    relative_error: float  # of the worst head in the sample, against float64


@dataclass(frozen=True, slots=True)
class CpuAttentionReport:
    """What the suite found; `notes` say where the figures flatter or cannot be trusted."""

    dtype: str
    block_size: int
    num_threads: int
    isa: str
    cache_bytes: int  # the KV cache that the blocks of all calls are scattered over
    last_level_cache_bytes: int  # 0: the system does not say
    huge_pages: bool
    notes: tuple[str, ...]
    cases: tuple[CpuAttentionCase, ...]

    def render(self) -> RenderableType:
        """A table, and what its reader should know."""
        title = (
            f"Decode attention on the CPU: {self.dtype} KV, blocks of {self.block_size} tokens, "
            f"{self.num_threads} threads, {self.isa}"
        )
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
        headings = (
            "group",
            "head\ndim",
            "batch",
            "context",
            "KV MB",
            "ms",
            "GB/s",
            "read\nGB/s",
            "reached",
            "error",
        )
        for heading in headings:
            table.add_column(heading, justify="right")
        for case in self.cases:
            table.add_row(
                str(case.group),
                str(case.head_dim),
                str(case.batch),
                str(case.context_tokens),
                f"{case.kv_bytes / 1e6:.0f}",
                f"{case.milliseconds:.2f}",
                f"{case.gb_per_s:.1f}",
                f"{case.read_gb_per_s:.1f}",
                f"{case.fraction:.0%}",
                f"{case.relative_error:.0e}",
            )
        return Group(table, *self.notes)

    def to_json(self) -> dict[str, Any]:
        """The suite's name, its settings, its notes and one object per case; units are in the names."""
        return {"suite": "cpu-attention", **asdict(self)}


def run_cpu_attention(options: CpuAttentionOptions, progress: Progress) -> CpuAttentionReport:
    """Measure every case of `options`; a case that does not fit into the cache is left out with a note.

    Raises MemoryError where the cache could not hold even the short requests.
    """
    progress(0.0, "making the KV cache")
    last_level_bytes = last_level_cache_bytes()
    pool = _Pool(_cache_bytes(options, last_level_bytes), options)
    notes = [_cache_note(pool.nbytes, last_level_bytes)]
    cases: list[CpuAttentionCase] = []
    shapes = list(product(options.groups, options.head_dims))
    batches = [list(_batches(options, pool.num_blocks(group, head_dim))) for group, head_dim in shapes]
    total = sum(len(each) for each in batches)
    if total == 0:
        raise MemoryError(f"{pool.nbytes / 1e6:.0f} MB for the KV cache hold no case; free some memory")
    left_out = len(shapes) * (len(options.context_tokens) + 2) - total
    if left_out:
        notes.append(
            f"{left_out} cases were left out: their contexts do not fit into {pool.nbytes / 1e6:.0f} MB."
        )
    for (group, head_dim), each in zip(shapes, batches, strict=True):
        for batch, tokens in each:
            progress(len(cases) / total, f"group {group}, head_dim {head_dim}, {batch} x {tokens} tokens")
            cases.append(_measure(pool, options, group, head_dim, batch, tokens, options.seconds / total))
    progress(1.0, "done")
    return CpuAttentionReport(
        dtype=str(options.dtype).removeprefix("torch."),
        block_size=options.block_size,
        num_threads=options.num_threads or native.default_num_threads(),
        isa=native.default_isa(),
        cache_bytes=pool.nbytes,
        last_level_cache_bytes=last_level_bytes,
        huge_pages=pool.huge_pages,
        notes=tuple(notes),
        cases=tuple(cases),
    )


class _Pool:
    """Memory for keys and values, taken once and viewed in every case's shape."""

    def __init__(self, nbytes: int, options: CpuAttentionOptions) -> None:
        self._block_size = options.block_size
        self._elements = nbytes // 2 // options.dtype.itemsize
        # Random numbers are slow to make: a piece is repeated, of odd length so that rows differ.
        piece = torch.randn(min(self._elements, 9_999_991), generator=_generator()).to(options.dtype)
        self.k, self.v = (torch.empty(self._elements, dtype=options.dtype) for _ in range(2))
        self.huge_pages = native.advise_huge_pages(self.k) and native.advise_huge_pages(self.v)
        for tensor in (self.k, self.v):
            for start in range(0, self._elements, len(piece)):
                part = tensor[start : start + len(piece)]
                part.copy_(piece[: len(part)])

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def num_blocks(self, group: int, head_dim: int) -> int:
        """How many blocks of this shape the pool holds."""
        return self._elements // (_kv_heads(group) * self._block_size * head_dim)

    def caches(self, group: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """K and V as [num_blocks, kv_heads, block_size, head_dim]."""
        shape = (self.num_blocks(group, head_dim), _kv_heads(group), self._block_size, head_dim)
        return self.k[: math.prod(shape)].view(shape), self.v[: math.prod(shape)].view(shape)


def _measure(
    pool: _Pool,
    options: CpuAttentionOptions,
    group: int,
    head_dim: int,
    batch: int,
    tokens: int,
    seconds: float,
) -> CpuAttentionCase:
    k_cache, v_cache = pool.caches(group, head_dim)
    blocks_per_request = _blocks(tokens, options)
    order = torch.randperm(len(k_cache), generator=_generator()).int()
    in_turn = len(order) // (batch * blocks_per_request)  # calls that use different blocks
    tables = order[: in_turn * batch * blocks_per_request].view(in_turn, batch, blocks_per_request)
    lens = torch.full((batch,), tokens, dtype=torch.int32)
    q = torch.randn(batch, _kv_heads(group) * group, head_dim, generator=_generator()).to(options.dtype)
    out = torch.empty_like(q)
    scale = head_dim**-0.5

    def call(table: Tensor) -> float:
        start = time.perf_counter()
        native.paged_attention_decode(q, k_cache, v_cache, table, lens, scale, out, options.num_threads)
        return time.perf_counter() - start

    read_elements = min(len(pool.k), _READ_BYTES // options.dtype.itemsize)
    parts = len(pool.k) // read_elements

    def read(turn: int) -> float:
        part = pool.k[turn % parts * read_elements :][:read_elements]
        return part.nbytes / native.read_seconds(part, options.num_threads)

    kv_bytes = batch * tokens * _kv_heads(group) * head_dim * options.dtype.itemsize * 2
    call(tables[0])
    error = _relative_error(q, k_cache, v_cache, tables[0], tokens, scale, out)
    calls: list[float] = []
    reads = [read(0)]
    fractions: list[float] = []
    end = time.perf_counter() + seconds
    while len(calls) < _MIN_CALLS or time.perf_counter() < end:
        turn = len(calls) + 1
        calls.append(call(tables[turn % in_turn]))
        reads.append(read(turn))
        fractions.append(kv_bytes / calls[-1] / statistics.mean(reads[-2:]))
    call_s = statistics.median(calls)
    return CpuAttentionCase(
        group=group,
        kv_heads=_kv_heads(group),
        head_dim=head_dim,
        batch=batch,
        context_tokens=tokens,
        kv_bytes=kv_bytes,
        calls=len(calls),
        milliseconds=call_s * 1e3,
        gb_per_s=kv_bytes / call_s / 1e9,
        read_gb_per_s=statistics.median(reads) / 1e9,
        fraction=statistics.median(fractions),
        relative_error=error,
    )


def _relative_error(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, tokens: int, scale: float, out: Tensor
) -> float:
    """The worst head of the first and last requests, first and last KV heads, against float64."""
    kv_heads = k_cache.shape[1]
    group = q.shape[1] // kv_heads
    worst = 0.0
    for request, head in product(_ends(len(q)), _ends(kv_heads)):
        k, v = (
            cache[table[request].long(), head].flatten(0, 1)[:tokens].double() for cache in (k_cache, v_cache)
        )
        heads = slice(head * group, (head + 1) * group)
        expected = (q[request, heads].double() @ k.T * scale).softmax(-1) @ v
        error = (out[request, heads].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = max(worst, float(error.max()))
    return worst


def _ends(count: int) -> set[int]:
    return {0, count - 1}


def _batches(options: CpuAttentionOptions, num_blocks: int) -> Iterator[tuple[int, int]]:
    """(requests, tokens of each) of every case that the cache can hold."""
    for tokens in options.context_tokens:
        batch = num_blocks // _blocks(tokens, options)
        if batch > 0:
            yield batch, tokens
    for batch, tokens in ((1, options.long_tokens), (options.short_requests, options.short_tokens)):
        if batch * _blocks(tokens, options) <= num_blocks:
            yield batch, tokens


def _blocks(tokens: int, options: CpuAttentionOptions) -> int:
    return -(-tokens // options.block_size)


def _kv_heads(group: int) -> int:
    return 32 if group == 1 else 8  # as Llama 2 7B; as Llama 3 8B and 70B


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _cache_bytes(options: CpuAttentionOptions, last_level_bytes: int) -> int:
    if options.memory_bytes is not None:
        return options.memory_bytes
    return min(psutil.virtual_memory().available // 4, max(4 * last_level_bytes, 1 << 30))


def _cache_note(cache_bytes: int, last_level_bytes: int) -> str:
    if last_level_bytes == 0:
        return f"KV cache of {cache_bytes / 1e6:.0f} MB; the size of the last-level cache is unknown."
    times = cache_bytes / last_level_bytes
    size = f"KV cache of {cache_bytes / 1e6:.0f} MB, {times:.1f} times the last-level cache"
    if times >= 4:
        return f"{size}."
    return f"{size}: too small to rule out that part of it was read from there instead of from memory."
