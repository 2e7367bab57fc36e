"""Messages for a GPU that torch cannot use: the cause and the remedy."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from neo_desktop.engine import fallbacks
from neo_desktop.engine.cuda import presence
from neo_desktop.engine.cuda.presence import Card, Facts, look, why_unusable
from neo_desktop.engine.fallbacks import is_wsl

_FINE = Facts(
    torch_version="2.13.0",
    torch_cuda="13.0",
    torch_architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_120", "compute_120"),
    cards=(Card("RTX 3060", (8, 6)),),
    nvml_error=None,
    driver="580.65.06",
    is_on_bus=True,
)
_NO_GPU = replace(_FINE, cards=(), is_on_bus=False, driver=None, nvml_error=12, has_devices=False)
_SILENT = replace(_FINE, cards=())  # a card on the bus that the driver does not list
_WSL = replace(
    _FINE, is_wsl=True, is_on_bus=False, wsl_passes_gpu=True, has_wsl_library=True, has_devices=False
)


@pytest.mark.parametrize(
    "facts",
    [
        _FINE,
        _NO_GPU,
        replace(_NO_GPU, torch_cuda=None, torch_architectures=()),
        _WSL,
        replace(_WSL, cards=(), driver=None, nvml_error=12, wsl_passes_gpu=False, has_wsl_library=False),
        replace(_FINE, torch_cuda="12.8", driver="535.54.03"),  # CUDA 12 builds run with any CUDA 12 driver
        replace(_FINE, cards=(Card("A card to come", (13, 0)),)),  # the driver compiles for it
        replace(_FINE, cards=(Card("GTX 1060", (6, 1)), Card("RTX 3060", (8, 6)))),
        replace(_FINE, cards=(Card("RTX 4090", (8, 9)),)),  # runs 8.6 binaries
        replace(_FINE, visible="0"),
    ],
)
def test_where_nothing_is_wrong_nothing_is_said(facts: Facts) -> None:
    assert why_unusable(facts) is None


@pytest.mark.parametrize(
    ("facts", "reason", "command"),
    [
        (
            replace(_SILENT, driver=None, nvml_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND),
            "no NVIDIA driver is installed",
            "nvidia.com/drivers",
        ),
        (
            replace(_SILENT, driver=None, nvml_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
            "installed but not loaded",
            "sudo modprobe nvidia",
        ),
        (
            replace(_SILENT, nvml_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
            r"old version \(580.65.06\) is still running",
            "sudo reboot",
        ),
        (
            replace(_SILENT, nvml_error=pynvml.NVML_ERROR_NO_PERMISSION, closed_devices=("/dev/nvidiactl",)),
            "you may not open /dev/nvidiactl",
            r"sudo chmod a\+rw /dev/nvidiactl",
        ),
        (
            replace(_SILENT, nvml_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, has_devices=False),
            "container",
            "docker run --gpus all",
        ),
        (replace(_FINE, visible="-1"), "hides all GPUs", "unset CUDA_VISIBLE_DEVICES"),
        (
            replace(_FINE, torch_version="2.13.0+cpu", torch_cuda=None, torch_architectures=()),
            r"torch 2.13.0\+cpu is built for the CPU only",
            "-m pip install --force-reinstall 'torch",
        ),
        (
            replace(_FINE, driver="535.183.01"),
            "wants driver 580 or newer, and 535.183.01 is installed",
            "nvidia.com/drivers",
        ),
        (
            replace(_WSL, driver="535.54.03"),
            "wants driver 580 or newer",
            "in Windows, then run there: wsl --update && wsl --shutdown",
        ),
        (
            replace(_FINE, cards=(Card("GTX 1060", (6, 1)),)),
            r"no code for its compute capability 6.1",
            "--index-url",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_command_that_mends_it(
    facts: Facts, reason: str, command: str
) -> None:
    why = why_unusable(facts)
    assert why is not None
    assert why.startswith("This computer has ")
    for pattern in (reason, command):
        assert re.search(pattern, why), why


def test_a_gpu_that_windows_lends_without_its_library_is_told_of() -> None:
    why = why_unusable(replace(_WSL, cards=(), driver=None, nvml_error=12, has_wsl_library=False))
    assert why is not None
    assert "WSL2" in why
    assert "wsl --update" in why


def test_the_bus_is_looked_at_without_a_driver(tmp_path: Path) -> None:
    for name, vendor, kind in (("a", "0x8086", "0x030000"), ("b", "0x10de", "0x040300")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert not presence._is_on_bus(tmp_path)  # another vendor's graphics, and NVIDIA's sound device
    (tmp_path / "b" / "class").write_text("0x030200\n")
    assert presence._is_on_bus(tmp_path)
    assert not presence._is_on_bus(tmp_path / "nothing")


def test_wsl2_is_known_by_its_kernel(tmp_path: Path) -> None:
    release = tmp_path / "osrelease"
    for text, expected in (("6.1.0-13-amd64\n", False), ("5.15.153.1-microsoft-standard-WSL2\n", True)):
        release.write_text(text)
        is_wsl.cache_clear()
        assert is_wsl(release) is expected
    is_wsl.cache_clear()
    assert not is_wsl(tmp_path / "nothing")


def test_on_wsl2_the_log_says_where_to_read_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for inside in (False, True):
        monkeypatch.setattr(fallbacks, "is_wsl", lambda inside=inside: inside)
        caplog.clear()
        fallbacks.Fallbacks().limit("host_memory", "pageable", "the driver refused it")
        assert ("docs/wsl2.md" in caplog.text) is inside


def test_looking_does_not_touch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        pytest.fail("CUDA was used")

    for name in ("init", "_lazy_init", "is_available", "device_count", "get_device_properties"):
        monkeypatch.setattr(f"torch.cuda.{name}", refuse)
    why_unusable(look())
