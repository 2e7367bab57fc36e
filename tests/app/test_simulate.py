"""`neo-desktop simulate`: its JSON, its table, and what it says to wrong use."""

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from rich.console import Console

from neo_desktop.app.cli import main
from neo_desktop.app.commands.sentences import sentence
from neo_desktop.app.simulate import SimulationOptions, UsageError, run_simulation
from neo_desktop.app.simulate.answer import answer
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.presets import GPUS, HOSTS
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.shapes import SHAPES, shape

PROGRAM = Path(sys.executable).parent / "neo-desktop"
SMALL = SimulationOptions(gpu="t4", model="llama-2-7b", input_tokens=300, output_tokens=20, num_requests=30)


def ignore(share: float, what: str) -> None:
    """Take progress and do nothing with it."""


def simulated(options: SimulationOptions) -> dict[str, Any]:
    figures: dict[str, Any] = run_simulation(options, ignore).to_json()["policies"]
    return figures


def test_the_program_prints_a_table_and_writes_the_figures(tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.json", tmp_path / "report.json"
    trace.write_text(json.dumps([{"prompt": 300, "max_tokens": 20}] * 30), encoding="utf-8")
    result = subprocess.run(
        [
            PROGRAM,
            "simulate",
            "--gpu",
            "T4",
            "--trace",
            trace,
            "--gpu-cache-tokens",
            "1008",
            "--json",
            report,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    written = json.loads(report.read_text(encoding="utf-8"))
    assert list(written) == ["policies"]
    assert list(written["policies"]) == list(POLICIES)
    for name, figures in written["policies"].items():
        assert set(figures["ttft_ms"]) == {"p50", "p99"}
        assert figures["ttft_ms"]["p50"] <= figures["ttft_ms"]["p99"]
        for key in ("output_tokens_per_s", "tpot_ms", "mean_batch"):
            assert isinstance(figures[key], float)
            assert figures[key] > 0
        assert figures["output_tokens"] == 600
        assert figures["num_finished"] == 30
        assert figures["gpu_cache_tokens"] == 1008
        assert name in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> object:
    """Run the command line in this process, which is quicker."""
    monkeypatch.setattr("sys.argv", ["neo-desktop", "simulate", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_help_has_examples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(monkeypatch, "--help") == 0
    assert "neo-desktop simulate --gpu t4" in " ".join(capsys.readouterr().out.split())


def test_wrong_use_ends_with_2_and_failure_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "--gpu", "t5", "--input", "10", "--output", "10") == 2
    assert exit_code(monkeypatch, "--gpu", "t4", "--trace", tmp_path / "missing.csv") == 2
    assert capsys.readouterr().out == ""
    bad = tmp_path / "bad.csv"
    bad.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,1\n", encoding="utf-8")
    assert exit_code(monkeypatch, "--gpu", "t4", "--trace", bad) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": None}, "no machine"),
        ({"gpu": "t5"}, "no GPU preset"),
        ({"gpu": "rtx-3061"}, "did you mean rtx-3060"),
        ({"gpu_json": Path("x.json")}, "not both"),
        ({"gpu": None, "gpu_memory_gib": 12.0, "gpu_tflops": 20.0}, "also needs --gpu-bandwidth"),
        ({"gpu_memory_gib": -1.0}, "--gpu-memory is -1"),
        ({"gpu_bandwidth_gb_per_s": float("nan")}, "--gpu-bandwidth is nan"),
        ({"cpu_bandwidth_gb_per_s": 1e9}, "at most 10,000"),
        ({"cpu_cores": 0}, "--cpu-cores is 0"),
        ({"dtype": "bfloat16"}, "the T4 has no bfloat16"),
        ({"cpu": "laptop"}, "no host preset"),
        ({"model": "gpt-5"}, "neither a shape nor a model folder"),
        ({"policy": "best"}, "no policy"),
        ({"trace": Path("x.json")}, "not both"),
        ({"rate": 0.0}, "above 0"),
        ({"rate": float("nan")}, "above 0"),
        ({"max_batch_tokens": 100, "max_batch_requests": 101}, "max_batch_tokens"),
        ({"cpu_slowdown": 0.0}, "slowdown"),
        ({"gpu_weights_gib": 0.0}, "gpu_weights_gib must be at least"),
        ({"model": "qwen3-4b:Q4"}, "'Q4' is no quantisation: choose one of Q8_0"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        run_simulation(replace(SMALL, **changes), ignore)


def test_weights_that_do_not_fit_are_computed_by_both() -> None:
    options = replace(SMALL, model="llama-2-13b")
    report = run_simulation(options, ignore)
    assert report.machine.divided is not None
    console = Console(width=80, record=True, file=StringIO())
    report.print(console)
    shown = " ".join(console.export_text().split())
    assert "GB in host memory, computed by CPU and GPU together" in shown
    auto = report.results["auto"]
    assert auto.num_refused == 0
    assert 0 < auto.output_tokens_per_s <= report.bound_output_tokens_per_s
    fewer = run_simulation(replace(options, gpu_weights_gib=3.0, policy="auto"), ignore)
    assert fewer.results["auto"].output_tokens_per_s < auto.output_tokens_per_s
    assert fewer.budget.gpu_tokens > report.budget.gpu_tokens  # what weights leave is for KV


def test_a_quantised_shape_takes_less() -> None:
    whole, quantised = (
        run_simulation(replace(SMALL, model=name, policy="gpu-only", num_requests=1), ignore)
        for name in ("llama-2-7b", "llama-2-7b:Q4_K_M")
    )
    assert quantised.machine.divided is None
    assert quantised.budget.gpu_tokens > 2 * whole.budget.gpu_tokens


def test_one_policy_can_be_named() -> None:
    assert list(simulated(replace(SMALL, policy="neo"))) == ["neo"]


def test_requests_takes_the_first_of_a_trace_and_rate_spreads_them(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(
        json.dumps([{"prompt": 10 * n, "max_tokens": 5} for n in range(1, 21)]), encoding="utf-8"
    )
    options = SimulationOptions(gpu="t4", trace=trace, num_requests=4, rate=0.01, policy="gpu-only")
    figures = simulated(options)["gpu-only"]
    assert figures["total_tokens"] == 10 + 20 + 30 + 40 + 4 * 5
    assert figures["makespan_ms"] > 10_000


def test_caches_can_be_set_and_what_cannot_fit_is_reported() -> None:
    report = run_simulation(
        replace(SMALL, gpu_cache_tokens=256, cpu_cache_tokens=4096, max_context_tokens=310), ignore
    )
    figures = report.to_json()["policies"]
    assert figures["gpu-only"]["num_refused"] == 30
    assert 0 < figures["auto"]["num_refused"] < 30
    console = Console(width=80, record=True, file=StringIO())
    report.print(console)
    text = " ".join(console.export_text().split())
    assert "All 30 requests do not fit the GPU-cache of 256" in text
    assert "gpu-only cannot run them" in text
    assert "fit the 310 of --max-context-tokens" in text
    assert " 0.0" not in text  # no figures of what never ran


def test_measured_tables_replace_the_datasheet(tmp_path: Path) -> None:
    config = shape("llama-2-7b")
    tables = tmp_path / "tables.json"
    cost = analytic_cost_model(GPUS["t4"], HOSTS["g4dn.4xlarge"], config, torch.float16)
    cost.save(tables)
    caches = {"gpu_cache_tokens": 1008, "cpu_cache_tokens": 65_536}
    measured = replace(SMALL, gpu=None, tables=tables, **caches)
    assert simulated(measured) == simulated(replace(SMALL, **caches))
    profile = tmp_path / "profile.json"  # as `neo-desktop doctor --measure --json` writes it
    profile.write_text(json.dumps({"key": {}, "path": "x", "tables": cost.to_json()}), encoding="utf-8")
    assert simulated(replace(measured, tables=profile)) == simulated(measured)
    with pytest.raises(UsageError, match="must say what fits"):
        run_simulation(replace(SMALL, gpu=None, tables=tables), ignore)
    with pytest.raises(UsageError, match="has 40"):
        run_simulation(replace(measured, model="llama-2-13b"), ignore)
    tables.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tables\.json: cost tables of version None"):
        run_simulation(measured, ignore)
    tables.write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tables\.json"):
        run_simulation(measured, ignore)


def test_a_model_path_gives_its_shape(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "tiny", "llama")
    figures = simulated(replace(SMALL, model=str(folder), input_tokens=8, output_tokens=4, policy="auto"))
    assert figures["auto"]["num_finished"] == 30
    assert simulated(replace(SMALL, model="builtin", input_tokens=8, output_tokens=4, policy="auto"))
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json"):
        run_simulation(replace(SMALL, model=str(folder)), ignore)


def test_swapped_layers_are_worth_it_beside_a_fast_bus_and_a_small_cache() -> None:
    found = simulated(replace(SMALL, gpu="gh200", gpu_cache_tokens=4096))
    assert found["pie"]["num_finished"] == 30
    assert found["pie"]["output_tokens_per_s"] >= found["gpu-only"]["output_tokens_per_s"]


def test_progress_runs_from_0_to_1_and_names_the_policy() -> None:
    seen: list[tuple[float, str]] = []
    run_simulation(
        replace(SMALL, num_requests=150, gpu_cache_tokens=1008),
        lambda share, what: seen.append((share, what)),
    )
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)
    assert {what for _, what in seen} <= set(POLICIES)
    assert seen


def told(options: SimulationOptions) -> str:
    """What the terminal shows, on one line."""
    report = run_simulation(options, ignore)
    console = Console(width=80, record=True, file=StringIO())
    report.print(console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


@pytest.mark.parametrize("gpu", ["rtx-3060", "gtx-1650", "rtx-5090", "h100"])
def test_a_gpu_is_all_that_must_be_named(gpu: str) -> None:
    text = told(SimulationOptions(gpu=gpu, num_requests=8))
    assert text.startswith("On a")
    for assumed in ("(vendor's datasheet)", "--cpu takes another", "--model takes another", "--input"):
        assert assumed in text


def test_the_price_stands_beside_the_gain() -> None:
    options = SimulationOptions(
        gpu="t4", model="llama-2-7b", input_tokens=400, output_tokens=50, num_requests=200
    )
    report = run_simulation(options, ignore)
    figures = report.to_json()["policies"]
    gain = figures["auto"]["output_tokens_per_s"] / figures["gpu-only"]["output_tokens_per_s"]
    assert gain > 2
    said = answer(report)
    assert f"offloading makes llama-2-7b {gain:.1f}x as fast when 200 chats come at once" in said
    slow, quick = (figures[name]["tpot_ms"] for name in ("auto", "gpu-only"))
    assert f"Each chat gets its tokens at {slow:.0f} ms instead of {quick:.0f} ms" in said
    row = next(line for line in told(options).split("auto ")[1:])
    assert f"{slow / quick:.2f}x" in row
    share = figures["auto"]["bound_share"]
    assert 0.5 < share <= 1
    assert f"{share:.0%}" in row


def test_where_all_fits_the_answer_says_so() -> None:
    said = answer(run_simulation(SimulationOptions(gpu="rtx-4090", num_requests=4), ignore))
    assert said.startswith("On an RTX 4090 with a desktop's DDR5 memory, offloading changes nothing")
    assert "because GPU memory has room for all of them" in said


def test_what_only_host_memory_can_hold_is_named() -> None:
    options = replace(SMALL, input_tokens=3000, num_requests=1, gpu_cache_tokens=1008)
    text = told(options)
    assert "only offloading lets" in text
    assert "A prompt of" in text
    assert "do not fit the GPU-cache of 1,008: gpu-only cannot run it." in text


def test_what_no_place_can_hold_is_named() -> None:
    text = told(replace(SMALL, input_tokens=5000))
    assert "llama-2-7b cannot run this, with or without offloading" in text
    assert "do not fit llama-2-7b's context of 4,096" in text


def test_own_figures_stand_for_a_card() -> None:
    of_card = simulated(replace(SMALL, gpu="rtx-3070", model="llama-3.2-1b", cpu="ddr4-desktop"))
    own = SimulationOptions(
        gpu_memory_gib=8.0,
        gpu_bandwidth_gb_per_s=448.0,
        gpu_tflops=40.6,
        model="llama-3.2-1b",
        input_tokens=300,
        output_tokens=20,
        num_requests=30,
    )
    assert simulated(own)["gpu-only"] == of_card["gpu-only"]
    text = told(own)
    assert text.startswith("On a GPU of your own with a desktop's DDR4 memory")
    assert "(your figures)" in text


def test_own_figures_of_a_host_change_what_offloading_gains() -> None:
    options = replace(SMALL, num_requests=60, gpu_cache_tokens=1008, policy="fastdecode")
    slow = replace(options, cpu_bandwidth_gb_per_s=10.0, cpu_memory_gib=16.0)
    assert (
        simulated(slow)["fastdecode"]["output_tokens_per_s"]
        < simulated(options)["fastdecode"]["output_tokens_per_s"]
    )
    assert "main memory of 16 GiB at 10 GB/s" in told(slow)


def test_own_figures_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    figures = {"memory_gib": 8, "bandwidth_gb_per_s": 448, "tflops": 40.6, "name": "My Card"}
    file.write_text(json.dumps(figures), encoding="utf-8")
    options = replace(SMALL, gpu=None, gpu_json=file, model="llama-3.2-1b")
    assert "On My Card with" in told(options)
    for wrong, reason in (
        ({"memory_gib": "8"}, "'memory_gib' is '8', expected a number above 0"),
        ({"tflops": 0}, "'tflops' is 0"),
        ({"bandwith": 1}, "'bandwith' is no figure of a GPU"),
        ({"bfloat16": 1}, "expected true or false"),
    ):
        file.write_text(json.dumps(figures | wrong), encoding="utf-8")
        with pytest.raises(UsageError, match=reason):
            run_simulation(options, ignore)
    for text, reason in (("{", "line 1: not valid JSON"), ("[1]", "no.* JSON object"), ("{}", "is missing")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=reason):
            run_simulation(options, ignore)


def test_a_model_that_does_not_fit_is_answered_with_one_that_does() -> None:
    """Not even with a part of its weights in host memory."""
    with pytest.raises(MemoryError, match=r"do not fit into the .* of host memory .*qwen3-4b would leave"):
        run_simulation(SimulationOptions(gpu="rtx-3060", model="llama-2-70b"), ignore)


def test_the_list_shows_all_that_can_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "--list") == 0
    shown = capsys.readouterr().out
    for name in (*GPUS, *HOSTS, *(name for name in SHAPES if name != "tiny")):
        assert f" {name} " in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--trace", "missing.csv"), "does not exist"),
        (("--trace", "."), "is a directory"),
        (("--json", "missing/report.json"), "there is no folder missing"),
        (("--json", "."), "is a folder"),
    ],
)
def test_files_that_cannot_be_used_are_told_in_words(
    arguments: tuple[str, str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "--gpu", "t4", *arguments) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Errno" not in said


def test_the_systems_errors_become_sentences(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none", "no such file or folder"), (tmp_path, "a folder, not a file")):
        with pytest.raises(OSError, match="Errno") as caught:
            path.read_text()
        assert sentence(caught.value).startswith(f"{path}: ")
        assert says in sentence(caught.value)
    assert sentence(OSError("port 80 is taken")) == "port 80 is taken"
    assert sentence(ValueError("wrong")) == "wrong"


# ---- attention workers ----

WORKERS = replace(SMALL, num_requests=20, worker_bandwidth_gb_per_s=100.0, link_gbit_per_s=25.0, policy="neo")


def test_workers_are_as_many_as_the_gpu_wants_unless_somebody_says() -> None:
    report = run_simulation(WORKERS, ignore)
    fleet = report.machine.fleet
    assert fleet is not None
    assert fleet.workers.count == fleet.wanted
    stated = run_simulation(replace(WORKERS, workers=3, worker_memory_gib=2.0), ignore)
    assert stated.machine.fleet is not None
    assert stated.machine.fleet.workers.count == 3
    config = stated.machine.config
    assert stated.budget.cpu_tokens == 3 * (2 * 2**30 // config.kv_bytes_per_token(torch.float16))
    assert simulated(replace(WORKERS, workers=3))["neo"]["workers"] == 3


def test_tokens_per_cost_count_workers_only_where_they_are_used() -> None:
    priced = replace(WORKERS, workers=4, gpu_price=1.0, worker_price=0.25, policy=None)
    report = run_simulation(priced, ignore)
    figures = report.to_json()["policies"]
    for name, price in (("gpu-only", 1.0), ("auto", 2.0)):
        per_hour = figures[name]["output_tokens_per_s"] * 3600
        assert figures[name]["output_tokens_per_price"] == pytest.approx(per_hour / price)
    console = Console(width=80, record=True, file=StringIO())
    report.print(console)
    shown = " ".join(console.export_text().split())
    assert "with 4 workers at 100 GB/s" in shown
    assert "This GPU wants" in shown
    assert "Output tokens for a price of 1: gpu-only" in shown


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"worker_bandwidth_gb_per_s": None}, "--link is about attention workers"),
        ({"gpu_price": 1.0}, "needs both"),
        ({"link_gbit_per_s": 0.001}, "no number of such workers"),
        ({"latency_us": 0.0}, "--latency is 0"),
    ],
)
def test_workers_that_make_no_sense_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        run_simulation(replace(WORKERS, **changes), ignore)


def test_a_link_that_no_number_of_workers_makes_up_for_is_named() -> None:
    report = run_simulation(replace(WORKERS, workers=2, link_gbit_per_s=0.01), ignore)
    assert report.machine.fleet is not None
    assert report.machine.fleet.wanted is None
    assert "No number of such workers keeps up" in report.machine.fleet.advice
