"""The final page of `gpu_check` lists working parts, fallbacks, failures and missed targets."""

import sys
from pathlib import Path

import pytest

from scripts.gpu_page import Page, Target, run_apart


def test_a_part_that_fails_is_told_and_the_next_has_its_turn(capsys: pytest.CaptureFixture[str]) -> None:
    page = Page("a card")
    done: list[str] = []
    page.stage("wrong", lambda: 1 / 0)
    page.stage("right", lambda: done.append("right"))
    assert done == ["right"]
    assert page.works == ["right"]
    assert page.failed == ["wrong: division by zero"]
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "is_met"),
    [
        (Target("auto", 0.98, 0.97), True),
        (Target("auto", 0.96, 0.97), False),
        (Target("outside_ms", 0.9, 1.0, is_upper=True), True),
        (Target("outside_ms", 1.1, 1.0, is_upper=True), False),
    ],
)
def test_targets_are_met_or_missed(target: Target, is_met: bool) -> None:
    assert target.is_met is is_met
    assert ("MISSED" in str(target)) is not is_met


def test_the_page_answers_all_questions() -> None:
    page = Page("a card", works=["doctor"], fell_back=["graphs"], speeds=["7 tok/s"])
    text = "\n".join(page.lines())
    for part in ("a card", "What works\n  doctor", "What fell back\n  graphs", "What failed\n  nothing"):
        assert part in text
    assert "How fast\n  7 tok/s" in text
    assert "Targets\n  none was measured" in text


@pytest.mark.parametrize(
    ("program", "limit_s", "expected"),
    [
        ("", 60.0, None),
        ("import os; os.abort()", 60.0, "its process was ended by SIGABRT"),
        ("import sys; sys.exit(3)", 60.0, "its process ended with exit code 3"),
        ("import subprocess; subprocess.run(['sleep', '3600'])", 0.5, "it had not finished after 0.5 s"),
    ],
)
def test_a_process_that_dies_or_hangs_is_told(program: str, limit_s: float, expected: str | None) -> None:
    assert run_apart([sys.executable, "-c", program], limit_s) == expected


def test_a_page_passes_from_process_to_process(tmp_path: Path) -> None:
    page = Page("a card", works=["one"], targets=[Target("auto", 0.98, 0.97)])
    page.save(tmp_path / "page.json")
    assert Page.load(tmp_path / "page.json") == page
