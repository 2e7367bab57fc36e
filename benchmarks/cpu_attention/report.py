"""Report of the suite."""

import statistics
from dataclasses import dataclass, field
from functools import partial

from benchmarks.cpu_attention.options import RIVALS
from neo_desktop.app.bench.section import Column, Section, Table


@dataclass(frozen=True, slots=True)
class RivalResult:
    """Result of another implementation in a case."""

    batch: int  # requests per call: the case's, or fewer if that takes too long
    calls: int  # with this batch
    gb_per_s: float  # median
    fraction: float  # of plain reads around the calls, median; compares with the case's own fraction
    relative_error: float  # of one head, against float64


@dataclass(frozen=True, slots=True)
class CpuAttentionCase:
    """One line of the table. All GB/s are 1e9 bytes of keys and values per second, medians."""

    group: int
    kv_heads: int
    head_dim: int
    batch: int
    context_tokens: int
    kv_bytes: int  # read by one call, including int8's scales
    calls: int
    milliseconds: float  # per call
    gb_per_s: float
    read_gb_per_s: float  # plain reads around the calls, same threads
    multiply_adds_per_s: float  # in registers, around the calls, same threads
    fma_gb_per_s: float  # rate of KV whose multiply-adds take this arithmetic
    fraction: float  # of plain reads; median over samples of calls
    limit_fraction: float  # of the smaller limit; median over samples: the headline
    relative_error: float  # worst checked head, against float64
    rivals: dict[str, RivalResult] = field(default_factory=dict)  # key of RIVALS → result on gathered KV


@dataclass(frozen=True, slots=True)
class CpuAttentionReport:
    """Results of the suite; `notes` name figures that flatter or are unreliable."""

    dtype: str  # of KV
    block_size: int  # tokens per block table entry
    page_tokens: int  # contiguous per head
    fragmented: bool  # True: blocks are scattered one by one, else in whole pages
    num_threads: int
    isa: str
    cache_bytes: int  # size of the KV cache with the blocks of the calls
    last_level_cache_bytes: int  # 0: unknown
    huge_pages: bool
    notes: tuple[str, ...]
    cases: tuple[CpuAttentionCase, ...]

    def section(self) -> Section:
        """One table."""
        shares = [case.limit_fraction for case in self.cases]
        rivals = [key for key in RIVALS if any(key in case.rivals for case in self.cases)]
        columns: dict[str, Column] = {
            "requests x tokens": lambda case: f"{case.batch} x {case.context_tokens}",
            "group": "group",
            "head dim": "head_dim",
            "ms": "milliseconds:.2f",
            "GB/s": "gb_per_s:.1f",
            "read GB/s": "read_gb_per_s:.1f",
            "FMA GB/s": "fma_gb_per_s:.0f",
            "of limit": "limit_fraction:.0%",
        }
        columns |= {RIVALS[key]: partial(_short, key) for key in rivals}
        blocks = "scattered" if self.fragmented else f"in pages of {self.page_tokens}"
        summary = (
            f"{self.dtype} KV, {self.block_size}-token blocks {blocks}, {self.num_threads} threads, "
            f"{self.isa}: the kernel reaches {min(shares):.0%} to {max(shares):.0%} of its limit, "
            f"{statistics.median(shares):.0%} in the middle. Largest error against 64 bits: "
            f"{max(case.relative_error for case in self.cases):.0e}."
        )
        title = "CPU attention: decode attention next to the KV in host memory"
        return Section(title, summary, (Table.of("", self.cases, columns),), notes=self.notes)


def _short(rival: str, case: CpuAttentionCase) -> str:
    """Format two digits, or all before the point, because the column is narrow."""
    if (result := case.rivals.get(rival)) is None:
        return ""
    return f"{result.gb_per_s:.2g}" if result.gb_per_s < 10 else f"{result.gb_per_s:.0f}"
