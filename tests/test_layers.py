"""Imports go downward only (the contracts are in pyproject.toml), and importing stays cheap."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


# An editable install finds modules through a hook that static tools do not understand. They do understand the
# tree of links to the same folders that comes with it.
LINKED = REPOSITORY / "build" / "typing"
LINT_IMPORTS = """
import sys
from importlinter.cli import lint_imports
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.exit(lint_imports(no_cache=True))
"""


def test_every_folder_and_part_of_the_engine_imports_only_what_is_below_it() -> None:
    assert LINKED.is_dir(), "install the project editable first: scripts/test does"
    result = subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(LINKED)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Contracts: 5 kept" in result.stdout


def test_only_policies_name_a_tier() -> None:
    """Other modules ask a tier for its memory and attention device, so that further tiers are possible."""
    named = {
        str(path.relative_to(REPOSITORY))
        for folder in ("app", "engine", "models")
        for path in (REPOSITORY / folder).rglob("*.py")
        if re.search(r"\bKVTier\.(DEVICE|HOST|STREAMED)\b", path.read_text(encoding="utf-8"))
    }
    set_up = {"engine/drafting.py"}
    assert named == {"engine/kv_tier.py", "engine/schedule/policies.py"} | set_up


def test_the_loop_over_layers_names_no_technique() -> None:
    """A technique is an attender, or a way of linear stages, in a file of its own."""
    tree = ast.parse((REPOSITORY / "engine" / "execute" / "program.py").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    techniques = "async_decodes", "decodes", "moves", "offloaded", "prompts", "ranks", "streamed", "worker"
    assert not {module for module in imported if module and any(word in module for word in techniques)}
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not {
        name for name in named if re.search("async|offload|stream|expert|worker|prompt", name.lower())
    }


# Importing the first does not import the second.
LIGHT = (
    ("neo_desktop, neo_desktop.app.cli, neo_desktop.engine.schedule.scheduler", {"torch", "fastapi"}),
    ("neo_desktop.app.bench, neo_desktop.engine.engine", {"fastapi", "triton"}),
    ("neo_desktop.app.commands.serve_command", {"gradio"}),
)


def test_importing_does_not_drag_in_what_is_not_needed() -> None:
    code = "import sys\n" + "".join(
        f"import {modules}\nassert not {unwanted!r} & sys.modules.keys()\n" for modules, unwanted in LIGHT
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
