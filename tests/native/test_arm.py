"""The native core for ARM, built with a cross compiler, solves random problems on an emulated processor."""

import shutil
from pathlib import Path

import native_program
import pytest

_COMPILER = "aarch64-linux-gnu-g++"
_LIBRARIES = "/usr/aarch64-linux-gnu"


@pytest.fixture(scope="module")
def emulator() -> str:
    """The emulator's command; scripts/test installs both programs, as root on Debian and its relatives."""
    path = shutil.which("qemu-aarch64")
    if path is None:
        pytest.skip("needs qemu-aarch64 (Debian, Ubuntu: apt install qemu-user g++-aarch64-linux-gnu)")
    return path


@pytest.fixture(scope="module")
def program(emulator: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_program.build(
        tmp_path_factory.mktemp("arm"),
        native_program.find_compiler(_COMPILER),
        "-O2",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DNEO_DESKTOP_WERROR=ON",
    )


@pytest.mark.sample(0)
@pytest.mark.timeout(1200)  # includes a build of the core
@pytest.mark.parametrize(
    ("processor", "cases", "isas"),
    [
        ("cortex-a53", 20, "scalar neon"),  # the baseline 64-bit instructions only
        ("max", 40, "scalar neon neon_bf16"),
    ],
)
def test_random_problems(emulator: str, program: Path, processor: str, cases: int, isas: str) -> None:
    output = native_program.run([emulator, "-L", _LIBRARIES, "-cpu", processor, program, str(cases)])
    assert f"isas: {isas};" in output
    assert "failures: 0" in output
