"""The suite's pictures."""

from typing import TYPE_CHECKING

from neo_desktop.app.bench.charts import BLUE, LIGHT_GREY, ORANGE, legend, tidy
from neo_desktop.app.bench.section import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from neo_desktop.app.bench.throughput.report import PolicyResult, Rival, ThroughputReport

_LANES = ("device", "to-host", "cpu", "to-device", "swap")
_LANE_NAMES = {"device": "GPU", "to-host": "q, k, v to CPU", "cpu": "CPU attention", "to-device": "o to GPU"}
_COLOURS = {-1: LIGHT_GREY, 0: BLUE, 1: ORANGE}
_UNDER_LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_HATCHES = {-1: "", 0: "", 1: "///"}


def bars(report: "ThroughputReport", figure: "Figure") -> None:
    """Speeds, with the spread of the turns and the limits."""
    axes = figure.subplots()
    results: list[PolicyResult | Rival] = [*report.policies, *report.rivals]
    names, speeds = zip(*((each.name, each.output_tokens_per_s) for each in results), strict=True)
    below = [each.output_tokens_per_s - each.lowest_output_tokens_per_s for each in results]
    above = [each.highest_output_tokens_per_s - each.output_tokens_per_s for each in results]
    drawn = axes.barh(names, speeds, color=BLUE, height=0.6, xerr=(below, above), capsize=3)
    axes.bar_label(drawn, [_label(each) for each in results], padding=6, fontsize=9, bbox=_UNDER_LABEL)
    bounds = {at: each.bound_output_tokens_per_s for at, each in enumerate(report.policies)}
    known = {at: bound for at, bound in bounds.items() if bound is not None}
    if known:
        low, high = [at - 0.38 for at in known], [at + 0.38 for at in known]
        label = "limit: no schedule can be faster"
        axes.vlines(list(known.values()), low, high, color="black", linewidth=2, label=label)
        legend(figure, axes)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens per second, and ms per token of each chat")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.locator_params(axis="x", nbins=5)
    axes.margins(x=0.3)
    tidy(axes, grid=None)


def _label(result: "PolicyResult | Rival") -> str:
    """The speed, and what a chat notices of it; of a rival only the former is known."""
    pace_ms = getattr(result, "tpot_p50_ms", None)
    return number(result.output_tokens_per_s) + ("" if pace_ms is None else f", {number(pace_ms)} ms")


def timeline(report: "ThroughputReport", figure: "Figure") -> None:
    """A row per lane, coloured by sub-batch."""
    axes = figure.subplots()
    lanes = [lane for lane in _LANES if any(span.lane == lane for span in report.timeline)]
    for sub_batch, label in ((0, "sub-batch 0"), (1, "sub-batch 1"), (-1, "sampling, copies")):
        spans = [span for span in report.timeline if span.sub_batch == sub_batch]
        if spans:
            axes.barh(
                [lanes.index(span.lane) for span in spans],
                [span.end_ms - span.start_ms for span in spans],
                left=[span.start_ms for span in spans],
                height=0.7,
                color=_COLOURS[sub_batch],
                hatch=_HATCHES[sub_batch],
                edgecolor="white",
                linewidth=0.5,
                label=label,
            )
    axes.set_yticks(
        range(len(lanes)),
        [
            "device" if lane == "device" and report.device != "cuda" else _LANE_NAMES.get(lane, lane)
            for lane in lanes
        ],
    )
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    tidy(axes, grid=None)
    legend(figure, axes, columns=3)
