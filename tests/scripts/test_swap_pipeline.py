"""Streamed KV on throttled lanes: iterations beside their predictions."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.sample(0)
def test_throttled_lanes_bring_kv_and_change_no_token() -> None:
    """The script compares the tokens of both bus rates; people judge the times."""
    sizes = ["--layer-ms", "1", "--bus", "400", "800", "--requests", "16", "--output", "40", "--warm-up", "5"]
    command = [sys.executable, "-m", "research.swap_pipeline", *sizes]
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = [line.strip("|").split("|") for line in result.stdout.splitlines()[3:]]
    assert [row[0].strip() for row in rows] == ["400", "800"]
    assert all(int(row[2]) > 0 for row in rows)  # iterations that streamed KV
