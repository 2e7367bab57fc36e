"""The script that measures worker processes: they answer, with rows sent ahead and in turn."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.sample(0)
@pytest.mark.parametrize("more", [[], ["--in-turn", "--token-us", "1"]])
def test_there_is_a_row_for_each_number_of_workers(more: list[str]) -> None:
    """People judge the times; the test checks the rows."""
    sizes = [
        "--workers",
        "1",
        "2",
        "--requests",
        "4",
        "--context",
        "64",
        "--layers",
        "2",
        "--iterations",
        "2",
    ]
    command = [sys.executable, "-m", "benchmarks.worker_processes", *sizes, *more]
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = [line.strip("|").split("|") for line in result.stdout.splitlines()[3:]]
    assert [row[0].strip() for row in rows] == ["1", "2"]
    assert all(float(row[1]) > 0 for row in rows)
