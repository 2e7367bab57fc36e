"""Detection of Linux inside Windows (WSL2), where the driver refuses more operations."""

from functools import cache
from pathlib import Path

_RELEASE = Path("/proc/sys/kernel/osrelease")


@cache
def is_wsl(release: Path = _RELEASE) -> bool:
    """Return True under WSL2, by the kernel's name."""
    try:
        return "microsoft" in release.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False
