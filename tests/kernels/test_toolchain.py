"""Triton's requirements are checked in advance, and an error says what to install."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import toolchain


@pytest.fixture(autouse=True)
def _for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CC", raising=False)
    toolchain._compiler_obstacle.cache_clear()
    yield
    toolchain._compiler_obstacle.cache_clear()


def test_a_computer_that_compiled_this_project_has_what_triton_needs() -> None:
    assert toolchain.find_obstacle() is None
    toolchain.limit_kernels()
    assert not fallbacks.limits()


def test_without_a_compiler_torch_serves_and_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):
        toolchain.limit_kernels()
    assert fallbacks.limits() == dict.fromkeys(toolchain.KERNELS, "torch")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "neither gcc nor clang" in line
    assert "sudo apt install gcc" in line


def test_without_pythons_headers_torch_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "_include_folder", lambda: str(tmp_path))
    toolchain.limit_kernels()
    (reason,) = {s.reason for s in fallbacks.states() if s.level.name == "torch"}
    assert reason is not None
    assert f"{tmp_path}/Python.h" in reason
    assert f"python{sys.version_info.major}.{sys.version_info.minor}-dev" in reason


@pytest.mark.parametrize("compiler", ["/bin/false", "/nowhere/cc"])
def test_a_compiler_that_does_not_work_is_found_out(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    obstacle = toolchain.find_obstacle()
    assert obstacle is not None
    assert f"{compiler} fails" in obstacle


def test_headers_that_are_broken_are_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A partly installed package: the header exists, but a header it includes does not."""
    (tmp_path / "Python.h").write_text("#include <not-installed.h>\n")
    monkeypatch.setattr(toolchain, "_include_folder", lambda: str(tmp_path))
    obstacle = toolchain.find_obstacle()
    assert obstacle is not None
    assert "not-installed.h" in obstacle


def test_whoever_asks_for_torch_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fallbacks.put(dict.fromkeys(toolchain.KERNELS, "torch"))
    monkeypatch.setattr(toolchain, "find_obstacle", lambda: pytest.fail("was looked for"))
    toolchain.limit_kernels()
