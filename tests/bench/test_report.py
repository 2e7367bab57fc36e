"""Reports survive: as files, through Ctrl-C, and beside each other."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from suites import ignore, shown

from neo_desktop.app.bench import Report, ReportError, SuiteOptions, run, run_suites
from neo_desktop.app.bench.computer import Probe
from neo_desktop.app.bench.cost_model import CostModelOptions, CostModelReport, run_cost_model
from neo_desktop.app.bench.load.metrics import LoadCurve, LoadMetrics, LoadPoint, LoadRun, summarise
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.load.target import Limits, Outcome, RequestRecord
from neo_desktop.app.bench.page.compare import compare
from neo_desktop.app.bench.page.content import headline, machine_lines, verdict
from neo_desktop.app.bench.page.files import html, prepare_folder, write_files
from neo_desktop.app.bench.report import SCHEMA_VERSION, Failure, json_schema
from neo_desktop.app.bench.throughput.report import ThroughputReport
from neo_desktop.app.bench.throughput.suite import ThroughputOptions
from neo_desktop.engine.progress import Progress

CACHES = {"shape": "tiny", "device": "cpu", "gpu_cache_tokens": 256, "cpu_cache_tokens": 4096}
OPTIONS = SuiteOptions(
    cost_model=CostModelOptions(**CACHES, points=4, repeated=2, rounds=2, seconds=0.5),  # type: ignore[arg-type]
    throughput=ThroughputOptions(  # type: ignore[arg-type]
        **CACHES,
        input_tokens=30,
        output_tokens=8,
        num_requests=6,
        repeats=1,
        policies=("gpu-only", "neo", "auto"),
    ),
)
SCHEMA = Path(__file__).parents[2] / "docs" / "bench-report.schema.json"


@pytest.fixture(scope="module")
def report() -> Report:
    return run_suites(["cost-model", "throughput"], ignore, OPTIONS)


def throughput(report: Report, **changes: object) -> Report:
    """The report with another result of its throughput suite."""
    (suite,) = (each for each in report.suites if isinstance(each, ThroughputReport))
    nowhere = replace(report.machine, gpus=(), gpu_note="no NVIDIA driver: NVML Shared Library Not Found")
    return replace(report, machine=nowhere, suites=(replace(suite, **changes),))  # type: ignore[arg-type]


def test_json_is_what_the_documented_schema_says(report: Report) -> None:
    documented = json.loads(SCHEMA.read_text())
    assert documented == json_schema(), "scripts/bench_schema.py writes it anew"
    jsonschema.validate(json.loads(json.dumps(report.to_json())), documented)
    broken = json.loads(json.dumps(report.to_json()))
    del broken["suites"][0]["cases"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, documented)


def test_a_report_can_be_read_back(report: Report, tmp_path: Path) -> None:
    report.write_json(tmp_path / "report.json")
    assert Report.read_json(tmp_path / "report.json") == report


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "is no report"),
        ("no JSON", "is no report"),
        ("[1]", "is no report"),
        (None, f"version {SCHEMA_VERSION - 1}"),
    ],
)
def test_other_files_are_refused(text: str | None, says: str, report: Report, tmp_path: Path) -> None:
    if text is None:
        text = json.dumps(report.to_json() | {"schema_version": SCHEMA_VERSION - 1})
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ReportError, match=says):
        Report.read_json(tmp_path / "report.json")


def test_the_page_needs_nothing_but_itself(report: Report, tmp_path: Path) -> None:
    prepare_folder(tmp_path / "new" / "folder")
    page = write_files(report, tmp_path / "new" / "folder")
    written = page.read_text()
    assert not re.search(r'(src|href)="(?!data:|#)|url\((?!#)|@import|<script', written)
    sections = [section for section in written.split("<section>")[1:] if "<table>" in section]
    assert len(sections) == 2
    for section in sections:
        assert 0 < section.index("<svg") < section.index("<table>"), "the chart comes first"
    ids = re.findall(r'\bid="([^"]+)"', written)
    assert len(ids) == len(set(ids)) > 0
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', written)) <= set(ids)
    markdown = (page.parent / "report.md").read_text()
    for picture in re.findall(r"!\[.+\]\((.+)\)", markdown):
        assert (page.parent / picture).stat().st_size > 1000
    for text in (written, markdown):
        assert "gpu-only" in text
        assert "The GPU was imitated" in text
    assert Report.read_json(page.parent / "report.json") == report


def test_plots_take_the_pages_colours_in_light_and_dark(report: Report) -> None:
    text = html(report)
    svgs = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(svgs) == 3
    for svg in svgs:
        assert not re.findall(r"#[0-9a-f]{6}\b", svg), "a colour that the dark page does not know"
        assert "<text" in svg
    used = set(re.findall(r"var\(--(\w+)\)", text))
    light, dark = text.split("prefers-color-scheme: dark")
    for name in used:
        assert f"--{name}:" in light
        assert f"--{name}:" in dark


def test_the_page_says_which_model_was_chosen(report: Report, tmp_path: Path) -> None:
    chosen = replace(report, model_note="Measured with random weights in the shape of smollm2-135m.")
    prepare_folder(tmp_path)
    page = write_files(chosen, tmp_path)
    for text in (page.read_text(), (tmp_path / "report.md").read_text()):
        assert chosen.model_note in text.replace("\\", "")


def test_a_librarys_error_does_not_fill_the_top_of_the_page(report: Report) -> None:
    failed = replace(report, failures=(Failure("gpu", "CUDA error: out of luck\n" + "at frame\n" * 100),))
    (line,) = (line for line in headline(failed) if line.startswith("gpu could not"))
    assert line == "gpu could not be measured: CUDA error: out of luck"


def test_names_from_outside_cannot_break_the_page(report: Report, tmp_path: Path) -> None:
    evil = throughput(report, model="<script>alert(1)</script> | **x**")
    prepare_folder(tmp_path)
    page = write_files(evil, tmp_path)
    assert "<script>" not in page.read_text()
    assert "<script>" not in (tmp_path / "report.md").read_text()


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(options: SuiteOptions, progress: Progress) -> Iterator[CostModelReport]:
        yield next(iter(run_cost_model(options.cost_model, progress)))
        raise KeyboardInterrupt

    monkeypatch.setitem(run.SUITES, "cost-model", interrupted)
    report = run_suites(["cost-model", "throughput"], ignore, OPTIONS)
    assert report.interrupted == "cost-model"
    (suite,) = report.suites
    assert suite.cases  # type: ignore[union-attr]
    prepare_folder(tmp_path)
    assert "ended during cost-model" in write_files(report, tmp_path).read_text()


def test_a_suite_that_cannot_run_is_said_and_the_next_one_runs() -> None:
    options = replace(OPTIONS, cost_model=replace(OPTIONS.cost_model, gpu_cache_tokens=10**12))
    report = run_suites(["cost-model", "throughput"], ignore, options)
    (failure,) = report.failures
    assert failure.suite == "cost-model"
    assert "are free for it: ask for at most" in failure.reason
    assert [suite.suite for suite in report.suites] == ["throughput"]
    assert report.has_failed


def test_unknown_suite_is_refused() -> None:
    with pytest.raises(ValueError, match="no benchmark suite is called 'golf'; choose from "):
        run_suites(["golf"], ignore)


def test_progress_never_goes_back() -> None:
    shares: list[float] = []
    run_suites(["cost-model", "throughput"], lambda share, what: shares.append(share), OPTIONS)
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_the_verdict_says_what_offloading_gains(report: Report) -> None:
    (suite,) = (each for each in report.suites if isinstance(each, ThroughputReport))
    gpu_only, _, auto = suite.policies

    same = replace(auto, output_tokens_per_s=gpu_only.output_tokens_per_s)

    def said(device: str, speed: float, **changes: object) -> str:
        faster = replace(auto, output_tokens_per_s=speed * gpu_only.output_tokens_per_s)
        changes = {"device": device, "imitated": False, "policies": (gpu_only, faster)} | changes
        return " ".join(verdict(throughput(report, **changes)))

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
    changed = replace(same, changed_answers=2)
    assert "FAILURE: auto changed 2 answers" in said("cuda", 1.0, policies=(gpu_only, changed))
    failed = replace(same, errors={"out of memory": 3})
    assert "FAILURE: auto gave up 3 requests" in said("cuda", 1.0, policies=(gpu_only, failed))


def test_the_computer_itself_is_looked_at_between_the_suites(report: Report) -> None:
    assert len(report.probes) == 3
    assert all(probe.gflop_per_s > 0 and probe.read_gb_per_s > 0 for probe in report.probes)


def test_a_computer_that_was_not_steady_is_told_at_the_top(report: Report) -> None:
    steady = replace(report, probes=(Probe(100.0, 30.0), Probe(104.0, 31.0), Probe(101.0, 30.5)))
    line = "The computer was steady: the CPU did 100 to 104 GFLOP/s and read memory at 30.0 to 31.0 GB/s"
    assert any(each.startswith(line) for each in machine_lines(steady))
    assert not any("steady" in each for each in headline(steady))
    for slow in (Probe(80.0, 30.0), Probe(100.0, 20.0)):
        disturbed = replace(report, probes=(*steady.probes, slow))
        assert any(each.startswith("The computer was not steady") for each in headline(disturbed))
        assert not any("steady" in each for each in machine_lines(disturbed))
        notes = compare(steady, disturbed, ("one", "two")).notes
        assert [note[:30] for note in notes] == [
            "A: The computer was steady: the CPU"[:30],
            "B: The computer was not steady"[:30],
        ]
    old = replace(report, probes=())  # a file that was written before
    assert not any("steady" in each for each in (*headline(old), *machine_lines(old)))


def test_two_reports_side_by_side(report: Report) -> None:
    (suite,) = (each for each in report.suites if isinstance(each, ThroughputReport))
    gpu_only, _, auto = suite.policies
    faster = replace(auto, output_tokens_per_s=2 * auto.output_tokens_per_s)
    other = throughput(report, policies=(gpu_only, faster))
    section = compare(report, other, ("before", "after"))
    rows = {row[0]: row for row in section.tables[0].rows}
    assert rows["throughput.auto.output_tokens_per_s"][3] == "2.00x"
    assert rows["throughput.gpu-only.output_tokens_per_s"][3] == "1.00x"
    assert rows["throughput.neo.output_tokens_per_s"][2:4] == ("", "")
    assert rows["cost-model.median_error"][4] == "lower"
    assert "A is before, B is after. B is better in 1 and worse in 0 of 2 figures" in section.summary
    assert "…" not in shown(section)


def test_a_comparison_of_two_models_says_so(report: Report) -> None:
    other = throughput(report, model="llama-3.2-1b (random weights)")
    notes = " ".join(compare(throughput(report), other, ("a", "b")).notes)
    assert "different models (tiny (random weights) and llama-3.2-1b (random weights))" in notes
    assert "different models" not in " ".join(compare(report, report, ("a", "b")).notes)


def test_reports_of_different_suites_have_nothing_to_compare(report: Report) -> None:
    first, second = (replace(report, suites=(suite,)) for suite in report.suites)
    assert "no figure in common" in compare(first, second, ("a", "b")).summary


def test_the_verdict_tells_how_many_more_chats_run(report: Report) -> None:
    def curve(name: str, sustained: float) -> LoadCurve:
        good, bad = (metrics_with_good_share(share) for share in (1.0, 0.5))
        points = [(sustained, good), (99.0, bad)]
        curve = (LoadPoint(rate, None, (LoadRun(metrics, None),)) for rate, metrics in points)
        return LoadCurve(name, "tiny", None, None, tuple(curve), 5.0, ())

    def said(*curves: LoadCurve) -> str:
        suite = LoadReport("cuda, float16", "a workload", Limits(2000, 200), 1, curves)
        return " ".join(verdict(replace(report, suites=(suite,))))

    many = said(curve("auto", 6.2), curve("gpu-only", 2.0))
    assert "offloading lets 3.1x more chats run at the same speed: 6.2 instead of 2 requests" in many
    assert "With and without offloading, about 2 requests" in said(curve("auto", 2.0), curve("gpu-only", 2.0))
    assert said(curve("server", 3.0)).startswith("Up to 3 requests per second")


def metrics_with_good_share(share: float) -> LoadMetrics:
    """Ten requests, of which so many kept the limits."""
    firsts = [100.0 if index < 10 * share else 9000.0 for index in range(10)]
    records = [
        RequestRecord(0.0, 0.0, first + 50, (first, first + 50), 5, 0, 2, Outcome.FINISHED)
        for first in firsts
    ]
    return summarise(records, Limits(2000, 200))
