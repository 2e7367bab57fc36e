"""The suite's figures as a picture."""

from typing import TYPE_CHECKING

from neo_desktop.app.bench.gpu.figures import DecodeFigures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_decode(figure: "Figure", decode: tuple[DecodeFigures, ...]) -> None:
    """Tokens per second and their limit against the batch; bars from the 10th to the 90th percentile."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    axes = figure.subplots()
    batches = [row.batch for row in decode]
    spreads = [row.tokens_per_s for row in decode]
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.p10 for spread in spreads]
    above = [spread.p90 - spread.median for spread in spreads]
    limits = [row.limit_tokens_per_s for row in decode]
    axes.plot(batches, limits, "s--", color="#222222", label="limit")
    label = "decoded, and its share of the limit"
    axes.errorbar(batches, medians, (below, above), fmt="o-", color="#2f6fb0", label=label, capsize=4)
    for row in decode:
        axes.annotate(
            f"{row.share:.0%}",
            (row.batch, row.tokens_per_s.p10),
            textcoords="offset points",
            xytext=(0, -15),
            ha="center",
            fontsize=9,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.margins(0.08, 0.15)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set(xlabel="requests that decode together", ylabel="tokens per second")
    axes.set_axisbelow(True)
    axes.grid(linewidth=0.4, color="#cccccc")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
