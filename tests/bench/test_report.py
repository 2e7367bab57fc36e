"""Reports survive as files and through Ctrl-C; the page states the results."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from suites import ignore

from neo_desktop.app.bench import run
from neo_desktop.app.bench.computer import Probe
from neo_desktop.app.bench.hardware import HardwareReport, run_hardware
from neo_desktop.app.bench.load import Limits, LoadCurve, LoadMetrics, LoadPoint, LoadReport, summarise
from neo_desktop.app.bench.options import BenchOptions, HardwareOptions
from neo_desktop.app.bench.report import Failure, Report
from neo_desktop.app.bench.run import run_suites
from neo_desktop.app.bench.throughput import ThroughputReport
from neo_desktop.app.bench.workload import Comparison, Record
from neo_desktop.engine.batch import SampledToken
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
    monkeypatch.setattr(run.Prober, "__init__", lambda self: None)
    monkeypatch.setattr(run.Prober, "probe", lambda self: Probe(1.0, 1.0))


def throughput(report: Report, **changes: object) -> Report:
    """Return the report with another throughput result."""
    (suite,) = (each for each in report.suites if isinstance(each, ThroughputReport))
    nowhere = replace(report.machine, gpus=(), gpu_note="no NVIDIA driver: NVML Shared Library Not Found")
    return replace(report, machine=nowhere, suites=(replace(suite, **changes),))  # type: ignore[arg-type]


def test_the_page_needs_nothing_but_itself(report: Report, tmp_path: Path) -> None:
    page = report.write_files(tmp_path)
    written = page.read_text()
    assert not re.search(r'(src|href)="(?!data:|#)|url\((?!#)|@import|<script', written)
    for section in written.split("<section>")[1:]:
        assert 0 < section.index("<svg") < section.index("<table>"), "the chart comes first"
    assert "gpu-only" in written
    assert "The GPU was imitated" in written
    assert json.loads((page.parent / "report.json").read_text()) == json.loads(json.dumps(asdict(report)))


def test_plots_take_the_pages_colours_in_light_and_dark(report: Report) -> None:
    text = report.html()
    svgs = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(svgs) == 2  # memory, policies
    for svg in svgs:
        ElementTree.fromstring(svg)
        assert not re.findall(r"#[0-9a-f]{6}\b", svg), "a colour that the dark page does not know"
    light, dark = text.split("prefers-color-scheme: dark")
    for name in set(re.findall(r"var\(--(\w+)\)", text)):
        assert f"--{name}:" in light
        assert f"--{name}:" in dark


def test_the_page_says_which_model_was_chosen(report: Report, tmp_path: Path) -> None:
    chosen = replace(report, model_note="Measured with random weights in the shape of smollm2-135m.")
    page = chosen.write_files(tmp_path)
    assert chosen.model_note in page.read_text()


def test_a_librarys_error_does_not_fill_the_top_of_the_page(report: Report) -> None:
    failed = replace(report, failures=(Failure("gpu", "CUDA error: out of luck\n" + "at frame\n" * 100),))
    (line,) = (line for line in failed.headline() if line.startswith("gpu could not"))
    assert line == "gpu could not be measured: CUDA error: out of luck"


def test_names_from_outside_cannot_break_the_page(report: Report, tmp_path: Path) -> None:
    evil = throughput(report, model="<script>alert(1)</script> | **x**")
    page = evil.write_files(tmp_path)
    assert "<script>" not in page.read_text()


@pytest.mark.usefixtures("known_computer")
def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(options: BenchOptions, progress: Progress) -> Iterator[HardwareReport]:
        yield next(iter(run_hardware(options.hardware, progress)))
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


@pytest.mark.usefixtures("report")
def test_progress_never_goes_back(shares: list[float]) -> None:
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


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
    small = {"gpu_cache_tokens": 64}
    assert "costs" in said("cuda", 1.0, **small, policies=(replace(gpu_only, device_busy_share=0.5), same))
    alone = said("cpu", 1.0)
    assert alone.startswith("No NVIDIA GPU was found, so there is nothing to offload from")
    assert "when 6 requests come at once; each chat gets its tokens at" in alone
    changed = replace(same, comparison=Comparison(4, 0, 2))
    assert "FAILURE: auto changed 2 answers" in said("cuda", 1.0, policies=(gpu_only, changed))
    failed = replace(same, errors={"out of memory": 3})
    assert "FAILURE: auto gave up 3 requests" in said("cuda", 1.0, policies=(gpu_only, failed))


def test_the_computer_itself_is_looked_at_between_the_suites(report: Report) -> None:
    assert len(report.probes) == 3
    assert all(probe.gflop_per_s > 0 and probe.read_gb_per_s > 0 for probe in report.probes)


def test_a_computer_that_was_not_steady_is_told_at_the_top(report: Report) -> None:
    steady = replace(report, probes=(Probe(100.0, 30.0), Probe(104.0, 31.0), Probe(101.0, 30.5)))
    line = "The computer was steady: the CPU did 100 to 104 GFLOP/s and read memory at 30.0 to 31.0 GB/s"
    assert any(each.startswith(line) for each in steady.machine_lines())
    assert not any("steady" in each for each in steady.headline())
    for slow in (Probe(80.0, 30.0), Probe(100.0, 20.0)):
        disturbed = replace(report, probes=(*steady.probes, slow))
        assert any(each.startswith("The computer was not steady") for each in disturbed.headline())
        assert not any("steady" in each for each in disturbed.machine_lines())
    old = replace(report, probes=())  # a file of an earlier version
    assert not any("steady" in each for each in (*old.headline(), *old.machine_lines()))


def test_the_verdict_tells_how_many_more_chats_run(report: Report) -> None:
    def curve(name: str, sustained: float) -> LoadCurve:
        good, bad = (metrics_with_good_share(share) for share in (1.0, 0.5))
        points = [(sustained, good), (99.0, bad)]
        alone = LoadPoint("one alone", 0.0, good)
        curve = (LoadPoint(str(rate), rate, metrics) for rate, metrics in points)
        return LoadCurve(name, "tiny", alone, None, tuple(curve), 5.0)

    def said(*curves: LoadCurve) -> str:
        suite = LoadReport("cuda, float16", "a workload", Limits(2000, 200), curves)
        return " ".join(replace(report, suites=(suite,), probes=()).headline())

    many = said(curve("auto", 6.2), curve("gpu-only", 2.0))
    assert "offloading lets 3.1x more chats run at the same speed: 6.2 instead of 2 requests" in many
    assert "With and without offloading, about 2 requests" in said(curve("auto", 2.0), curve("gpu-only", 2.0))
    assert said(curve("auto", 3.0)).startswith("Up to 3 requests per second")


def metrics_with_good_share(share: float) -> LoadMetrics:
    """Return the metrics of ten requests, of which this share met the limits."""
    firsts = [100.0 if index < 10 * share else 9000.0 for index in range(10)]
    records = [Record(0.0, [SampledToken(1)] * 2, [first, first + 50]) for first in firsts]
    return summarise(records, Limits(2000, 200))
