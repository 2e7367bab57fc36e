"""`neo-desktop simulate`: its JSON, its table, and its errors."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_checkpoint
from rich.console import Console
from typer import BadParameter

from neo_desktop.app.cli import main
from neo_desktop.app.simulate.options import SimulationOptions
from neo_desktop.app.simulate.report import SimulationReport, answer
from neo_desktop.app.simulate.run import run_simulation
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.models.json_file import ModelError

SMALL = SimulationOptions(gpu="t4", model="llama-2-7b", input_tokens=300, output_tokens=20, num_requests=30)


def ignore(share: float, what: str) -> None:
    """Ignore progress reports."""


def simulated(options: SimulationOptions) -> dict[str, Any]:
    figures: dict[str, Any] = run_simulation(options, ignore).to_json()["policies"]
    return figures


def test_the_program_prints_a_table_and_writes_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    lengths = ("--input", "300", "--output", "20", "--requests", "20")
    assert exit_code(monkeypatch, "--gpu", "T4", *lengths, "--json", report) == 0
    printed = capsys.readouterr().out
    written = json.loads(report.read_text(encoding="utf-8"))
    assert list(written) == ["policies"]
    assert list(written["policies"]) == list(POLICIES)
    for name, figures in written["policies"].items():
        assert set(figures["ttft_ms"]) == {"p50", "p99"}
        assert figures["ttft_ms"]["p50"] <= figures["ttft_ms"]["p99"]
        for key in ("output_tokens_per_s", "tpot_ms", "mean_batch"):
            assert isinstance(figures[key], float)
            assert figures[key] > 0
        assert figures["num_finished"] == 20
        assert name in printed
    assert max(map(len, printed.splitlines())) <= 80


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> object:
    """Run the command line in this process, which is faster than a child process."""
    monkeypatch.setattr("sys.argv", ["neo-desktop", "simulate", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_wrong_use_ends_with_2_and_failure_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "--gpu", "t5", "--input", "10", "--output", "10") == 2
    assert exit_code(monkeypatch, "--gpu", "t4", "--requests", "0") == 2
    assert exit_code(monkeypatch, "--gpu", "t4", "--rate", "0") == 2
    assert exit_code(monkeypatch, "--gpu", "t4", "--gpu-memory", "-1") == 2
    assert capsys.readouterr().out == ""
    assert exit_code(monkeypatch, "--gpu", "rtx-3060", "--model", "llama-2-70b") == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": None}, "name a GPU"),
        ({"gpu": "t5"}, "no GPU preset"),
        ({"gpu": "rtx-3061"}, "did you mean rtx-3060"),
        ({"cpu": "laptop"}, "no host preset"),
        ({"model": "gpt-5"}, "neither a shape nor a model folder"),
        ({"policy": "best"}, "no policy"),
        ({"model": "qwen3-4b:Q4"}, "'Q4' is no quantisation: choose one of Q8_0"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadParameter, match=reason):
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


def test_a_quantised_shape_takes_less() -> None:
    whole, quantised = (
        run_simulation(replace(SMALL, model=name, policy="gpu-only", num_requests=1), ignore)
        for name in ("llama-2-7b", "llama-2-7b:Q4_K_M")
    )
    assert quantised.machine.divided is None
    assert quantised.machine.budget.gpu_tokens > 2 * whole.machine.budget.gpu_tokens


def test_a_model_path_gives_its_shape(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "tiny", "llama")
    figures = simulated(replace(SMALL, model=str(folder), input_tokens=8, output_tokens=4, policy="auto"))
    assert figures["auto"]["num_finished"] == 30
    assert simulated(replace(SMALL, model="builtin", input_tokens=8, output_tokens=4, policy="auto"))
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json"):
        run_simulation(replace(SMALL, model=str(folder)), ignore)


def test_swapped_layers_are_worth_it_beside_a_fast_bus_and_a_small_cache() -> None:
    found = simulated(replace(SMALL, gpu="gh200", gpu_memory_gib=15.5))
    assert found["pie"]["num_finished"] == 30
    assert found["pie"]["output_tokens_per_s"] >= found["gpu-only"]["output_tokens_per_s"]


def told(report: SimulationReport) -> str:
    """Return the terminal's output, joined into one line."""
    console = Console(width=80, record=True, file=StringIO())
    report.print(console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


@pytest.mark.parametrize("gpu", ["rtx-3060", "gtx-1650", "rtx-5090", "h100"])
def test_a_gpu_is_all_that_must_be_named(gpu: str) -> None:
    text = told(run_simulation(SimulationOptions(gpu=gpu, num_requests=8), ignore))
    assert text.startswith("On a")
    for assumed in ("(vendor's datasheet)", "--cpu takes another", "--model takes another", "--input"):
        assert assumed in text


def test_the_price_stands_beside_the_gain() -> None:
    options = SimulationOptions(
        gpu="t4",
        gpu_memory_gib=14.7,
        model="llama-2-7b",
        input_tokens=400,
        output_tokens=50,
        num_requests=100,
    )
    report = run_simulation(options, ignore)
    figures = report.to_json()["policies"]
    gain = figures["auto"]["output_tokens_per_s"] / figures["gpu-only"]["output_tokens_per_s"]
    assert gain > 2
    said = answer(report)
    assert f"offloading makes llama-2-7b {gain:.1f}x as fast when 100 chats come at once" in said
    slow, quick = (figures[name]["tpot_ms"] for name in ("auto", "gpu-only"))
    assert f"Each chat gets its tokens at {slow:.0f} ms instead of {quick:.0f} ms" in said
    row = next(line for line in told(report).split("auto ")[1:])
    assert f"{slow / quick:.2f}x" in row
    share = figures["auto"]["bound_share"]
    assert 0.5 < share <= 1
    assert f"{share:.0%}" in row


def test_what_no_place_can_hold_is_named() -> None:
    text = told(run_simulation(replace(SMALL, input_tokens=5000), ignore))
    assert "llama-2-7b cannot run this, with or without offloading" in text
    assert "30 of 30 requests: 4,096 tokens fit the model's context" in text


def test_a_model_that_does_not_fit_is_answered_with_one_that_does() -> None:
    """The model does not fit even with some weights in host memory."""
    with pytest.raises(MemoryError, match=r"do not fit into the .* of host memory .*qwen3-4b would leave"):
        run_simulation(SimulationOptions(gpu="rtx-3060", model="llama-2-70b"), ignore)
