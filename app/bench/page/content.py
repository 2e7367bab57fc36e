"""What the page begins with: the verdict, the computer, and which models fit into it."""

from typing import TypeVar

import torch

from neo_desktop.app.bench.charts import bars
from neo_desktop.app.bench.computer import describe, is_steady
from neo_desktop.app.bench.hardware.report import HardwareReport
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Plot, Section, Table, number
from neo_desktop.app.bench.throughput.report import BASELINE, ThroughputReport
from neo_desktop.app.bench.words import say
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.shapes import SHAPES

S = TypeVar("S")

_WORTH_IT = 1.05  # a gain that two runs on one machine cannot make up
_DTYPE = torch.float16
_TEST_SHAPE = "tiny"


def headline(report: Report) -> tuple[str, ...]:
    """The verdict, and what is missing in the report."""
    unsteady = None if is_steady(report.probes) else describe(report.probes)
    return say("headline", unsteady=unsteady or "", **_verdict(report))


def sections(report: Report) -> tuple[Section, ...]:
    """What fits, then a section per suite."""
    models = models_section(report)
    return (*([models] if models else []), *(suite.section() for suite in report.suites))


def machine_lines(report: Report) -> tuple[str, ...]:
    """What was measured on, and when."""
    steadiness = describe(report.probes) if is_steady(report.probes) else None
    return say("machine", report=report, steadiness=steadiness or "")


def _verdict(report: Report) -> dict[str, object]:
    throughput, load = _suite(report, ThroughputReport), _suite(report, LoadReport)
    curves = {curve.name: curve for curve in load.curves if curve.says_enough} if load is not None else {}
    # At what pace a chat gets its tokens at the highest rate that was kept, with and without offloading.
    paces = [curves[name].pace_ms for name in ("auto", BASELINE) if name in curves]
    return {
        "report": report,
        "throughput": throughput,
        "load": load,
        "sustained": {name: curve.sustained_per_s for name, curve in curves.items()},
        "paces": [pace for pace in paces if pace is not None],
        "baseline": BASELINE,
        "worth_it": _WORTH_IT,
    }


def _suite(report: Report, kind: type[S]) -> S | None:
    return next((suite for suite in report.suites if isinstance(suite, kind)), None)


def models_section(report: Report) -> Section | None:
    """Return a row per model; None if memory bandwidth was not measured."""
    hardware = _suite(report, HardwareReport)
    if hardware is None:
        return None
    where, room = "main", report.machine.available_bytes
    reads = hardware.best("GPU reads") or hardware.best("host reads")
    rate = 0.0 if reads is None else reads.value.median
    if hardware.gpu_name and report.machine.gpus:
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
    limits = sorted(fitting.items(), key=lambda item: -item[1])
    plot = Plot(
        "Tokens per second that one chat can have at most, by model that fits",
        bars((name, limit, number(limit)) for name, limit in limits),
    )
    title, summary, *notes = say("models", room=room, where=where)
    return Section(
        title,
        summary,
        (table,),
        (plot,) if fitting else (),
        tuple(notes),
        tables_are_details=True,
    )
