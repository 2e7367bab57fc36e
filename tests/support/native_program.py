"""Builds and runs the core's own test program (native/tests), without Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parents[2] / "native"


def _tool(name: str) -> str | None:
    """Return the path of a command, from the virtual environment or else the system."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def find_compiler(*names: str) -> str:
    """Return the first available C++ compiler; skip the test if none is."""
    for name in names:
        if compiler := shutil.which(name):
            return compiler
    pytest.skip(f"needs a C++ compiler: {' or '.join(names)}")


def can_compile(compiler: str, folder: Path, *flags: str) -> bool:
    """True if an empty program builds with these flags."""
    source = folder / "nothing.cpp"
    source.write_text("int main() {}\n")
    command = [compiler, *flags, str(source), "-o", str(folder / "nothing")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def build(folder: Path, compiler: str, flags: str, *cmake_arguments: str) -> Path:
    """Build the test program in `folder` with these flags and return it; skip the test without cmake."""
    cmake, ninja = _tool("cmake"), _tool("ninja")
    if cmake is None:
        pytest.skip("needs cmake")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    _run(
        [cmake, "-S", str(_SOURCE), "-B", str(folder), *generator],
        "-DNEO_DESKTOP_NATIVE_TESTS=ON",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CXX_COMPILER={compiler}",
        f"-DCMAKE_CXX_FLAGS_RELEASE={flags}",
        *cmake_arguments,
    )
    _run([cmake, "--build", str(folder), "--parallel", str(os.cpu_count() or 1)])
    return folder / "neo_desktop_native_tests"


def run(command: list[str | Path], environment: dict[str, str] | None = None) -> str:
    """Return the program's output; fail the test with the output if the program fails."""
    return _run([str(part) for part in command], environment=environment)


def _run(command: list[str], *arguments: str, environment: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | (environment or {}),
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        pytest.fail(f"{command[0]} ended with {result.returncode}:\n{result.stdout[-10_000:]}", pytrace=False)
    return result.stdout
