"""The hardware self-test: suites that measure this computer and say what its limit is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from neo_desktop.app.bench.cost_model import CostModelOptions, run_cost_model
from neo_desktop.app.bench.cpu_attention import (
    CpuAttentionOptions,
    CpuAttentionReport,
    run_cpu_attention,
)
from neo_desktop.app.bench.report import Progress, Report, SuiteReport
from neo_desktop.engine.profiling.hardware import machine_info

__all__ = [
    "SUITES",
    "CostModelOptions",
    "CpuAttentionOptions",
    "CpuAttentionReport",
    "Progress",
    "Report",
    "SuiteOptions",
    "run_cost_model",
    "run_cpu_attention",
    "run_suites",
]


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """What each suite is asked to do."""

    cpu_attention: CpuAttentionOptions = field(default_factory=CpuAttentionOptions)
    cost_model: CostModelOptions = field(default_factory=CostModelOptions)


SUITES: dict[str, Callable[[SuiteOptions, Progress], SuiteReport]] = {
    "cpu-attention": lambda options, progress: run_cpu_attention(options.cpu_attention, progress),
    "cost-model": lambda options, progress: run_cost_model(options.cost_model, progress),
}


def run_suites(names: Sequence[str], progress: Progress, options: SuiteOptions | None = None) -> Report:
    """Run suites one after the other; a suite that needs a model takes the built-in one by default.

    `progress` is called with the share done, 0 to 1, and what is being measured. Raises ValueError for a
    suite that does not exist, and MemoryError where too little memory is free to measure anything.
    """
    for name in names:
        if name not in SUITES:
            raise ValueError(f"no benchmark suite is called {name!r}; choose from {', '.join(SUITES)}")
    suites = []
    for index, name in enumerate(names):

        def of_all(share: float, what: str, done: int = index) -> None:
            progress((done + share) / len(names), what)

        suites.append(SUITES[name](options or SuiteOptions(), of_all))
    return Report(machine_info(), tuple(suites))
