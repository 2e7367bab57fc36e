"""Suites one after the other; what was measured is kept, whatever happens."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from neo_desktop.app.bench.computer import Prober, give_back_memory
from neo_desktop.app.bench.cost_model import CostModelOptions, run_cost_model
from neo_desktop.app.bench.cpu_attention.options import CpuAttentionOptions
from neo_desktop.app.bench.cpu_attention.suite import run_cpu_attention
from neo_desktop.app.bench.gpu import GpuOptions, run_gpu
from neo_desktop.app.bench.hardware import HardwareOptions, run_hardware
from neo_desktop.app.bench.load import LoadOptions, run_load
from neo_desktop.app.bench.report import AnySuiteReport, Failure, Report
from neo_desktop.app.bench.throughput import ThroughputOptions, run_throughput
from neo_desktop.app.commands.sentences import sentence
from neo_desktop.engine.cuda.streams import open_streams
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.profiling.hardware import machine_info
from neo_desktop.engine.progress import Progress

# What a person can mend: memory, files, settings. Anything else is a defect, and its traceback is wanted.
_EXPECTED = (ValueError, MemoryError, OSError, RuntimeError)


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """What each suite is asked to do."""

    hardware: HardwareOptions = field(default_factory=HardwareOptions)
    cpu_attention: CpuAttentionOptions = field(default_factory=CpuAttentionOptions)
    gpu: GpuOptions = field(default_factory=GpuOptions)
    cost_model: CostModelOptions = field(default_factory=CostModelOptions)
    throughput: ThroughputOptions = field(default_factory=ThroughputOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    gpu_slice: int | None = None  # multiprocessors of the GPU that all suites run on; None: all of them
    model_note: str = ""  # which model was chosen and why, for the page


Suite = Callable[[SuiteOptions, Progress], Iterator[AnySuiteReport]]

SUITES: dict[str, Suite] = {  # in the order in which a full self-test runs them
    "hardware": lambda options, progress: run_hardware(options.hardware, progress),
    "cpu-attention": lambda options, progress: run_cpu_attention(options.cpu_attention, progress),
    "gpu": lambda options, progress: run_gpu(options.gpu, progress),
    "cost-model": lambda options, progress: run_cost_model(options.cost_model, progress),
    "throughput": lambda options, progress: run_throughput(options.throughput, progress),
    "load": lambda options, progress: run_load(options.load, progress),
}


def run_suites(names: Sequence[str], progress: Progress, options: SuiteOptions | None = None) -> Report:
    """Run suites one after the other.

    A suite that cannot be run is reported as a failure, and the next one goes on. Ctrl-C ends the run: what
    was measured until then is in the report.

    Args:
        names: of suites.
        progress: called with the share done, 0 to 1, and what is being measured.
        options: None: the defaults; suites that need a model then take the built-in one.

    Raises:
        ValueError: a suite does not exist, or not the slice of the GPU.
        RuntimeError: the GPU cannot be cut into slices.
    """
    for name in names:
        if name not in SUITES:
            raise ValueError(f"no benchmark suite is called {name!r}; choose from {', '.join(SUITES)}")
    options = options or SuiteOptions()
    started, start = datetime.now().astimezone().isoformat(timespec="seconds"), time.perf_counter()
    machine = machine_info()
    streams = open_streams(choose_device("auto"), options.gpu_slice)
    found: dict[str, AnySuiteReport] = {}
    failures: list[Failure] = []
    interrupted = None
    prober = Prober()
    probes = [prober.probe()]
    for index, name in enumerate(names):

        def of_all(share: float, what: str, done: int = index) -> None:
            progress((done + share) / len(names), what)

        try:
            with streams.on_device():
                for report in SUITES[name](options, of_all):
                    found[name] = report
        except KeyboardInterrupt:
            interrupted = name
            break
        except _EXPECTED as error:
            failures.append(Failure(name, sentence(error) or type(error).__name__))
        give_back_memory()
        probes.append(prober.probe())
    return Report(
        started=started,
        seconds=time.perf_counter() - start,
        machine=machine,
        suites=tuple(found.values()),
        failures=tuple(failures),
        interrupted=interrupted,
        gpu_slice_sms=None if options.gpu_slice is None else streams.sms,
        model_note=options.model_note,
        probes=tuple(probes),
    )
