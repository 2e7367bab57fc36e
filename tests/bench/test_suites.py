"""Promises of every suite: reports survive as JSON, and their tables are complete."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from suites import ignore

from neo_desktop.app.bench.hardware import run_hardware
from neo_desktop.app.bench.load import run_load
from neo_desktop.app.bench.options import BenchOptions, HardwareOptions
from neo_desktop.app.bench.throughput import run_throughput

MIB = 1 << 20
TINY = {"shape": "tiny", "device": "cpu", "dtype": "float32"}
SHORT = {"input_tokens": 20, "output_tokens": 4, "num_requests": 4, "cpu_cache_tokens": 1024}
REPORTS: dict[str, Callable[[], Any]] = {
    "hardware": lambda: next(
        run_hardware(HardwareOptions(seconds=0.01, memory_bytes=8 * MIB, cpu_matrix_size=64), ignore)
    ),
    "throughput": lambda: next(run_throughput(BenchOptions(**TINY, **SHORT, repeats=1), ignore)),  # type: ignore[arg-type]
    "load": lambda: next(run_load(BenchOptions(**TINY, **SHORT, seconds=0.1), ignore)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("suite", REPORTS)
def test_reports_are_plain_data_with_whole_tables(suite: str) -> None:
    report = REPORTS[suite]()
    assert json.loads(json.dumps(asdict(report)))["suite"] == suite
    section = report.section()
    assert section.summary
    assert all(len(row) == len(table.columns) for table in section.tables for row in table.rows)
