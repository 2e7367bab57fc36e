"""The cpu-attention suite reports what it claims to: every case, its limit, its error, its caveats."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from neo_desktop.app import bench
from neo_desktop.app.bench import CpuAttentionOptions, Report, run_cpu_attention, run_suites

SMALL = CpuAttentionOptions(
    groups=(1, 4),
    head_dims=(64,),
    context_tokens=(128, 300),
    long_tokens=1000,
    short_requests=5,
    short_tokens=20,
    memory_bytes=16 << 20,
    seconds=0.1,
    num_threads=2,
)


def ignore(share: float, what: str) -> None:
    pass


def test_measures_every_case_against_the_reads_around_it() -> None:
    report = run_cpu_attention(SMALL, ignore)
    shapes = {(case.group, case.batch, case.context_tokens) for case in report.cases}
    assert len(report.cases) == len(shapes) == 2 * 4
    assert {(1, 1, 1000), (4, 1, 1000), (1, 5, 20), (4, 5, 20)} <= shapes
    for case in report.cases:
        assert case.kv_bytes == case.batch * case.context_tokens * case.kv_heads * case.head_dim * 2 * 2
        assert case.kv_bytes <= report.cache_bytes
        assert case.gb_per_s == pytest.approx(case.kv_bytes / case.milliseconds / 1e6)
        assert min(case.fraction, case.read_gb_per_s) > 0
        assert case.calls >= 3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 5e-3)], ids=str)
def test_error_is_that_of_rounding_the_output(dtype: torch.dtype, tolerance: float) -> None:
    report = run_cpu_attention(replace(SMALL, dtype=dtype), ignore)
    assert all(0 < case.relative_error < tolerance for case in report.cases)


def test_a_wrong_kernel_shows_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = bench.cpu_attention.native.paged_attention_decode

    def wrong(q: torch.Tensor, *args: object) -> torch.Tensor:
        return decode(q * 1.05, *args)

    monkeypatch.setattr(bench.cpu_attention.native, "paged_attention_decode", wrong)
    report = run_cpu_attention(SMALL, ignore)
    assert all(case.relative_error > 1e-3 for case in report.cases)


def test_progress_runs_from_start_to_end() -> None:
    shares: list[float] = []
    run_cpu_attention(SMALL, lambda share, _: shares.append(share))
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_says_when_the_cache_is_small_or_cases_do_not_fit() -> None:
    report = run_cpu_attention(replace(SMALL, long_tokens=10**6, memory_bytes=4 << 20), ignore)
    notes = " ".join(report.notes)
    assert "too small to rule out" in notes or "unknown" in notes
    assert "2 cases were left out" in notes
    assert len(report.cases) == 6
    with pytest.raises(MemoryError, match="hold no case"):
        run_cpu_attention(replace(SMALL, memory_bytes=4096), ignore)


def test_report_as_table_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.SUITES, "cpu-attention", lambda _, progress: run_cpu_attention(SMALL, progress))
    report: Report = run_suites(["cpu-attention"], ignore)
    console = Console(width=80, record=True)
    report.print(console)
    text = console.export_text()
    assert "reached" in text
    assert "…" not in text  # everything fits into a narrow terminal
    assert "KV cache of 17 MB" in text
    report.write_json(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["schema_version"] == 1
    assert saved["machine"]["usable_cores"] >= 1
    assert saved["suites"][0]["suite"] == "cpu-attention"
    assert saved["suites"][0]["cases"][0].keys() >= {"milliseconds", "gb_per_s", "read_gb_per_s", "fraction"}


def test_unknown_suite_is_refused() -> None:
    with pytest.raises(ValueError, match="no benchmark suite is called 'gpu'; choose from cpu-attention, "):
        run_suites(["gpu"], ignore)
