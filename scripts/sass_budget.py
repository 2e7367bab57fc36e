"""What the compiler makes of the Triton kernels for every GPU, without one; `--write` keeps it as the budget.

    python -m scripts.sass_budget             compile, print what differs from the budget
    python -m scripts.sass_budget --write     ... and let it be the budget from now on

tests/kernels/test_compile.py fails where a figure has become worse. Needs the `dev` extra; takes a minute.
"""

import argparse
import json
import os
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

# Of each: whether more is better.
FIGURES = {
    "registers": False,
    "spilled": False,
    "shared": False,
    "programs_per_sm": True,
    "instructions": False,
    "wide_loads": True,
    "shared_loads": False,
    "barriers": False,
}
Figures = Mapping[str, int]


def run(program: str, *arguments: str) -> str:
    """Run a program that compiles, in a process of its own: in this one Triton may be in its interpreter.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, SUPPORT / program, *arguments],
            # An empty folder, since what an earlier run compiled would be found again.
            env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode != 0:
        raise RuntimeError(f"{program} failed:\n{result.stderr[-10_000:]}")
    return result.stdout


def compile_all() -> list[dict[str, Any]]:
    """Return what the compiler makes of every kernel; see `compile_kernels.Compiled`."""
    with ThreadPoolExecutor() as pool:
        outputs = pool.map(
            lambda part: run("compile_kernels.py", str(part), str(NUM_PROCESSES)), range(NUM_PROCESSES)
        )
        return [json.loads(line) for output in outputs for line in output.splitlines()]


def table(kernels: list[dict[str, Any]]) -> dict[str, Figures]:
    """Return `variant: kernel on GPU -> figures`; of a kernel that is there twice, the same."""
    return {
        f"{kernel['variant']}: {kernel['kernel']} on sm_{kernel['capability']}": {
            figure: kernel[figure] for figure in FIGURES
        }
        for kernel in kernels
    }


def worse(budget: Mapping[str, Figures], found: Mapping[str, Figures]) -> list[str]:
    """Say what has become worse than its budget, or is in one of the two only."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="let what is compiled now be the budget")
    arguments = parser.parse_args()
    found = table(compile_all())
    kept = json.loads(BUDGET.read_text()) if BUDGET.exists() else {"triton": None, "kernels": {}}
    print(f"Triton {triton.__version__}; the budget is of {kept['triton']}")
    print("\n".join(worse(kept["kernels"], found)) or "nothing is worse than its budget")
    if arguments.write:
        lines = ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(figures)}" for name, figures in sorted(found.items())
        )
        BUDGET.write_text(f'{{\n  "triton": "{triton.__version__}",\n  "kernels": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    main()
