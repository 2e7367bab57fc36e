"""The suite's figures as pictures."""

from typing import TYPE_CHECKING

from neo_desktop.app.bench.hardware.figures import HostFigures, TransferFigures
from neo_desktop.app.bench.spread import Spread, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_reads(figure: "Figure", host: tuple[HostFigures, ...]) -> None:
    """GB/s against threads; bars from the 10th to the 90th percentile."""
    axes = figure.subplots()
    threads = [row.threads for row in host]
    series: list[tuple[str, list[Spread], str, str]] = [
        ("read", [row.read_gb_per_s for row in host], "o-", "#2f6fb0"),
        ("copy (read + written)", [row.copy_gb_per_s for row in host], "s--", "#d08700"),
    ]
    for label, spreads, style, colour in series:
        medians = [spread.median for spread in spreads]
        below = [spread.median - spread.p10 for spread in spreads]
        above = [spread.p90 - spread.median for spread in spreads]
        axes.errorbar(threads, medians, (below, above), fmt=style, color=colour, label=label, capsize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(threads, [str(count) for count in threads])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="threads", ylabel="host memory, GB/s")
    _tidy(axes)


def draw_transfers(figure: "Figure", transfers: tuple[TransferFigures, ...]) -> None:
    """GB/s against bytes of a copy, to the GPU, to the host and both ways together."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    axes = figure.subplots()
    sizes = [row.nbytes for row in transfers]
    series: list[tuple[str, list[float], str, str]] = [
        ("both ways together", [row.both_ways_gb_per_s for row in transfers], "D:", "#1c8c4c"),
        ("host to GPU", [row.to_device_gb_per_s for row in transfers], "o-", "#2f6fb0"),
        ("GPU to host", [row.to_host_gb_per_s for row in transfers], "s--", "#b0413e"),
    ]
    for label, values, style, colour in series:
        axes.plot(sizes, values, style, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size(nbytes) for nbytes in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="size of one copy", ylabel="between GPU and host, GB/s")
    _tidy(axes)


def _tidy(axes: "Axes") -> None:
    axes.set_axisbelow(True)
    axes.grid(linewidth=0.4, color="#cccccc")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
