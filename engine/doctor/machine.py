"""What a verdict belongs to, without anything that is private, and files that belong to it."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from neo_desktop import __version__, native
from neo_desktop.engine.profiling import hardware
from neo_desktop.engine.profiling.profile_cache import CACHE_VARIABLE, cache_folder

logger = logging.getLogger(__name__)

Key = Mapping[str, Any]  # plain JSON values


def machine_key(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions that decide what works; nothing of it tells whose computer this is."""
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


def digest(key: Key) -> str:
    """Return a short name for a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def folder(name: str) -> Path:
    """Return a folder beside the profiles; see `profile_cache.cache_folder`."""
    return cache_folder().parent / name


def read_json(path: Path) -> dict[str, Any] | None:
    """Return what a file holds; None where there is none, or where it is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def write_json(path: Path, data: Mapping[str, Any]) -> bool:
    """Write a file, all or nothing; a folder that cannot be written to is only worth a warning."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(json.dumps(data, indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        logger.warning(
            "what was found out about this computer cannot be kept: %s; set %s to a folder that can be "
            "written to",
            error,
            CACHE_VARIABLE,
        )
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        return False
    return True


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
