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
from neo_desktop.app.simulate import SimulationOptions, UsageError, run_simulation
from neo_desktop.engine.placement import POLICIES
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.presets import GPUS, HOSTS
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.shapes import shape

PROGRAM = Path(sys.executable).parent / "neo-desktop"
SMALL = SimulationOptions(gpu="t4", input_tokens=300, output_tokens=20, num_requests=30)


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
        ({"cpu": "laptop"}, "no host preset"),
        ({"model": "gpt-5"}, "neither a shape nor a model folder"),
        ({"policy": "best"}, "no policy"),
        ({"input_tokens": None}, "no workload"),
        ({"trace": Path("x.json")}, "not both"),
        ({"rate": 0.0}, "above 0"),
        ({"rate": float("nan")}, "above 0"),
        ({"max_batch_tokens": 100}, "max_batch_tokens"),
        ({"cpu_slowdown": 0.0}, "slowdown"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        run_simulation(replace(SMALL, **changes), ignore)


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
    assert "30 of 30 requests refused" in console.export_text()


def test_measured_tables_replace_the_datasheet(tmp_path: Path) -> None:
    config = shape("llama-2-7b")
    tables = tmp_path / "tables.json"
    cost = analytic_cost_model(GPUS["t4"], HOSTS["g4dn.4xlarge"], config, torch.float16)
    cost.save(tables)
    caches = {"gpu_cache_tokens": 1008, "cpu_cache_tokens": 65_536}
    measured = replace(SMALL, gpu=None, tables=tables, **caches)
    assert simulated(measured) == simulated(replace(SMALL, **caches))
    profile = tmp_path / "profile.json"  # as `neo-desktop profile --json` writes it
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


def test_a_model_folder_gives_its_shape(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "tiny", "llama")
    figures = simulated(replace(SMALL, model=str(folder), input_tokens=8, output_tokens=4, policy="auto"))
    assert figures["auto"]["num_finished"] == 30
    assert simulated(replace(SMALL, model="builtin", input_tokens=8, output_tokens=4, policy="auto"))
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json"):
        run_simulation(replace(SMALL, model=str(folder)), ignore)


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
