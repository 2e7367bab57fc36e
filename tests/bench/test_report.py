"""Reports survive as files and through Ctrl-C; the page states the results."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from suites import ignore

from neo_desktop.app.bench import run
from neo_desktop.app.bench.hardware import HardwareReport, run_hardware
from neo_desktop.app.bench.host_rates import Probe
from neo_desktop.app.bench.options import BenchOptions, HardwareOptions
from neo_desktop.app.bench.report import Report
from neo_desktop.app.bench.run import run_suites
from neo_desktop.app.bench.throughput import ThroughputReport
from neo_desktop.app.bench.workload import Comparison
from neo_desktop.engine.progress import Progress

OPTIONS = BenchOptions(
    hardware=HardwareOptions(seconds=0.01, threads=(1, 2), memory_bytes=8 << 20, cpu_matrix_size=64),
    shape="tiny",
    device="cpu",
    gpu_cache_tokens=256,
    cpu_cache_tokens=4096,
    input_tokens=30,
    output_tokens=8,
    num_requests=6,
    repeats=1,
    policies=["gpu-only", "neo", "auto"],
)


@pytest.fixture(scope="module")
def shares() -> list[float]:
    """Progress of the run that `report` is of."""
    return []


@pytest.fixture(scope="module")
def report(shares: list[float]) -> Report:
    return run_suites(["hardware", "throughput"], lambda share, what: shares.append(share), OPTIONS)


@pytest.fixture
def known_computer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing between the suites."""
    monkeypatch.setattr(run, "probe_bytes", lambda: 4096)
    monkeypatch.setattr(run.Host, "probe", lambda self: Probe(1.0, 1.0))


def throughput(report: Report, **changes: object) -> Report:
    """Return the report with another throughput result."""
    (suite,) = (each for each in report.suites if isinstance(each, ThroughputReport))
    nowhere = replace(report.machine, gpus=(), gpu_note="no NVIDIA driver: NVML Shared Library Not Found")
    return replace(report, machine=nowhere, suites=(replace(suite, **changes),))  # type: ignore[arg-type]


def test_the_page_needs_nothing_but_itself(report: Report, tmp_path: Path) -> None:
    page = report.write_files(tmp_path)
    written = page.read_text()
    assert not re.search(r'(src|href)="(?!data:|#)|url\((?!#)|@import|<script', written)
    assert written.index("The GPU was imitated") < written.index("Throughput: all requests at once")
    assert "gpu-only" in written
    assert "The GPU was imitated" in written
    assert json.loads((page.parent / "report.json").read_text()) == json.loads(json.dumps(asdict(report)))


def test_names_from_outside_cannot_break_the_page(report: Report, tmp_path: Path) -> None:
    evil = throughput(report, model="<script>alert(1)</script> | **x**")
    page = evil.write_files(tmp_path)
    assert "<script>" not in page.read_text()


@pytest.mark.usefixtures("known_computer")
def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(options: BenchOptions, progress: Progress) -> Iterator[HardwareReport]:
        yield next(iter(run_hardware(options, progress)))
        raise KeyboardInterrupt

    monkeypatch.setitem(run.SUITES, "hardware", interrupted)
    report = run_suites(["hardware", "throughput"], ignore, OPTIONS)
    assert report.interrupted == "hardware"
    (suite,) = report.suites
    assert suite.suite == "hardware"
    assert "ended during hardware" in report.write_files(tmp_path).read_text()


@pytest.mark.usefixtures("known_computer")
def test_a_suite_that_cannot_run_is_said_and_the_next_one_runs() -> None:
    options = replace(OPTIONS, gpu_cache_tokens=10**12)
    report = run_suites(["throughput", "hardware"], ignore, options)
    (failure,) = report.failures
    assert failure.suite == "throughput"
    assert "are free for it: ask for at most" in failure.reason
    assert [suite.suite for suite in report.suites] == ["hardware"]
    assert report.has_failed


def test_the_verdict_says_what_offloading_gains(report: Report) -> None:
    (suite,) = (each for each in report.suites if isinstance(each, ThroughputReport))
    gpu_only, _, auto = suite.policies

    same = replace(auto, output_tokens_per_s=gpu_only.output_tokens_per_s)

    def said(device: str, speed: float, **changes: object) -> str:
        faster = replace(auto, output_tokens_per_s=speed * gpu_only.output_tokens_per_s)
        changes = {"device": device, "imitated": False, "policies": (gpu_only, faster)} | changes
        return " ".join(throughput(report, **changes).headline())

    slow = replace(
        auto, output_tokens_per_s=3.1 * gpu_only.output_tokens_per_s, tpot_p50_ms=532.0, ttft_p50_ms=9000.0
    )
    quick = replace(gpu_only, tpot_p50_ms=82.0, ttft_p50_ms=64_000.0)
    gained = said("cuda", 3.1, policies=(quick, slow))
    assert "offloading makes tiny (random weights) 3.1x as fast when 6 requests" in gained
    price = "each chat gets its tokens at 532 ms instead of 82 ms, its first one after 9.0 s instead of 64 s"
    assert f"The price: {price}." in gained
    (section,) = throughput(report, policies=(quick, slow)).suites
    assert f"3.10x the tokens per second of gpu-only; {price}" in section.section().summary
    assert "GPU's memory holds all 6 requests" in said("cuda", 1.0, gpu_cache_tokens=10**6)
    assert "costs" in said("cuda", 1.0, gpu_cache_tokens=64, policies=(gpu_only, same))
    alone = said("cpu", 1.0)
    assert alone.startswith("No NVIDIA GPU was found, so there is nothing to offload from")
    assert "when 6 requests come at once; each chat gets its tokens at" in alone
    changed = replace(same, comparison=Comparison(4, 0, 2))
    assert "FAILURE: auto changed 2 answers" in said("cuda", 1.0, policies=(gpu_only, changed))
    failed = replace(same, errors={"out of memory": 3})
    assert "FAILURE: auto gave up 3 requests" in said("cuda", 1.0, policies=(gpu_only, failed))
