"""Diagnosis of an NVIDIA GPU that torch cannot use: the cause, and the command that fixes it.

Nothing here touches CUDA, so that the caller can still fork and start the engine in a process of its own.
NVML reports on the driver, files report on the system.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pynvml
import torch

from neo_desktop.engine.fallbacks import is_wsl

# CUDA major version -> oldest driver for a torch built for it ("Minor Version Compatibility" in NVIDIA's
# "CUDA Compatibility").
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
_TORCH = "torch>=2.11,<2.14"  # the range in pyproject.toml


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as the driver names it."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about this computer's GPUs, driver and torch."""

    torch_version: str
    torch_cuda: str | None  # CUDA version of torch's build; None: a CPU build
    torch_architectures: Sequence[str]  # "sm_80"; "compute_90" can be compiled for newer GPUs
    cards: Sequence[Card]  # GPUs that the driver lists
    nvml_error: int | None  # NVML's error code; None: the driver answers
    driver: str | None  # version
    is_on_bus: bool  # the PCI bus has an NVIDIA graphics card
    closed_devices: Sequence[str] = ()  # device files that this user may not open
    has_devices: bool = True  # the driver's device files exist
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    is_wsl: bool = False
    wsl_passes_gpu: bool = False
    has_wsl_library: bool = False
    can_install_driver: bool = False  # Ubuntu's ubuntu-drivers is installed


def why_unusable(facts: Facts | None = None) -> str | None:
    """Return the reason why torch cannot use this computer's NVIDIA GPU, and the command that fixes it.

    None: torch can use the GPU, or the computer has no NVIDIA GPU.
    """
    facts = facts or look()
    if facts.is_wsl:
        if not facts.wsl_passes_gpu:
            return None
        if not facts.has_wsl_library:
            return (
                "Windows lends this Linux (WSL2) a GPU, but no NVIDIA driver for it. If the GPU is NVIDIA's, "
                "install its newest driver in Windows, and none in Linux; then run in Windows: "
                "wsl --update && wsl --shutdown"
            )
    elif not facts.cards and not facts.is_on_bus:
        return None
    name = facts.cards[0].name if facts.cards else "an NVIDIA GPU"
    for reason in (_no_driver(facts), _hidden(facts), _unfit_torch(facts), _unfit_card(facts)):
        if reason is not None:
            return f"This computer has {name}, but neo-desktop cannot use it: {reason}"
    return None


def _no_driver(facts: Facts) -> str | None:
    """Return the problem with the driver itself; None: no problem."""
    error = facts.nvml_error
    if error == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return (
            f"the driver was updated while its old version ({facts.driver or 'unknown'}) is still running. "
            "Restart the computer: sudo reboot"
        )
    if facts.closed_devices:
        files = " ".join(facts.closed_devices)
        return f"you may not open {files}. Allow it: sudo chmod a+rw {files}"
    if facts.driver is None and facts.is_on_bus and error is not None:
        if error == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
            return (
                "its driver is installed but not loaded (after an installation: restart; with Secure Boot, "
                "its key must be enrolled). Load it: sudo modprobe nvidia"
            )
        return f"no NVIDIA driver is installed. {_install_driver(facts)}"
    return _silent_driver(facts)


def _silent_driver(facts: Facts) -> str | None:
    """Return the reason why programs cannot reach the running driver; None: they can."""
    error = facts.nvml_error
    if not facts.has_devices and not facts.is_wsl and not facts.cards:
        return (
            "the driver is there, but not the files through which programs reach it, as in a container that "
            "was started without GPUs. Start it with: docker run --gpus all"
        )
    if error is not None and not facts.is_wsl:
        return f"the NVIDIA driver {facts.driver or ''} does not answer (NVML error {error}). See: nvidia-smi"
    return None


def _hidden(facts: Facts) -> str | None:
    if facts.visible is not None and facts.visible.strip() in ("", "-1"):
        return "the variable CUDA_VISIBLE_DEVICES hides all GPUs. Show them: unset CUDA_VISIBLE_DEVICES"
    return None


