"""Which published models fit into this computer's memory, and how fast one chat with each can be at most."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from neo_desktop.app.bench.charts import BLUE, tidy
from neo_desktop.app.bench.hardware.report import HardwareReport
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Plot, Section, Table
from neo_desktop.app.bench.spread import number
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.shapes import SHAPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DTYPE = torch.float16
_TEST_SHAPE = "tiny"


def models_section(report: Report) -> Section | None:
    """Return a row per model; None if memory bandwidth was not measured."""
    hardware = next((suite for suite in report.suites if isinstance(suite, HardwareReport)), None)
    if hardware is None:
        return None
    where, room = "main", report.machine.available_bytes
    rate = max(row.read_gb_per_s.median for row in hardware.host)
    if hardware.gpu is not None:
        rate = hardware.gpu.read_gb_per_s.median
        if report.machine.gpus:
            where, room = "GPU", report.machine.gpus[0].free_bytes

    def left(config: ModelConfig) -> int:
        return room - config.weight_bytes(_DTYPE)

    def limit(config: ModelConfig) -> float:
        return rate * 1e9 / config.weight_bytes(_DTYPE)

    def tokens(config: ModelConfig) -> str:
        return f"{left(config) / config.kv_bytes_per_token(_DTYPE):,.0f}" if left(config) > 0 else ""

    shapes = {name: config for name, config in SHAPES.items() if name != _TEST_SHAPE}
    table = Table.of(
        "",
        shapes.items(),
        {
            "model": lambda row: row[0],
            "weights": lambda row: f"{row[1].weight_bytes(_DTYPE) / 1e9:.1f} GB",
            f"fits in {where} memory": lambda row: "yes" if left(row[1]) > 0 else "no",
            "tokens of KV": lambda row: tokens(row[1]),
            "limit, tokens/s": lambda row: limit(row[1]) if left(row[1]) > 0 else "",
        },
    )
    fitting = {name: limit(config) for name, config in shapes.items() if left(config) > 0}
    plot = Plot(
        "models",
        "Tokens per second that one chat can have at most, by model that fits",
        partial(_draw, limits=dict(sorted(fitting.items(), key=lambda item: -item[1]))),
        (5.4, 0.8 + 0.26 * len(fitting)),
    )
    return Section(
        "What fits",
        f"With weights in 16 bits, in the {room / 1e9:.1f} GB of {where} memory that were free. Room for KV "
        "is what is left of them, in tokens. One chat can be no faster than the weights are read, once per "
        "token.",
        (table,),
        (plot,) if fitting else (),
        notes=(
            "These are bounds from sizes and measured bandwidth, not measurements of the models: the other "
            "sections have those.",
        ),
        tables_are_details=True,
    )


def _draw(figure: "Figure", limits: Mapping[str, float]) -> None:
    axes = figure.subplots()
    bars = axes.barh(list(limits), list(limits.values()), color=BLUE, height=0.7)
    axes.bar_label(bars, [number(limit) for limit in limits.values()], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.02)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.set_xlabel("tokens per second, at most")
    tidy(axes, grid=None)
