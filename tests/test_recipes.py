"""The recipes of CONTRIBUTING.md, applied to copies of the files that they name."""

import json
import subprocess
import sys
from pathlib import Path

from checkpoints import save_checkpoint

REPOSITORY = Path(__file__).parents[1]

# Loads the edited copy instead of the module, then runs the rest.
WITH_COPY = """
import importlib.util, sys
name, file = sys.argv[1:3]
spec = importlib.util.spec_from_file_location(name, file)
sys.modules[name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
ANSWER = """
from neo_desktop import Engine, SamplingParams
def answer(model="builtin", **options):
    memory = {"gpu_cache_tokens": 256, "cpu_cache_tokens": 512}
    with Engine.from_pretrained(model, device="cpu", **memory, **options) as engine:
        prompts = [[(7 * i + j) % 200 for j in range(20)] for i in range(8)]
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        return [completion.token_ids for completion in engine.generate(prompts, params)]
"""


def edited(tmp_path: Path, file: str, *edits: tuple[str, str]) -> Path:
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    for before, after in edits:
        assert text.count(before) == 1
        text = text.replace(before, after)
    copy = tmp_path / Path(file).name
    copy.write_text(text, encoding="utf-8")
    return copy


def run(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", WITH_COPY + ANSWER + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


POLICY = '''class Waiting(Policy):
    """No prompt begins in a tier that is not the preferred one."""

    def admits(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        """Never."""
        return False


POLICIES = {'''


def test_a_policy_is_a_class_and_an_entry(tmp_path: Path) -> None:
    copy = edited(
        tmp_path,
        "engine/schedule/policies.py",
        ("POLICIES = {", POLICY),
        (
            '        Fastest("auto", ALL_TIERS),\n',
            '        Fastest("auto", ALL_TIERS),\n        Waiting("waiting", MEASURED_TIERS),\n',
        ),
    )
    run(
        """
from typer.testing import CliRunner
from neo_desktop.app.cli import app
from neo_desktop.engine.options import OPTIONS
assert "waiting" in OPTIONS["policy"].choices
assert "waiting" in CliRunner().invoke(app, ["serve", "--policy", "none"], env={"COLUMNS": "200"}).output
assert answer(shape="tiny", policy="waiting") == answer(shape="tiny", policy="gpu-only")
""",
        "neo_desktop.engine.schedule.policies",
        copy,
    )


def test_an_architecture_like_llama_is_a_family(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "llama")
    llama = tmp_path / "llama"
    llama.symlink_to(save_checkpoint(tmp_path / "same", "llama"))
    config = json.loads((folder / "config.json").read_text())
    ours = {"architectures": ["OursForCausalLM"], "model_type": "ours"}
    (folder / "config.json").write_text(json.dumps(config | ours))
    copy = edited(
        tmp_path,
        "models/families.py",
        ("FAMILIES = (\n", 'FAMILIES = (\n    Family("OursForCausalLM", "ours", _MISTRAL),\n'),
    )
    run(
        "assert answer(model=sys.argv[3]) == answer(model=sys.argv[4])",
        "neo_desktop.models.families",
        copy,
        folder,
        llama,
    )
