"""`neo-desktop doctor` from the command line to its page, and its text for failed checks."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from neo_desktop.app.commands.doctor_command import DoctorReport, run_doctor
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.native import available_isas

PROGRAM = Path(sys.executable).parent / "neo-desktop"
CHILD = (sys.executable, str(Path(__file__).parents[1] / "doctor" / "failing_child.py"))
GOOD = Subject(model="good", shape="tiny", device="cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path / "cache"))


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [PROGRAM, "doctor", *arguments], capture_output=True, text=True, check=False, env=wide
    )


def doctor(subject: Subject = GOOD, *, refresh: bool) -> DoctorReport:
    return run_doctor(subject, refresh=refresh, progress=lambda what: None, child=CHILD)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> DoctorReport:
    """Report whose checks fail in every way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEO_DESKTOP_CACHE", str(tmp_path_factory.mktemp("cache")))
        return doctor(Subject(shape="tiny", device="cpu"), refresh=True)


def test_a_cpu_is_checked_once_and_all_is_well(tmp_path: Path) -> None:
    arguments = ("--shape", "tiny", "--device", "cpu", "--json", tmp_path / "doctor.json")
    result = run(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "checks passed" in result.stdout
    report = json.loads((tmp_path / "doctor.json").read_text())
    names = {outcome["name"] for outcome in report["outcomes"]}
    assert {f"cpu-attention-{isa}-int8" for isa in available_isas()} <= names
    assert {"answers", "affinity-free", "huge_pages-small"} <= names
    assert all(outcome["result"] == "ok" for outcome in report["outcomes"])
    assert "--refresh" in run(*arguments).stdout


def test_a_report_names_neither_the_user_nor_the_computer(failed: DoctorReport) -> None:
    text = json.dumps(failed.to_json())
    for private in (str(Path.home()) + "/", psutil.Process().cwd(), os.uname().nodename, sys.prefix):
        assert private not in text


def test_what_failed_and_what_serves_are_told(failed: DoctorReport) -> None:
    assert not failed.is_well
    out = io.StringIO()
    failed.print(Console(file=out, width=300))
    text = out.getvalue()
    assert "it ended its process: SIGSEGV; in its place: launched piece by piece" in text
    assert "the relative error is nan" in text
    assert "From now on, Decode attention: torch's operators" in text
    assert "6 of 10 checks failed" in text


def test_results_are_kept_until_they_are_asked_for_again() -> None:
    first = doctor(refresh=False)
    kept = doctor(refresh=False)
    assert kept.is_kept
    assert kept.verdict.outcomes == first.verdict.outcomes
    assert not doctor(refresh=True).is_kept


def test_a_model_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    result = run("--model", tmp_path / "nothing")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
