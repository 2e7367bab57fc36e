"""Suites one after the other, by default on a model that suits; what was measured is kept in any case."""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

import torch

from neo_desktop.app.bench.hardware import run_hardware
from neo_desktop.app.bench.host_rates import Host, Probe, probe_bytes
from neo_desktop.app.bench.load import run_load
from neo_desktop.app.bench.options import BenchOptions
from neo_desktop.app.bench.report import AnySuiteReport, Failure, Report
from neo_desktop.app.bench.throughput import run_throughput
from neo_desktop.app.bench.words import say
from neo_desktop.app.words import EXPECTED, error_text
from neo_desktop.engine.cuda.streams import open_streams
from neo_desktop.engine.loading import choose_device
from neo_desktop.engine.options import GIB
from neo_desktop.engine.profiling.hardware import host_memory, machine_info
from neo_desktop.engine.progress import Progress, part
from neo_desktop.engine.unused_memory import return_memory
from neo_desktop.models.shapes import shape

SUITES: dict[str, Callable[[BenchOptions, Progress], Iterator[AnySuiteReport]]] = {
    "hardware": run_hardware,
    "throughput": run_throughput,
    "load": run_load,
}


def run_suites(
    names: Sequence[str], progress: Progress, options: BenchOptions, model_note: str = ""
) -> Report:
    """Run suites one after the other.

    A suite that cannot be run is reported as a failure, and the next one runs. Ctrl-C ends the run: what
    was measured until then is in the report. Raises what `open_streams` raises.
    """
    started, start = datetime.now().astimezone().isoformat(timespec="seconds"), time.perf_counter()
    machine = machine_info()
    streams = open_streams(choose_device("auto"), options.gpu_slice)
    found: dict[str, AnySuiteReport] = {}
    failures: list[Failure] = []
    interrupted = None
    host = Host(probe_bytes())
    probes = [host.probe()]
    for index, name in enumerate(names):
        of_all = part(progress, index / len(names), (index + 1) / len(names))
        try:
            with streams.on_device():
                for report in SUITES[name](options, of_all):
                    found[name] = report
        except KeyboardInterrupt:
            interrupted = name
            break
        except EXPECTED as error:  # anything else is a defect, and its traceback is wanted
            failures.append(Failure(name, error_text(error)))
        return_memory()
        probes.append(host.probe())
    return Report(
        started=started,
        seconds=time.perf_counter() - start,
        machine=machine,
        suites=tuple(found.values()),
        failures=tuple(failures),
        interrupted=interrupted,
        gpu_slice_sms=None if options.gpu_slice is None else streams.sms,
        model_note=model_note,
        probes=tuple(probes),
    )


# The largest whose weights leave room is measured: offloading is for models that nearly fill a GPU.
_GPU_SHAPES = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b", "qwen2.5-0.5b", "smollm2-135m")
_GPU_SHARE = 0.75  # of the free memory, for weights
# On a CPU alone, the largest that answers this request alone, at best in this time:
# then the whole self-test takes a few minutes.
_CPU_SHAPES = ("llama-3.2-3b", "llama-3.2-1b", "qwen2.5-0.5b", "smollm2-360m", "smollm2-135m")
_PROMPT_TOKENS, _OUTPUT_TOKENS, _MOST_SECONDS = 128, 32, 4.0
_HOST_SHARE = 0.25  # of the available memory, for weights


def default_model(device: str, gpu_memory_gib: float | None = None) -> tuple[str, str]:
    """Return the shape that suits this computer, or the smallest, and the reason in a sentence."""
    if choose_device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        free = min(free, free if gpu_memory_gib is None else int(gpu_memory_gib * GIB))
        shapes, why = _GPU_SHAPES, {"free_bytes": free, "read_gb_per_s": 0.0}
        fitting = [name for name in shapes if shape(name).weight_bytes(torch.float16) <= _GPU_SHARE * free]
    else:
        probe, room = Host(probe_bytes()).probe(), _HOST_SHARE * host_memory().available_bytes
        shapes, why = _CPU_SHAPES, {"free_bytes": 0, "read_gb_per_s": probe.read_gb_per_s}
        fitting = [
            name
            for name in shapes
            if shape(name).weight_bytes(torch.float32) <= room and _seconds(name, probe) <= _MOST_SECONDS
        ]
    largest = [*fitting, shapes[-1]][0]
    return largest, say("default-model", name=largest, shapes=shapes, **why)[0]


def _seconds(name: str, probe: Probe) -> float:
    """Read the weights once per output token, and multiply by them once per token of the prompt."""
    config = shape(name)
    reading_s = config.weight_bytes(torch.float32) / (probe.read_gb_per_s * 1e9)
    multiplying_s = 2 * config.num_parameters / (probe.gflop_per_s * 1e9)
    return _OUTPUT_TOKENS * reading_s + _PROMPT_TOKENS * multiplying_s
