"""The hardware self-test: suites that measure this computer and say what its limit is."""

from collections.abc import Callable, Sequence

from neo_desktop.app.bench.cost_model import CostModelOptions, run_cost_model
from neo_desktop.app.bench.cpu_attention import CpuAttentionOptions, run_cpu_attention
from neo_desktop.app.bench.report import Progress, Report, SuiteReport
from neo_desktop.engine.profiling.hardware import machine_info

__all__ = [
    "SUITES",
    "CostModelOptions",
    "CpuAttentionOptions",
    "Progress",
    "Report",
    "run_cost_model",
    "run_cpu_attention",
    "run_suites",
]

SUITES: dict[str, Callable[[CostModelOptions, Progress], SuiteReport]] = {
    "cpu-attention": lambda _, progress: run_cpu_attention(CpuAttentionOptions(), progress),
    "cost-model": run_cost_model,
}


def run_suites(names: Sequence[str], progress: Progress, model: CostModelOptions | None = None) -> Report:
    """Run suites one after the other; those that need a model take `model`, or the built-in one.

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

        suites.append(SUITES[name](model or CostModelOptions(), of_all))
    return Report(machine_info(), tuple(suites))
