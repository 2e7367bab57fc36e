"""What the suite found."""

import statistics
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from neo_desktop.app.bench.cpu_attention.options import RIVALS
from neo_desktop.app.bench.cpu_attention.plot import draw_shares, draw_speeds, size
from neo_desktop.app.bench.section import Metric, Plot, Section, Table


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

    @property
    def bound(self) -> str:
        """Which limit is the smaller one."""
        return "memory" if self.read_gb_per_s <= self.fma_gb_per_s else "arithmetic"

    @property
    def limit_gb_per_s(self) -> float:
        """The smaller limit."""
        return min(self.read_gb_per_s, self.fma_gb_per_s)


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
    suite: Literal["cpu-attention"] = "cpu-attention"

    def metrics(self) -> tuple[Metric, ...]:
        """The share of the limit, per group."""
        by_group: dict[int, list[float]] = {}
        for case in self.cases:
            by_group.setdefault(case.group, []).append(case.limit_fraction)
        return tuple(
            Metric(
                f"cpu-attention.group_{group}.limit_share", 100 * statistics.median(shares), "% of the limit"
            )
            for group, shares in by_group.items()
        )

    def section(self) -> Section:
        """One table, and a picture of shares and speeds."""
        shares = [case.limit_fraction for case in self.cases]
        rivals = {key for case in self.cases for key in case.rivals}
        return Section(
            "CPU attention: decode attention next to the KV in host memory",
            f"{self.dtype} KV, {self.block_size}-token blocks "
            f"{'scattered' if self.fragmented else f'in pages of {self.page_tokens}'}, "
            f"{self.num_threads} threads, {self.isa}: the kernel reaches "
            f"{min(shares):.0%} to {max(shares):.0%} of what memory and cores allow, "
            f"{statistics.median(shares):.0%} in the middle. Its results differ from those in 64 bits by "
            f"at most {max(case.relative_error for case in self.cases):.0e}.",
            (self._table(),),
            (
                Plot(
                    "cpu-attention",
                    "How near the kernel comes to its limit",
                    partial(draw_shares, self),
                    size(self),
                ),
                Plot(
                    "cpu-attention-speed",
                    "GB of KV per second, beside the limit and others",
                    partial(draw_speeds, self),
                    size(self, bars_per_case=1 + len(rivals)),
                ),
            ),
            self.notes,
            tables_are_details=True,
        )

    def _table(self) -> Table:
        rivals = [key for key in RIVALS if any(key in case.rivals for case in self.cases)]
        return Table(
            (
                "requests x tokens",
                "group",
                "head dim",
                "ms",
                "GB/s",
                "read GB/s",
                "FMA GB/s",
                "of limit",
                *(RIVALS[key] for key in rivals),
            ),
            tuple(
                (
                    f"{case.batch} x {case.context_tokens}",
                    str(case.group),
                    str(case.head_dim),
                    f"{case.milliseconds:.2f}",
                    f"{case.gb_per_s:.1f}",
                    f"{case.read_gb_per_s:.1f}",
                    f"{case.fma_gb_per_s:.0f}",
                    f"{case.limit_fraction:.0%}",
                    *(_short(case.rivals[key].gb_per_s) if key in case.rivals else "" for key in rivals),
                )
                for case in self.cases
            ),
        )


def _short(gb_per_s: float) -> str:
    """Two digits, or all before the point: the column is narrow."""
    return f"{gb_per_s:.2g}" if gb_per_s < 10 else f"{gb_per_s:.0f}"
