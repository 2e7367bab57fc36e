"""The recipes of CONTRIBUTING.md, applied to copies of the files that they name."""

import json
import subprocess
import sys
from pathlib import Path

from checkpoints import save_checkpoint

REPOSITORY = Path(__file__).parents[1]

# Loads edited copies instead of the modules, then uses them.
PROGRAM = """
import importlib.util, sys
*copies, ours, llama = sys.argv[1:]
for name, file in zip(copies[::2], copies[1::2]):
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

from typer.testing import CliRunner
from neo_desktop import Engine, SamplingParams
from neo_desktop.app.cli import app
from neo_desktop.engine.options import OPTIONS

def answer(model="builtin", **options):
    memory = {"gpu_cache_tokens": 256, "cpu_cache_tokens": 512}
    with Engine.from_pretrained(model, device="cpu", **memory, **options) as engine:
        prompts = [[(7 * i + j) % 200 for j in range(20)] for i in range(8)]
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        return [completion.token_ids for completion in engine.generate(prompts, params)]

assert "waiting" in OPTIONS["policy"].choices
assert "waiting" in CliRunner().invoke(app, ["serve", "--policy", "none"], env={"COLUMNS": "200"}).output
assert answer(shape="tiny", policy="waiting") == answer(shape="tiny", policy="gpu-only")
assert answer(model=ours) == answer(model=llama)
"""


def edited(tmp_path: Path, file: str, *edits: tuple[str, str]) -> Path:
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    for before, after in edits:
        assert text.count(before) == 1
        text = text.replace(before, after)
    copy = tmp_path / Path(file).name
    copy.write_text(text, encoding="utf-8")
    return copy


POLICY = '''class Waiting(Policy):
    """No prompt begins in a tier that is not the preferred one."""

    def admits(self, builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
        """Never."""
        return False


POLICIES = {'''


def test_a_policy_is_a_class_and_an_entry_and_an_architecture_like_llama_is_a_family(tmp_path: Path) -> None:
    entry = '        Fastest("auto", ALL_TIERS),\n'
    policies = edited(
        tmp_path,
        "engine/schedule/policies.py",
        ("POLICIES = {", POLICY),
        (entry, f'{entry}        Waiting("waiting", MEASURED_TIERS),\n'),
    )
    family = 'FAMILIES = (\n    Family("OursForCausalLM", "ours", _MISTRAL),\n'
    families = edited(tmp_path, "models/families.py", ("FAMILIES = (\n", family))
    ours = save_checkpoint(tmp_path / "model", "llama")
    llama = tmp_path / "llama"
    llama.symlink_to(save_checkpoint(tmp_path / "same", "llama"))
    config = json.loads((ours / "config.json").read_text())
    names = {"architectures": ["OursForCausalLM"], "model_type": "ours"}
    (ours / "config.json").write_text(json.dumps(config | names))
    command = [sys.executable, "-c", PROGRAM, "neo_desktop.engine.schedule.policies", policies]
    command += ["neo_desktop.models.families", families, ours, llama]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
