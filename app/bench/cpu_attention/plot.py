"""The suite's figures as a picture."""

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


def size(report: "CpuAttentionReport") -> tuple[float, float]:
    """Width and height in inches: a bar wants its room."""
    panels = _panels(report)
    most = max(len(cases) for _, cases in panels)
    return max(7.0, (0.8 + 0.24 * most) * len(panels)), 8.5


def draw(report: "CpuAttentionReport", figure: "Figure") -> None:
    """Draw the share of the limit, and speeds beside those of others; one panel per group and head_dim."""
    panels = _panels(report)
    rows = figure.subplots(
        2,
        len(panels),
        sharex="col",
        sharey="row",
        squeeze=False,
        width_ratios=[len(cases) for _, cases in panels],
    )
    for (title, cases), share, speed in zip(panels, rows[0], rows[1], strict=True):
        share.set_title(title, fontsize=10)
        _draw_shares(share, cases)
        _draw_speeds(speed, cases)
    highest = max(1.0, *(case.limit_fraction for case in report.cases))
    rows[0, 0].set(ylabel="share of the limit", ylim=(0, 1.08 * highest))
    rows[0, 0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    rows[1, 0].set_ylabel("GB of KV per second")
    if any(case.rivals for case in report.cases):
        rows[1, 0].set_yscale("log")  # others can be a hundred times slower
        rows[1, 0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles = {
        label: handle
        for axes in rows.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(len(handles), max(2, round(size(report)[0] / 2.2))),
        frameon=False,
    )
    figure.suptitle(
        f"CPU decode attention: {report.dtype} KV in scattered "
        f"{'blocks' if report.fragmented else 'pages'} of "
        f"{report.block_size if report.fragmented else report.page_tokens} tokens, "
        f"{report.num_threads} threads, {report.isa}",
        wrap=True,
    )


def _panels(report: "CpuAttentionReport") -> list[tuple[str, list["CpuAttentionCase"]]]:
    by_shape = groupby(report.cases, lambda case: (case.group, case.head_dim))
    return [(f"group {group}, head_dim {head_dim}", list(cases)) for (group, head_dim), cases in by_shape]


def _draw_shares(axes: "Axes", cases: Sequence["CpuAttentionCase"]) -> None:
    for bound, label in (("memory", "bound by memory"), ("arithmetic", "bound by arithmetic")):
        chosen = [(at, case.limit_fraction) for at, case in enumerate(cases) if case.bound == bound]
        if chosen:
            places, shares = zip(*chosen, strict=True)
            bars = axes.bar(places, shares, width=0.75, color=_COLOURS[bound], label=label)
            axes.bar_label(
                bars,
                [f"{100 * share:.0f}" for share in shares],
                fontsize=7,
                padding=1,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )
    axes.axhline(TARGET, color="black", linewidth=0.9, linestyle="--", label=f"target {TARGET:.0%}")
    _tidy(axes)


def _draw_speeds(axes: "Axes", cases: Sequence["CpuAttentionCase"]) -> None:
    series = [("neo-desktop", _COLOURS["own"], [case.gb_per_s for case in cases])]
    series += [
        (name, _COLOURS[key], [case.rivals[key].gb_per_s for case in cases])
        for key, name in RIVALS.items()
        if all(key in case.rivals for case in cases)
    ]
    width = 0.84 / len(series)
    for index, (label, colour, values) in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * width
        places = [at + shift for at in range(len(cases))]
        axes.bar(places, values, width=width, color=colour, label=label)
    axes.hlines(
        [case.limit_gb_per_s for case in cases],
        [at - 0.45 for at in range(len(cases))],
        [at + 0.45 for at in range(len(cases))],
        color=_COLOURS["limit"],
        linewidth=1.2,
        label="the limit",
    )
    axes.set_xlabel("requests x tokens")
    axes.set_xticks(
        range(len(cases)),
        [f"{case.batch} x {case.context_tokens:,}" for case in cases],
        rotation=90,
        fontsize=8,
    )
    _tidy(axes)


def _tidy(axes: "Axes") -> None:
    axes.set_axisbelow(True)
    axes.grid(axis="y", linewidth=0.4, color="#cccccc")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.02)
