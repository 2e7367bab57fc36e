"""What all suites promise alike: options that make no sense are refused, and reports survive as JSON."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from suites import ignore

from neo_desktop.app.bench.cpu_attention.options import CpuAttentionOptions
from neo_desktop.app.bench.cpu_attention.suite import run_cpu_attention
from neo_desktop.app.bench.gpu.suite import GpuOptions, run_gpu
from neo_desktop.app.bench.hardware.suite import HardwareOptions, run_hardware
from neo_desktop.app.bench.load.suite import LoadOptions, run_load
from neo_desktop.app.bench.throughput.suite import ThroughputOptions, run_throughput
from neo_desktop.app.bench.weights.suite import WeightsOptions, measure

MIB = 1 << 20
TINY = {"shape": "tiny", "device": "cpu", "dtype": "float32"}
SHORT = {"input_tokens": 20, "output_tokens": 4, "num_requests": 4, "cpu_cache_tokens": 1024}
REPORTS: dict[str, Callable[[], Any]] = {
    "hardware": lambda: next(
        run_hardware(HardwareOptions(seconds=0.01, memory_bytes=8 * MIB, cpu_matrix_size=64), ignore)
    ),
    "cpu-attention": lambda: next(
        run_cpu_attention(CpuAttentionOptions(memory_bytes=64 * MIB, seconds=0, rival_seconds=0.1), ignore)
    ),
    "gpu": lambda: list(
        islice(run_gpu(GpuOptions(**TINY, batches=(1,), context_tokens=20, iterations=2), ignore), 2)  # type: ignore[arg-type]
    )[-1],
    "weights": lambda: next(
        measure(WeightsOptions(**TINY, shares=(0.6,), prompt_tokens=20, tokens=2), ignore)  # type: ignore[arg-type]
    ),
    "throughput": lambda: next(run_throughput(ThroughputOptions(**TINY, **SHORT, repeats=1), ignore)),  # type: ignore[arg-type]
    "load": lambda: next(run_load(LoadOptions(**TINY, **SHORT, seconds=0.1), ignore)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("suite", REPORTS)
def test_reports_survive_json(suite: str) -> None:
    report = REPORTS[suite]()
    adapter = TypeAdapter(type(report))
    again = adapter.validate_json(adapter.dump_json(report))
    assert again == report
    section = again.section()
    assert section.summary == report.section().summary
    assert section.tables == report.section().tables
    assert all(len(row) == len(table.columns) for table in section.tables for row in table.rows)
    assert adapter.json_schema()["properties"]["suite"]["const"] == suite


@pytest.mark.parametrize(
    ("options", "wrong", "says"),
    [
        (HardwareOptions, {"seconds": 0.0}, "seconds must be above 0"),
        (HardwareOptions, {"threads": (0,)}, "threads must be at least 1"),
        (HardwareOptions, {"memory_bytes": 0}, "memory_bytes must be at least 4096"),
        (HardwareOptions, {"gpu_matrix_sizes": (1024, 0)}, "gpu_matrix_sizes must be at least 1"),
        (HardwareOptions, {"transfer_bytes": (1,)}, "transfer_bytes must be at least 4096"),
        (CpuAttentionOptions, {"dtype": torch.float32}, "choose from float16, bfloat16, int8"),
        (CpuAttentionOptions, {"block_size": 24}, "block_size is 24; keys in pairs need a multiple of 16"),
        (CpuAttentionOptions, {"block_size": 0}, "block_size is 0"),
        (CpuAttentionOptions, {"num_threads": -1}, "num_threads must be at least 0"),
        (GpuOptions, {"batches": ()}, "batches must be rising"),
        (GpuOptions, {"batches": (2, 1)}, "batches must be rising"),
        (GpuOptions, {"context_tokens": 0}, "context_tokens must be at least 1"),
        (GpuOptions, {"seconds": 0}, "seconds must be above 0"),
        (ThroughputOptions, {"repeats": 0}, "repeats must be at least 1"),
        (ThroughputOptions, {"num_requests": -1}, "num_requests must be at least 1"),
        (ThroughputOptions, {"policies": ("fast",)}, "'fast' is unknown"),
        (LoadOptions, {"input_tokens": 0}, "input_tokens must be at least 1"),
        (LoadOptions, {"drain_seconds": float("inf")}, "drain_seconds must be above 0 and finite"),
        (LoadOptions, {"rates": ()}, "rates must hold at least one"),
        (LoadOptions, {"rates": (1.0, 1.0)}, "none twice"),
        (LoadOptions, {"rates": (float("nan"),)}, "rates must be above 0"),
        (LoadOptions, {"policies": ("auto",), "url": "http://localhost"}, "either policies or url"),
        (LoadOptions, {"api_key": "secret"}, "give its url, too"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: Callable[..., object], wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        options(**wrong)
