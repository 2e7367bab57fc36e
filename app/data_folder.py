"""The folder of the user's data: chats, models, reports."""

import os
from pathlib import Path

import platformdirs

DATA_VARIABLE = "NEO_DESKTOP_DATA"  # environment variable that moves the folder


def data_folder() -> Path:
    """Return the folder, whether it exists or not."""
    named = os.environ.get(DATA_VARIABLE)
    return Path(named).expanduser() if named else platformdirs.user_data_path("neo-desktop")
