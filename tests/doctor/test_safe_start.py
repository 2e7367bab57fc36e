"""A start that ended its process makes the next start more careful."""

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from neo_desktop.engine.doctor import safe_start
from neo_desktop.engine.doctor.safe_start import begin_start, careful_levels, forgive, start_in_full, steps
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.fallbacks import MECHANISMS, Fallbacks, fallbacks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DYING = """
import os, sys, torch
from neo_desktop.engine.doctor.safe_start import begin_start
begin_start(torch.device("cpu"))
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path))
    return tmp_path / "starts"


@pytest.fixture(autouse=True)
def _own_fallbacks() -> Iterator[None]:
    with fallbacks.at_levels({}):
        yield


def begun() -> subprocess.Popen[bytes]:
    """Return a process in the middle of a start."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", DYING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    return process


def killed_start() -> None:
    process = begun()
    process.kill()
    process.communicate()


def test_a_start_that_ends_well_leaves_nothing(folder: Path) -> None:
    for _ in range(2):
        with safe_start.safe_start(CPU):
            assert len(list(folder.iterdir())) == 1
    assert not list(folder.iterdir())
    assert not fallbacks.limits()


def test_a_killed_start_makes_the_next_one_careful(caplog: pytest.LogCaptureFixture) -> None:
    killed_start()
    with caplog.at_level(logging.WARNING), safe_start.safe_start(CPU):
        assert fallbacks.limits().items() >= {"huge_pages": "small", "affinity": "free"}.items()
    (line,) = caplog.messages
    assert "neo-desktop doctor --refresh" in line
    assert "pages of the usual size" in line


def test_a_careful_start_that_is_killed_makes_the_next_one_more_careful() -> None:
    killed_start()
    killed_start()
    with safe_start.safe_start(CPU):
        assert fallbacks.level("isa") == MECHANISMS["isa"].levels[-1].name
    killed_start()  # no lower level exists
    with safe_start.safe_start(CPU):
        pass


def limits_of_a_start(device: torch.device = CPU) -> dict[str, str]:
    with fallbacks.at_levels({}), safe_start.safe_start(device):
        return dict(fallbacks.limits())


def crashed_start(device: torch.device = CPU) -> None:
    with fallbacks.at_levels({}):
        begin_start(device).crash()


def test_one_start_that_ended_its_process_may_have_had_other_reasons() -> None:
    killed_start()
    assert limits_of_a_start()
    assert not limits_of_a_start()
    assert not limits_of_a_start()


def test_care_is_kept_after_the_second_time_until_it_is_forgotten() -> None:
    killed_start()
    limits_of_a_start()
    killed_start()  # the second death of a start in full
    for _ in range(3):
        assert limits_of_a_start() == careful_levels("cpu", 1)
    start_in_full()
    assert not limits_of_a_start()


def test_a_process_that_was_ended_on_purpose_is_forgiven() -> None:
    process = begun()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    forgive(process.pid)
    with safe_start.safe_start(CPU):
        assert not fallbacks.limits()


@pytest.mark.parametrize(("code", "is_careful"), [(700, True), (2, False)])
def test_a_gpu_left_unusable_counts_as_a_crash_and_full_memory_does_not(code: int, is_careful: bool) -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    error.error_code = code  # type: ignore[attr-defined]
    with pytest.raises(torch.AcceleratorError), safe_start.safe_start(CPU):
        raise error
    with safe_start.safe_start(CPU):
        assert bool(fallbacks.limits()) is is_careful


def test_a_folder_that_cannot_be_written_to_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path / "file"))
    with safe_start.safe_start(CPU):
        pass


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_steps_only_lead_down_and_end_at_the_lowest(device_type: str) -> None:
    descending = Fallbacks()
    for step in steps(device_type):
        for mechanism, level in step.items():
            descending.limit(mechanism, level, "a step", is_told=True)
            assert descending.level(mechanism) == level
    for name, each in MECHANISMS.items():
        if device_type == "cuda" or not each.is_for_gpu:
            assert descending.level(name) == each.levels[-1].name


def test_on_a_gpu_graphs_come_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    properties = SimpleNamespace(name="Card", major=7, minor=5, total_memory=1 << 34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    crashed_start(CUDA)
    assert limits_of_a_start(CUDA) == {"graphs": "device-only"}
    for _ in range(len(steps("cuda")) + 1):
        crashed_start(CUDA)
    with safe_start.safe_start(CUDA):
        assert fallbacks.level("paged_decode") == "torch"
    assert "--device cpu" in caplog.messages[-1]
    with fallbacks.at_levels({}), safe_start.safe_start(CPU):  # another device
        pass


def test_an_engine_that_is_killed_while_it_is_built_makes_the_next_careful(folder: Path) -> None:
    program = """
import os, signal
from neo_desktop import Engine
import neo_desktop.engine.engine as module
module.set_up = lambda *a, **k: os.kill(os.getpid(), signal.SIGSEGV)
Engine.from_pretrained(shape="tiny", device="cpu")
"""
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == -signal.SIGSEGV
    assert len(list(folder.glob("*.mark"))) == 1
    with Engine.from_pretrained(
        shape="tiny", policy="gpu-only", device="cpu", gpu_cache_tokens=256
    ) as engine:
        assert fallbacks.limits()
        assert engine.stats().num_iterations == 0
    assert not list(folder.glob("*.mark"))
