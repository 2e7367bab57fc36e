"""What the page begins with: the verdict, the computer, and which models fit into it."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from neo_desktop.app.bench.charts import BLUE, tidy
from neo_desktop.app.bench.computer import describe, is_steady
from neo_desktop.app.bench.gpu_driver import no_gpu
from neo_desktop.app.bench.hardware.report import HardwareReport
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Plot, Section, Table, number
from neo_desktop.app.bench.throughput.report import BASELINE, ThroughputReport
from neo_desktop.app.commands.sentences import duration
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.shapes import SHAPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGEST_REASON = 300


_WORTH_IT = 1.05  # a gain that two runs on one machine cannot make up
_DTYPE = torch.float16
_TEST_SHAPE = "tiny"


def headline(report: Report) -> tuple[str, ...]:
    """The verdict, and what is missing in the report."""
    lines = list(verdict(report))
    if report.interrupted is not None:
        lines.append(f"The run was ended during {report.interrupted}: its figures may lack cases.")
    begun = {suite.suite for suite in report.suites}
    for failure in report.failures:
        what = "could not be measured to its end" if failure.suite in begun else "could not be measured"
        # A library's error may be a page long: the rest is in report.json.
        line = failure.reason.partition("\n")[0]
        line = line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…"
        lines.append(f"{failure.suite} {what}: {line}")
    steadiness = describe(report.probes)
    if steadiness is not None and not is_steady(report.probes):
        lines.append(steadiness)
    return tuple(lines)


def sections(report: Report) -> tuple[Section, ...]:
    """What fits, then a section per suite."""
    models = models_section(report)
    return (*([models] if models else []), *(suite.section() for suite in report.suites))


def machine_lines(report: Report) -> tuple[str, ...]:
    """What was measured on, and when."""
    machine = report.machine
    lines = [
        f"{machine.cpu}, {machine.physical_cores} cores ({machine.usable_cores} usable), {machine.isa}",
        f"{machine.memory_bytes / 1e9:.1f} GB memory, {machine.available_bytes / 1e9:.1f} GB of it available",
    ]
    for gpu in machine.gpus:
        memory = f"{gpu.memory_bytes / 1e9:.1f} GB, {gpu.free_bytes / 1e9:.1f} GB of it free"
        lines.append(f"{gpu.name}, {memory}, driver {gpu.driver}")
        lines += [f"the GPU was also used by {process.name}" for process in gpu.other_processes]
    if report.gpu_slice_sms is not None:
        lines.append(f"all GPU work ran on a slice of {report.gpu_slice_sms} of the GPU's multiprocessors")
    steadiness = describe(report.probes)
    if steadiness is not None and is_steady(report.probes):
        lines.append(steadiness)
    if machine.gpu_note:
        lines.append(f"no GPU: {machine.gpu_note}")
    started = report.started[:16].replace("T", " ")
    return (
        *lines,
        *machine.notes,
        f"torch {machine.torch}, Python {machine.python}, {machine.platform}",
        f"measured {started}, in {report.seconds:.0f} s, neo-desktop {machine.neo_desktop}",
    )


def verdict(report: Report) -> tuple[str, ...]:
    """Plain sentences, the most important one first; none if nothing was measured that allows one."""
    compared: list[str] = []
    throughput: list[str] = []
    alone: list[str] = []
    for suite in report.suites:
        if isinstance(suite, ThroughputReport):
            throughput += _throughput(suite, report)
        if isinstance(suite, LoadReport):
            (compared if len(suite.curves) > 1 else alone).extend(_load(suite))
    return (*compared, *throughput, *alone)


def _load(suite: LoadReport) -> Iterator[str]:
    """How many more visitors can be served within the limits."""
    sustained = {curve.name: curve.sustained_per_s for curve in suite.curves if curve.says_enough}
    alone, offloading = sustained.get(BASELINE), sustained.get("auto")
    limits = (
        f"(first token within {suite.limits.ttft_ms:g} ms, each further one within "
        f"{suite.limits.tpot_ms:g} ms)"
    )
    if alone and offloading and offloading >= _WORTH_IT * alone:
        yield (
            f"On this machine offloading lets {offloading / alone:.1f}x more chats run at the same speed: "
            f"{number(offloading)} instead of {number(alone)} requests per second {limits}."
            f"{_price(suite, alone, offloading)}"
        )
    elif alone and offloading:
        yield (
            f"With and without offloading, about {number(offloading)} requests per second are answered in "
            f"time {limits}."
        )
    elif len(suite.curves) == len(sustained) == 1 and (only := next(iter(sustained.values()))) is not None:
        yield f"Up to {number(only)} requests per second are answered in time {limits}."


def _price(suite: LoadReport, alone: float, offloading: float) -> str:
    """At what pace a chat gets its tokens at either rate."""
    paces = []
    for name, rate in (("auto", offloading), (BASELINE, alone)):
        (curve,) = (each for each in suite.curves if each.name == name)
        point = next(each for each in curve.points if each.rate_per_s == rate)
        latency = point.median_latency("tpot")
        if latency is None:
            return ""
        paces.append(duration(latency.p50_ms))
    return f" Each chat then gets its tokens at {paces[0]} instead of {paces[1]}."


def _throughput(suite: ThroughputReport, report: Report) -> Iterator[str]:
    changed = [each for each in suite.policies if each.changed_answers]
    for each in changed:
        yield f"FAILURE: {each.policy} changed {each.changed_answers} answers. Please report this."
    failed = {each.policy: sum(each.errors.values()) for each in suite.policies if each.errors}
    for policy, count in failed.items():
        yield f"FAILURE: {policy} gave up {count} requests: see the reasons in report.json."
    if suite.imitated:
        yield "The GPU was imitated: whether offloading helps can only be seen on a computer with a GPU."
    elif suite.device != "cuda":
        best, pace_ms = suite.fastest, suite.fastest.tpot_p50_ms
        pace = "" if pace_ms is None else f"; each chat gets its tokens at {duration(pace_ms)}"
        why = no_gpu(report.machine.gpu_note)
        yield f"{why}, so there is nothing to offload from: the CPU does the whole work."
        yield (
            f"It writes {number(best.output_tokens_per_s)} tokens per second with {suite.model} when "
            f"{suite.num_requests} requests come at once{pace}."
        )
    elif (gain := suite.gain) is not None and suite.baseline is not None:
        if gain >= _WORTH_IT:
            yield (
                f"On this machine offloading makes {suite.model} {gain:.1f}x as fast when "
                f"{suite.num_requests} requests come at once: "
                f"{number(gain * suite.baseline.output_tokens_per_s)} instead of "
                f"{number(suite.baseline.output_tokens_per_s)} tokens per second."
            )
            if suite.price:
                yield f"The price: {suite.price}."
        else:
            yield (
                f"Offloading does not help {suite.model} here ({gain:.2f}x of {BASELINE}): {_why_not(suite)}."
            )


def _why_not(suite: ThroughputReport) -> str:
    baseline = suite.baseline
    needed = suite.num_requests * (suite.prompt_tokens + suite.output_tokens)
    if needed <= suite.gpu_cache_tokens:
        return (
            f"the GPU's memory holds all {suite.num_requests} requests ({needed:.0f} tokens, room for "
            f"{suite.gpu_cache_tokens})"
        )
    if baseline is not None and baseline.device_busy_share > 0.9:
        return "with what fits into its memory the GPU is busy already, and more requests at once do not help"
    return "what the CPU could compute beside the GPU is less than what handing it over costs"


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
