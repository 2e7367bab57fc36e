"""Which published models fit into this computer's memory, and how fast one chat with each can be at most."""

import torch

from neo_desktop.app.bench.hardware.report import HardwareReport
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Section, Table
from neo_desktop.app.bench.spread import number
from neo_desktop.models.shapes import SHAPES

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
    rows = []
    for name, config in SHAPES.items():
        if name == _TEST_SHAPE:
            continue
        weights = config.weight_bytes(_DTYPE)
        left = room - weights
        fits = left > 0
        rows.append(
            (
                name,
                f"{weights / 1e9:.1f} GB",
                "yes" if fits else "no",
                f"{left / config.kv_bytes_per_token(_DTYPE):,.0f}" if fits else "",
                number(rate * 1e9 / weights) if fits else "",
            )
        )
    columns = ("model", "weights", f"fits in {where} memory", "tokens of KV", "limit, tokens/s")
    return Section(
        "What fits",
        f"With weights in 16 bits, in the {room / 1e9:.1f} GB of {where} memory that were free. Room for KV "
        "is what is left of them, in tokens. One chat can be no faster than the weights are read, once per "
        "token.",
        (Table(columns, tuple(rows)),),
        notes=(
            "These are bounds from sizes and measured bandwidth, not measurements of the models: the other "
            "sections have those.",
        ),
    )
