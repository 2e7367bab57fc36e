"""Linux inside Windows (WSL2), where the driver refuses more than elsewhere."""

from functools import cache
from pathlib import Path

_RELEASE = Path("/proc/sys/kernel/osrelease")


@cache
def is_wsl(release: Path = _RELEASE) -> bool:
    """Whether this is WSL2: its kernel's name says so."""
    try:
        return "microsoft" in release.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False
