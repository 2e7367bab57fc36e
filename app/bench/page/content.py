"""What every form of the page begins with."""

from neo_desktop.app.bench.computer import describe, is_steady
from neo_desktop.app.bench.page.models import models_section
from neo_desktop.app.bench.page.verdict import verdict
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.section import Section

_LONGEST_REASON = 300


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
