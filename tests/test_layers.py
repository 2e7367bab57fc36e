"""Imports run downward only (the contracts are in pyproject.toml), and importing stays cheap."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


def test_every_folder_imports_only_what_is_below_it() -> None:
    linked = REPOSITORY / "build" / "typing"  # the packages as plain folders: made by an editable install
    assert linked.is_dir(), "install the project editable first: scripts/test does"
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(linked)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("neo_desktop", "torch"),
        ("neo_desktop.app.cli", "torch"),
        ("neo_desktop.engine.engine", "gradio"),
        ("neo_desktop.engine.engine", "fastapi"),
        ("neo_desktop.engine.scheduler", "torch"),
        ("neo_desktop.app.bench", "fastapi"),
        ("neo_desktop.app.bench", "gradio"),
        ("neo_desktop.app.server", "gradio"),
    ],
)
def test_importing_does_not_drag_in_what_is_not_needed(module: str, unwanted: str) -> None:
    code = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
