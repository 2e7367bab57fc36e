"""JSON files about this computer, in the user's cache folder: each is written as a whole or not at all."""

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

CACHE_VARIABLE = "NEO_DESKTOP_CACHE"  # environment variable that moves the folder

Key = Mapping[str, Any]  # plain JSON values: what a file's content depends on


def cache_folder(name: str) -> Path:
    """Return a folder for files of one kind, in the user's cache or in what NEO_DESKTOP_CACHE names."""
    named = os.environ.get(CACHE_VARIABLE)
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(named) if named else Path(users, "neo-desktop")).expanduser() / name


def digest(key: Key) -> str:
    """Return a short name for a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def read_json(path: Path) -> dict[str, Any] | None:
    """Return what a file holds; None where there is none, or where it is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def write_json(path: Path, data: Mapping[str, Any], trouble: str) -> bool:
    """Write a file, all or nothing, and return whether that was possible.

    Args:
        path: its folder is made.
        data: plain JSON values.
        trouble: what it means that the file cannot be written. That is only worth a warning.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may write the same file: each writes its own, and the last one to rename wins.
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(json.dumps(data, indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s: %s; set %s to a folder that can be written to", trouble, error, CACHE_VARIABLE)
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        return False
    return True
