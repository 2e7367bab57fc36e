"""Machine code of the Triton kernels for every GPU, compiled without one; `--write` stores it as the budget.

    python -m benchmarks.sass_budget                         compile, print differences from the budget
    python -m benchmarks.sass_budget --write                 store the result as the new budget
    python -m benchmarks.sass_budget --triton 3.6.0 3.7.1    with other Triton versions
    python -m benchmarks.sass_budget --only "rows? "         only variants whose names have this expression

The budget has figures for every Triton version of a supported torch. Versions other than the installed one go
to the user's cache. tests/kernels/test_compile.py fails if a figure is worse. Needs the `dev` extra; a
version takes a minute.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support"
BUDGET = ROOT / "tests" / "kernels" / "sass_budget.json"
NUM_PROCESSES = 2

# True: more is better.
FIGURES = {
    "registers": False,
    "spilled": False,
    "shared": False,
    "programs_per_sm": True,
    "instructions": False,
    "per_1000_weights": False,
    "wide_loads": True,
    "shared_loads": False,
    "barriers": False,
}
Figures = Mapping[str, int]


# torch → the Triton that its CUDA builds require.
TRITON_OF_TORCH = {"2.11": "3.6.0", "2.12": "3.7.0", "2.13": "3.7.1"}


def run(program: str, *arguments: str, triton_folder: Path | None = None) -> str:
    """Run a compiling program in its own process, because Triton may run its interpreter in this one.

    Args:
        triton_folder: folder of another Triton; None: the installed one.

    Raises:
        RuntimeError: it failed.
    """
    path = os.environ.get("PYTHONPATH")
    folders = [str(each) for each in (triton_folder, path) if each]
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, SUPPORT / program, *arguments],
            # An empty folder, so that no earlier compilation is found.
            env=os.environ
            | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(folders)},
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode != 0:
        raise RuntimeError(f"{program} failed:\n{result.stderr[-10_000:]}")
    return result.stdout


def installed_beside(version: str) -> Path:
    """Return the folder of a Triton other than the installed one; install it if missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "neo-desktop" / "triton" / version
    if not (folder / f"triton-{version}.dist-info").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*command, "--target", str(folder), f"triton=={version}"], check=True)
    return folder


def compile_all(triton_folder: Path | None = None, only: str = "") -> list[dict[str, Any]]:
    """Compile every kernel, or variants whose names have an expression; see `compile_kernels.Compiled`."""

    def compile_part(part: int) -> str:
        return run("compile_kernels.py", str(part), str(NUM_PROCESSES), only, triton_folder=triton_folder)

    with ThreadPoolExecutor() as pool:
        outputs = pool.map(compile_part, range(NUM_PROCESSES))
        return [json.loads(line) for output in outputs for line in output.splitlines()]


def table(kernels: list[dict[str, Any]]) -> dict[str, Figures]:
    """Return `variant: kernel on GPU` → figures. Duplicate kernels have equal figures."""
    return {
        f"{kernel['variant']}: {kernel['kernel']} on sm_{kernel['capability']}": {
            figure: kernel[figure] for figure in FIGURES
        }
        for kernel in kernels
    }


def variant_of(name: str) -> str:
    """Return the variant of a name in a table."""
    return name.rpartition(": ")[0]


def worse(budget: Mapping[str, Figures], found: Mapping[str, Figures]) -> list[str]:
    """Return the figures that are worse than the budget, or missing on one side."""
    complaints = [f"{name}: compiled, but not in the budget" for name in found if name not in budget]
    for name, allowed in budget.items():
        if name not in found:
            complaints.append(f"{name}: in the budget, but not compiled")
            continue
        complaints += [
            f"{name}: {figure} {found[name][figure]}, allowed {allowed[figure]}"
            for figure, more_is_better in FIGURES.items()
            if (found[name][figure] < allowed[figure]) == more_is_better
            and found[name][figure] != allowed[figure]
        ]
    return complaints


def read_budget() -> dict[str, dict[str, Figures]]:
    """Return Triton version → `variant: kernel on GPU` → figures."""
    if not BUDGET.exists():
        return {}
    data = json.loads(BUDGET.read_text())
    return {
        version: {name: dict(zip(data["figures"], numbers, strict=True)) for name, numbers in kept.items()}
        for version, kept in data["versions"].items()
    }


def write_budget(budget: Mapping[str, Mapping[str, Figures]]) -> None:
    """Write the budget, one kernel per line."""
    versions = []
    for version, kernels in sorted(budget.items()):
        lines = (
            f"      {json.dumps(name)}: {json.dumps([figures[each] for each in FIGURES])}"
            for name, figures in sorted(kernels.items())
        )
        versions.append(f'    "{version}": {{\n' + ",\n".join(lines) + "\n    }")
    head = f'{{\n  "figures": {json.dumps(list(FIGURES))},\n  "versions": {{\n'
    BUDGET.write_text(head + ",\n".join(versions) + "\n  }\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="let what is compiled now be the budget")
    parser.add_argument("--triton", nargs="+", metavar="VERSION", help="versions; default: the installed one")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help="variants with such names")
    arguments = parser.parse_args()
    budget = read_budget()
    for version in arguments.triton or [triton.__version__]:
        folder = None if version == triton.__version__ else installed_beside(version)
        found = table(compile_all(folder, arguments.only))
        chosen = {
            k: v for k, v in budget.get(version, {}).items() if re.search(arguments.only, variant_of(k))
        }
        print(f"Triton {version}")
        if version in budget:
            print("\n".join(worse(chosen, found)) or "nothing is worse than its budget")
        else:
            print(f"the budget has no figures of it, but of {', '.join(budget)}: --write adds them")
        if arguments.write:
            others = {k: v for k, v in budget.get(version, {}).items() if k not in chosen}
            budget[version] = others | found
            write_budget(budget)


if __name__ == "__main__":
    main()
