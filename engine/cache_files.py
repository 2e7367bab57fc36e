"""JSON files about this computer in the user's cache folder, written atomically."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "NEO_DESKTOP_CACHE"  # environment variable for another folder

Key = Mapping[str, Any]  # plain JSON values on which a file's content depends


def cache_folder(name: str) -> Path:
    """Return a folder for one kind of files, in the user's cache or under NEO_DESKTOP_CACHE."""
    named = os.environ.get(CACHE_VARIABLE)
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(named) if named else Path(users, "neo-desktop")).expanduser() / name


def digest(key: Key) -> str:
    """Return a short hash of a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a file; None if it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def write_json(path: Path, data: Mapping[str, Any], trouble: str) -> bool:
    """Write a file atomically, and its folder; return False, with a warning, if that fails.

    Args:
        trouble: consequence of a failure, for the warning.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Each process writes its own temporary file; the last rename wins.
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(json.dumps(data, indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s: %s; set %s to a writable folder", trouble, error, CACHE_VARIABLE)
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        return False
    return True
