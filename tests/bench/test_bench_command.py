"""The command `neo-desktop bench`: its contract with programs that run it."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

from neo_desktop.app.commands.bench_command import json_progress

PROGRAM = Path(sys.executable).parent / "neo-desktop"


def test_progress_lines_are_json_and_none_comes_twice() -> None:
    lines = StringIO()
    progress = json_progress(lines)
    for share, what in (
        (0.0, "loading"),
        (0.0, "loading"),
        (0.00001, "loading"),
        (0.4, 'a "b"'),
        (1.0, "done"),
    ):
        progress(share, what)
    assert [json.loads(line) for line in lines.getvalue().splitlines()] == [
        {"share": 0.0, "what": "loading"},
        {"share": 0.4, "what": 'a "b"'},
        {"share": 1.0, "what": "done"},
    ]


def test_another_program_can_follow_a_run(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(PROGRAM, "bench", "--suite", "throughput", "--shape", "tiny", "--device", "cpu"),
            *("--requests", "4", "--output", "4", "--repeats", "1"),
            *("--progress-json", "--out", "found"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    steps = [json.loads(line) for line in result.stderr.splitlines()]
    shares = [step["share"] for step in steps]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert all(step["what"] for step in steps)
    out = tmp_path / "found"
    assert list(tmp_path.iterdir()) == [out]
    assert "found/report.html" in result.stdout.replace("\n", "")
    assert {path.name for path in out.iterdir()} == {"report.html", "report.json"}
    (suite,) = json.loads((out / "report.json").read_text())["suites"]
    assert suite["model"] == "tiny (random weights)"
