"""What the suite found: table and JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

TARGET = 0.9  # share of the limit that the kernels are meant to reach
RIVALS = {"torch_sdpa": "torch SDPA", "llama_cpp": "llama.cpp"}  # key in JSON -> name


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
    rivals: Mapping[str, RivalResult] = field(default_factory=dict)  # key of RIVALS -> on gathered KV

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

    def render(self) -> RenderableType:
        """A table, and what its reader should know."""
        title = (
            f"CPU decode attention: {self.dtype} KV, {self.block_size}-token blocks "
            f"{'scattered' if self.fragmented else f'in runs of {self.page_tokens}'}, "
            f"{self.num_threads} threads, {self.isa}"
        )
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
        rivals = [key for key in RIVALS if any(key in case.rivals for case in self.cases)]
        for heading in (
            "group",
            "head\ndim",
            "batch",
            "context",
            "ms",
            "GB/s",
            "read\nGB/s",
            "FMA\nGB/s",
            "of\nlimit",
            "of\nread",
            "error",
            *(RIVALS[key].replace(" ", "\n").replace(".", "\n.") for key in rivals),
        ):
            table.add_column(heading, justify="right", style="bold" if heading == "of\nlimit" else None)
        panel = None
        for case in self.cases:
            if panel not in (None, (case.group, case.head_dim)):
                table.add_section()
            panel = (case.group, case.head_dim)
            table.add_row(
                str(case.group),
                str(case.head_dim),
                str(case.batch),
                str(case.context_tokens),
                f"{case.milliseconds:.2f}",
                f"{case.gb_per_s:.1f}",
                f"{case.read_gb_per_s:.1f}",
                f"{case.fma_gb_per_s:.0f}",
                f"{case.limit_fraction:.0%}",
                f"{case.fraction:.0%}",
                f"{case.relative_error:.0e}",
                *(f"{case.rivals[key].gb_per_s:.2g}" if key in case.rivals else "" for key in rivals),
            )
        return Group(table, *self.notes)

    def to_json(self) -> dict[str, Any]:
        """The suite's name, its settings, its notes and one object per case; units are in the names."""
        cases = [
            asdict(case) | {"limit_gb_per_s": case.limit_gb_per_s, "bound": case.bound} for case in self.cases
        ]
        return {"suite": "cpu-attention", **asdict(self), "target": TARGET, "cases": cases}
