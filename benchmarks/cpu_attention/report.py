"""What was found, and its table."""

import statistics
from dataclasses import dataclass, field
from functools import partial

from benchmarks.cpu_attention.options import RIVALS
from neo_desktop.app.bench.section import Column, Section, Table


@dataclass(frozen=True, slots=True)
class RivalResult:
    """What another implementation reached in a case."""

    batch: int  # requests per call: those of the case, or fewer where that would take too long
    calls: int  # of this batch
    gb_per_s: float  # median
    fraction: float  # of plain reads around each call, median: what to compare with the case's own
    relative_error: float  # of one head, against float64


@dataclass(frozen=True, slots=True)
class CpuAttentionCase:
    """One line of the table. All GB/s are 1e9 bytes of keys and values per second, medians."""

    group: int
    kv_heads: int
    head_dim: int
    batch: int
    context_tokens: int
    kv_bytes: int  # read by one call; of int8 with the scales
    calls: int
    milliseconds: float  # per call
    gb_per_s: float
    read_gb_per_s: float  # plain reads around the calls, same threads
    multiply_adds_per_s: float  # in registers, around the calls, same threads
    fma_gb_per_s: float  # at which the case's multiply-adds would come at that rate
    fraction: float  # of what was read; median over samples of calls
    limit_fraction: float  # of the smaller of the two, likewise: the headline
    relative_error: float  # of the worst head that was looked at, against float64
    rivals: dict[str, RivalResult] = field(default_factory=dict)  # key of RIVALS -> on gathered KV


@dataclass(frozen=True, slots=True)
class CpuAttentionReport:
    """What the suite found; `notes` say where the figures flatter or cannot be trusted."""

    dtype: str  # of KV
    block_size: int  # tokens of an entry of block tables
    page_tokens: int  # that lie in one piece for each head
    fragmented: bool  # blocks lie scattered one by one, else in whole pages
    num_threads: int
    isa: str
    cache_bytes: int  # the KV cache that the blocks of all calls are scattered over
    last_level_cache_bytes: int  # 0: the system does not say
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
    """Two digits, or all before the point: the column is narrow."""
    if (result := case.rivals.get(rival)) is None:
        return ""
    return f"{result.gb_per_s:.2g}" if result.gb_per_s < 10 else f"{result.gb_per_s:.0f}"
