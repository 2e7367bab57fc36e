"""What the suite found: a table, and two pictures with a row per case, to be read on a narrow screen, too."""

import statistics
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from neo_desktop.app.bench.charts import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    legend,
    round_logs,
    ticks,
    tidy,
)
from neo_desktop.app.bench.cpu_attention.options import RIVALS, TARGET
from neo_desktop.app.bench.section import Column, Metric, Plot, Section, Table
from neo_desktop.app.bench.words import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RIVAL_COLOURS = {"torch_sdpa": GREY, "llama_cpp": RED}
_WIDTH, _CASE_HEIGHT, _PANEL_HEIGHT, _REST_HEIGHT = 5.4, 0.24, 0.45, 1.0  # inches


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

    def beside(self, rival: str) -> dict[str, float]:
        """What is said of a rival's result."""
        result = self.rivals[rival]
        ratio = self.fraction / result.fraction
        fewer = result.batch < self.batch
        return {"relative_error": result.relative_error, "ratio": ratio, "is_smaller": fewer}

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
        found = []
        for group in dict.fromkeys(case.group for case in self.cases):
            share = statistics.median(case.limit_fraction for case in self.cases if case.group == group)
            found.append(Metric(f"cpu-attention.group_{group}.limit_share", 100 * share, "% of the limit"))
        return tuple(found)

    def section(self) -> Section:
        """One table, and pictures of shares and speeds."""
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
        near = "How near the kernel comes to its limit"
        speeds = "GB of KV per second, beside the limit and others"
        title, summary = say("cpu-attention", report=self, shares=shares, middle=statistics.median(shares))
        return Section(
            title,
            summary,
            (Table.of("", self.cases, columns),),
            (
                Plot("cpu-attention", near, self._draw_shares, self._size(1)),
                Plot("cpu-attention-speed", speeds, self._draw_speeds, self._size(1 + len(rivals))),
            ),
            self.notes,
            tables_are_details=True,
        )

    @property
    def _panels(self) -> list[tuple[str, list[CpuAttentionCase]]]:
        """A panel per group and head_dim."""
        by_shape = groupby(self.cases, lambda case: (case.group, case.head_dim))
        title = "group {}, head_dim {}: requests x tokens"
        return [(title.format(*shape), list(cases)) for shape, cases in by_shape]

    def _size(self, bars_per_case: int) -> tuple[float, float]:
        """Width and height in inches: a bar wants its room."""
        per_case = _CASE_HEIGHT * (1 + 0.4 * (bars_per_case - 1))
        return _WIDTH, per_case * len(self.cases) + _PANEL_HEIGHT * len(self._panels) + _REST_HEIGHT

    def _draw_shares(self, figure: "Figure") -> None:
        all_axes = self._draw_panels(figure)
        for axes, (_, cases) in zip(all_axes, self._panels, strict=True):
            for bound, colour in (("memory", BLUE), ("arithmetic", ORANGE)):
                chosen = [(at, case.limit_fraction) for at, case in enumerate(cases) if case.bound == bound]
                if chosen:
                    places, shares = zip(*chosen, strict=True)
                    bars = axes.barh(places, shares, height=0.75, color=colour, label=f"bound by {bound}")
                    axes.bar_label(bars, [f"{share:.0%}" for share in shares], fontsize=8, padding=2)
            axes.axvline(TARGET, color="black", linewidth=0.9, linestyle="--", label=f"target {TARGET:.0%}")
        highest = max(1.0, *(case.limit_fraction for case in self.cases))
        all_axes[-1].set(xlabel="share of what memory and cores allow", xlim=(0, 1.12 * highest))
        all_axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        legend(figure, *all_axes, fontsize=9)

    def _draw_speeds(self, figure: "Figure") -> None:
        """Speeds beside those of others, and the limit."""
        all_axes = self._draw_panels(figure)
        for axes, (_, cases) in zip(all_axes, self._panels, strict=True):
            series = [("neo-desktop", GREEN, [case.gb_per_s for case in cases])]
            series += [
                (name, _RIVAL_COLOURS[key], [case.rivals[key].gb_per_s for case in cases])
                for key, name in RIVALS.items()
                if all(key in case.rivals for case in cases)
            ]
            height = 0.84 / len(series)
            for index, (label, colour, values) in enumerate(series):
                shift = (index - (len(series) - 1) / 2) * height
                places = [at + shift for at in range(len(cases))]
                axes.barh(places, values, height=height, color=colour, label=label)
            limits = [case.limit_gb_per_s for case in cases]
            ticks(axes, limits, 0.45, color=BLACK, linewidth=1.2, label="the limit")
        all_axes[-1].set_xlabel("GB of KV per second")
        if any(case.rivals for case in self.cases):
            all_axes[-1].set_xscale("log")  # others can be a hundred times slower
            round_logs(all_axes[-1].xaxis)
            for axes in all_axes:
                axes.minorticks_off()
        legend(figure, *all_axes, fontsize=9)

    def _draw_panels(self, figure: "Figure") -> "list[Axes]":
        panels = self._panels
        heights = [len(cases) for _, cases in panels]
        column = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, cases) in zip(column, panels, strict=True):
            axes.set_title(title, fontsize=10, loc="left")
            names = [f"{case.batch} x {case.context_tokens:,}" for case in cases]
            axes.set_yticks(range(len(cases)), names, fontsize=8)
            axes.invert_yaxis()
            tidy(axes, grid="x")
            axes.tick_params(axis="y", length=0)
            axes.margins(y=0.02)
        return list(column)


def _short(rival: str, case: CpuAttentionCase) -> str:
    """Two digits, or all before the point: the column is narrow."""
    if (result := case.rivals.get(rival)) is None:
        return ""
    return f"{result.gb_per_s:.2g}" if result.gb_per_s < 10 else f"{result.gb_per_s:.0f}"
