"""The answer in one sentence: the gain of offloading on that machine, and its cost."""

from typing import TYPE_CHECKING

from neo_desktop.app.words import duration
from neo_desktop.engine.simulation.metrics import SimulationResult
from neo_desktop.engine.simulation.presets import GPUS, HOSTS

if TYPE_CHECKING:
    from neo_desktop.app.simulate.machine import Machine
    from neo_desktop.app.simulate.report import SimulationReport

BASELINE, OFFLOADING = "gpu-only", "auto"
_WORTH_IT = 1.05  # less is within the error of a prediction
_SAME = 0.005


def answer(report: "SimulationReport") -> str:
    """One or two sentences."""
    baseline, auto = report.results.get(BASELINE), report.results.get(OFFLOADING)
    if baseline is None or auto is None:
        found = _alone(report, next(iter(report.results.values())))
    elif baseline.num_refused == auto.num_refused:
        found = (
            _compared(report, baseline, auto)
            if auto.finished
            else (f"{report.machine.model} cannot run this, with or without offloading.")
        )
    else:
        found = _more(report, baseline, auto)
    return f"{_where(report.machine)}, {found}"


def _alone(report: "SimulationReport", result: SimulationResult) -> str:
    model = report.machine.model
    if not result.finished:
        return f"{model} cannot run this under {result.policy}."
    return (
        f"{model} writes {_rate(result)} output tokens per second under {result.policy} when "
        f"{report.arriving}: {_pace(result)}."
    )


def _more(report: "SimulationReport", baseline: SimulationResult, auto: SimulationResult) -> str:
    """Describe requests that only host memory can hold."""
    model, total = report.machine.model, len(report.requests)
    if not baseline.finished and len(auto.finished) == total:
        found = f"only offloading lets {model} run this"
    else:
        found = (
            f"offloading lets {model} run {len(auto.finished):,} of {total:,} requests instead of "
            f"{len(baseline.finished):,}"
        )
    return f"{found}: {_rate(auto)} output tokens per second when {report.arriving}; {_pace(auto)}."


def _compared(report: "SimulationReport", baseline: SimulationResult, auto: SimulationResult) -> str:
    """Describe the gain for the same requests, and its cost in latency."""
    model = report.machine.model
    gain = auto.output_tokens_per_s / baseline.output_tokens_per_s
    if abs(gain - 1) < _SAME:
        why = ", because GPU memory has room for all of them" if report.fits_gpu else ""
        return (
            f"offloading changes nothing for {model} when {report.arriving}{why}: {_rate(auto)} output "
            f"tokens per second with and without it; {_pace(auto)}."
        )
    if gain >= _WORTH_IT:
        found = f"offloading makes {model} {gain:.1f}x as fast"
    elif gain > 1 / _WORTH_IT:
        found = f"offloading changes little for {model}"
    else:
        found = f"offloading slows {model} down to {gain:.2f}x"
    return (
        f"{found} when {report.arriving}: {_rate(auto)} instead of {_rate(baseline)} output tokens per "
        f"second. Each chat gets its tokens at {_tpot(auto)} instead of {_tpot(baseline)}, its first one "
        f"after {_ttft(auto)} instead of {_ttft(baseline)}."
    )


def _where(machine: "Machine") -> str:
    gpu, host = machine.gpu, machine.host
    memory = host.title
    if HOSTS[host.name] != host:
        gib, gb_per_s = host.memory_bytes / 2**30, host.memory_bytes_per_s / 1e9
        memory = f"main memory of {gib:.4g} GiB at {gb_per_s:,.0f} GB/s"
    own = "" if GPUS[gpu.name] == gpu else f" of {gpu.memory_bytes / 2**30:.4g} GiB"
    return f"On {'an' if gpu.title[0] in _SPOKEN_WITH_A_VOWEL else 'a'} {gpu.title}{own} with {memory}"


_SPOKEN_WITH_A_VOWEL = "AEFHILMNORSX"  # letter by letter: an RTX 3060, an L4, a T4


def _rate(result: SimulationResult) -> str:
    rate = result.output_tokens_per_s
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _pace(result: SimulationResult) -> str:
    return f"each chat gets its tokens at {_tpot(result)}, its first one after {_ttft(result)}"


def _tpot(result: SimulationResult) -> str:
    return duration(result.to_json()["tpot_ms"])


def _ttft(result: SimulationResult) -> str:
    return duration(result.to_json()["ttft_ms"]["p50"])
