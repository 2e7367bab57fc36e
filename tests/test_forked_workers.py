"""Workers of pytest that are forked from a process which has imported the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
from quick_processes import quick_processes

def pytest_configure(config):
    if config.getoption("numprocesses", None):
        started = quick_processes(list(map(str, config.invocation_params.args)))
        started.__enter__()
        config.add_cleanup(lambda: started.__exit__(None, None, None))
"""
BROKEN = "def test_one(): pass\nimport does_not_exist\ndef test_two(): assert False\n"
SKIPPED = "import pytest\npytest.importorskip('does_not_exist_either')\ndef test_three(): pass\n"


@pytest.mark.sample(0)
def test_modules_that_cannot_be_imported_are_errors_or_skipped(tmp_path: Path) -> None:
    for name, text in (("conftest", CONFTEST), ("test_broken", BROKEN), ("test_skipped", SKIPPED)):
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-q", "-c", ROOT / "pyproject.toml", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1, done.stdout
    assert "No module named 'does_not_exist'" in done.stdout
    assert "1 skipped" in done.stdout
    assert "1 error" in done.stdout
