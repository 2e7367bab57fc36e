"""Which published models fit into this computer's memory, and how fast one chat with each can be at most."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from neo_desktop.app.bench.hardware.report import HardwareReport
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Plot, Section, Table
from neo_desktop.app.bench.spread import number
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
    host_rate = max(row.read_gb_per_s.median for row in hardware.host)
    gpu_free = report.machine.gpus[0].free_bytes if report.machine.gpus and hardware.gpu else None
    rate = host_rate if hardware.gpu is None else hardware.gpu.read_gb_per_s.median
    where, room = ("GPU", gpu_free) if gpu_free is not None else ("main", report.machine.available_bytes)
    rows: list[tuple[str, ...]] = []
    limits: dict[str, float] = {}
    for name, config in SHAPES.items():
        if name == _TEST_SHAPE:
            continue
        weights = config.weight_bytes(_DTYPE)
        left = room - weights
        fits = left > 0
        if fits:
            limits[name] = rate * 1e9 / weights
        rows.append(
            (
                name,
                f"{weights / 1e9:.1f} GB",
                "yes" if fits else "no",
                f"{left / config.kv_bytes_per_token(_DTYPE):,.0f}" if fits else "",
                number(limits[name]) if fits else "",
            )
        )
    columns = ("model", "weights", f"fits in {where} memory", "tokens of KV", "limit, tokens/s")
    return Section(
        "What fits",
        f"With weights in 16 bits, in the {room / 1e9:.1f} GB of {where} memory that were free. Room for KV "
        "is what is left of them, in tokens. One chat can be no faster than the weights are read, once per "
        "token.",
        (Table(columns, tuple(rows)),),
        _plots(limits),
        notes=(
            "These are bounds from sizes and measured bandwidth, not measurements of the models: the other "
            "sections have those.",
        ),
        tables_are_details=True,
    )


def _plots(limits: Mapping[str, float]) -> tuple[Plot, ...]:
    if not limits:
        return ()
    by_speed = dict(sorted(limits.items(), key=lambda item: -item[1]))
    return (
        Plot(
            "models",
            "Tokens per second that one chat can have at most, by model that fits",
            partial(_draw, limits=by_speed),
            (5.4, 0.8 + 0.26 * len(by_speed)),
        ),
    )


def _draw(figure: "Figure", limits: Mapping[str, float]) -> None:
    axes = figure.subplots()
    bars = axes.barh(list(limits), list(limits.values()), color="#2f6fb0", height=0.7)
    axes.bar_label(bars, [number(limit) for limit in limits.values()], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.02)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.set_xlabel("tokens per second, at most")
    axes.spines[["top", "right"]].set_visible(False)
