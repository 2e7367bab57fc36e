"""The suite's figures as pictures: a row per case, so that they can be read on a narrow screen, too."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from neo_desktop.app.bench.cpu_attention.options import RIVALS, TARGET

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from neo_desktop.app.bench.cpu_attention.report import CpuAttentionCase, CpuAttentionReport

_COLOURS = {
    "memory": "#2f6fb0",
    "arithmetic": "#d08700",
    "limit": "#222222",
    "own": "#1c8c4c",
    "torch_sdpa": "#8a8a8a",
    "llama_cpp": "#b0413e",
}
_WIDTH, _CASE_HEIGHT, _PANEL_HEIGHT, _REST_HEIGHT = 5.4, 0.24, 0.45, 1.0  # inches


def size(report: "CpuAttentionReport", bars_per_case: int = 1) -> tuple[float, float]:
    """Width and height in inches: a bar wants its room."""
    per_case = _CASE_HEIGHT * (1 + 0.4 * (bars_per_case - 1))
    return _WIDTH, per_case * len(report.cases) + _PANEL_HEIGHT * len(_panels(report)) + _REST_HEIGHT


def draw_shares(report: "CpuAttentionReport", figure: "Figure") -> None:
    """Draw the share of the limit; one panel per group and head_dim."""
    all_axes = _draw_panels(report, figure)
    for axes, (_, cases) in zip(all_axes, _panels(report), strict=True):
        for bound, label in (("memory", "bound by memory"), ("arithmetic", "bound by arithmetic")):
            chosen = [(at, case.limit_fraction) for at, case in enumerate(cases) if case.bound == bound]
            if chosen:
                places, shares = zip(*chosen, strict=True)
                bars = axes.barh(places, shares, height=0.75, color=_COLOURS[bound], label=label)
                axes.bar_label(bars, [f"{share:.0%}" for share in shares], fontsize=8, padding=2)
        axes.axvline(TARGET, color="black", linewidth=0.9, linestyle="--", label=f"target {TARGET:.0%}")
    highest = max(1.0, *(case.limit_fraction for case in report.cases))
    all_axes[-1].set(xlabel="share of what memory and cores allow", xlim=(0, 1.12 * highest))
    all_axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _legend(figure, all_axes)


def draw_speeds(report: "CpuAttentionReport", figure: "Figure") -> None:
    """Draw speeds beside those of others, and the limit."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    all_axes = _draw_panels(report, figure)
    for axes, (_, cases) in zip(all_axes, _panels(report), strict=True):
        _draw_speeds(axes, cases)
    all_axes[-1].set_xlabel("GB of KV per second")
    if any(case.rivals for case in report.cases):
        all_axes[-1].set_xscale("log")  # others can be a hundred times slower
        all_axes[-1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        all_axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        for axes in all_axes:
            axes.minorticks_off()
    _legend(figure, all_axes)


def _draw_panels(report: "CpuAttentionReport", figure: "Figure") -> "list[Axes]":
    panels = _panels(report)
    column = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=[len(cases) for _, cases in panels]
    )
    for axes, (title, cases) in zip(column[:, 0], panels, strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_yticks(
            range(len(cases)), [f"{case.batch} x {case.context_tokens:,}" for case in cases], fontsize=8
        )
        axes.invert_yaxis()
        axes.set_axisbelow(True)
        axes.grid(axis="x", linewidth=0.4, color="#cccccc")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.margins(y=0.02)
    return list(column[:, 0])


def _panels(report: "CpuAttentionReport") -> list[tuple[str, list["CpuAttentionCase"]]]:
    by_shape = groupby(report.cases, lambda case: (case.group, case.head_dim))
    return [
        (f"group {group}, head_dim {head_dim}: requests x tokens", list(cases))
        for (group, head_dim), cases in by_shape
    ]


def _draw_speeds(axes: "Axes", cases: Sequence["CpuAttentionCase"]) -> None:
    series = [("neo-desktop", _COLOURS["own"], [case.gb_per_s for case in cases])]
    series += [
        (name, _COLOURS[key], [case.rivals[key].gb_per_s for case in cases])
        for key, name in RIVALS.items()
        if all(key in case.rivals for case in cases)
    ]
    height = 0.84 / len(series)
    for index, (label, colour, values) in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * height
        places = [at + shift for at in range(len(cases))]
        axes.barh(places, values, height=height, color=colour, label=label)
    axes.vlines(
        [case.limit_gb_per_s for case in cases],
        [at - 0.45 for at in range(len(cases))],
        [at + 0.45 for at in range(len(cases))],
        color=_COLOURS["limit"],
        linewidth=1.2,
        label="the limit",
    )


def _legend(figure: "Figure", all_axes: "Sequence[Axes]") -> None:
    handles = {
        label: handle
        for axes in all_axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
