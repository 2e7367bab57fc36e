"""The native core, built with sanitizers, solves random problems without bad accesses or data races."""

import shutil
import subprocess
from pathlib import Path

import native_program
import pytest

# -Og: the kernels are large templates, and with these sanitizers -O1 takes three times as long to build.
_FLAGS = "-Og -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all"
_OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1",  # the thread pool's jobs live on stacks
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def _without_random_addresses() -> list[str]:
    """Return a command prefix that turns address randomisation off, if the system allows it.

    Some systems randomise addresses more than the thread sanitizer of older compilers supports.
    """
    prefix = ["setarch", "-R"]
    if shutil.which("setarch") is None:
        return []
    allowed = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    return prefix if allowed else []


@pytest.mark.sample(0)
@pytest.mark.timeout(1200)  # it builds the core first
@pytest.mark.parametrize(("sanitizers", "cases"), [("address,undefined", 50), ("thread", 15)])
def test_random_problems(tmp_path: Path, sanitizers: str, cases: int) -> None:
    compiler = native_program.find_compiler("c++", "g++", "clang++")
    sanitize = f"-fsanitize={sanitizers}"
    if not native_program.can_compile(compiler, tmp_path, sanitize):
        pytest.skip(f"{compiler} cannot build with {sanitize}")
    # The imitation of AMX needs no AMX, and unlike the real one it is visible to sanitizers.
    imitate = "-DNEO_DESKTOP_IMITATE_AMX=ON"
    program = native_program.build(tmp_path / "build", compiler, f"{_FLAGS} {sanitize}", imitate)
    output = native_program.run([*_without_random_addresses(), program, str(cases)], _OPTIONS)
    assert "failures: 0" in output
