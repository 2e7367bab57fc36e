"""Keys of verdicts, without private data."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from neo_desktop import __version__, native
from neo_desktop.engine.profiling import hardware

CANNOT_KEEP = "the results of checks on this computer cannot be saved"


def machine_key(device: torch.device) -> dict[str, Any]:
    """Return the hardware and versions that decide what works; nothing identifies the owner."""
    gpu = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "driver": hardware.driver_version(),
        }
    return {
        "neo_desktop": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "gpu": gpu,
        "cpu": hardware.cpu_name(),
        "isas": list(native.available_isas()),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