def _unfit_torch(facts: Facts) -> str | None:
    """Return the mismatch between torch and the driver; None: they match."""
    has = f"torch {facts.torch_version}"
    if facts.torch_cuda is None:
        return f"{has} is built for the CPU only. Install its CUDA build: {_install_torch()}"
    major, driver = int(facts.torch_cuda.split(".")[0]), facts.driver
    wanted = _OLDEST_DRIVERS.get(major)
    if wanted is None or driver is None or not driver.split(".")[0].isdigit():
        return None
    if int(driver.split(".")[0]) >= wanted:
        return None
    return (
        f"{has}, built for CUDA {facts.torch_cuda}, wants driver {wanted} or newer, and {driver} is "
        f"installed. {_install_driver(facts)} (or install a torch built for an older CUDA: see README, CUDA)"
    )


def _unfit_card(facts: Facts) -> str | None:
    """Return the problem if torch's build has code for none of the cards."""
    if not facts.torch_architectures or not facts.cards:
        return None
    if any(_runs(card.capability, facts.torch_architectures) for card in facts.cards):
        return None
    major, minor = facts.cards[0].capability
    return (
        f"torch {facts.torch_version} has no code for its compute capability {major}.{minor} (but for "
        f"{', '.join(facts.torch_architectures)}). Install the build for another CUDA version that "
        f"https://pytorch.org/get-started/locally names: {_install_torch()} --index-url INDEX_FROM_THERE"
    )


def _runs(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return True if a build has code for a card: binary code of its generation, or PTX for the driver."""
    for architecture in architectures:
        kind, _, digits = architecture.rstrip("af").partition("_")
        if not digits.isdigit():
            return True  # unknown notation: leave the check to torch
        built_for = (int(digits[:-1]), int(digits[-1]))
        if built_for <= capability and (kind == "compute" or built_for[0] == capability[0]):
            return True
    return False


def _install_driver(facts: Facts) -> str:
    if facts.is_wsl:
        return "Install the newest NVIDIA driver in Windows, then run there: wsl --update && wsl --shutdown"
    if facts.can_install_driver:
        return "Install the newest one and restart: sudo ubuntu-drivers install"
    return "Install the newest one from https://www.nvidia.com/drivers and restart: sudo reboot"


def _install_torch() -> str:
    return f"{sys.executable} -m pip install --force-reinstall '{_TORCH}'"


def look() -> Facts:
    """Collect the facts from the driver and the system; never fails."""
    driver = _kernel_driver()
    cards: list[Card] = []
    nvml_error: int | None = None
    try:
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
            driver = version.decode() if isinstance(version, bytes) else str(version)
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                name = pynvml.nvmlDeviceGetName(handle)
                major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
                cards.append(Card(name.decode() if isinstance(name, bytes) else str(name), (major, minor)))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        nvml_error = int(error.value)
    devices = [Path("/dev/nvidiactl"), Path("/dev/nvidia0"), Path("/dev/nvidia-uvm")]
    there = [device for device in devices if device.exists()]
    return Facts(
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda,
        torch_architectures=_architectures(),
        cards=cards,
        nvml_error=nvml_error,
        driver=driver,
        is_on_bus=_is_on_bus(),
        closed_devices=[str(device) for device in there if not os.access(device, os.R_OK | os.W_OK)],
        has_devices=bool(there),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        is_wsl=is_wsl(),
        wsl_passes_gpu=Path("/dev/dxg").exists(),
        has_wsl_library=Path("/usr/lib/wsl/lib/libcuda.so.1").exists(),
        can_install_driver=shutil.which("ubuntu-drivers") is not None,
    )


def _architectures() -> Sequence[str]:
    """Return the architectures of torch's build; `torch.cuda.get_arch_list` needs a usable GPU."""
    if torch.version.cuda is None:
        return ()
    flags = torch._C._cuda_getArchFlags()
    return tuple((flags or "").split())


def _kernel_driver() -> str | None:
    """Return the version of the running driver from /proc."""
    words = _text(Path("/proc/driver/nvidia/version")).split()
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)


def _is_on_bus(folder: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Return True if the PCI bus has an NVIDIA display or 3D controller, with or without a driver."""
    try:
        devices = list(folder.iterdir())
    except OSError:
        return False
    return any(
        _text(device / "vendor").strip() == "0x10de" and _text(device / "class").startswith("0x03")
        for device in devices
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
