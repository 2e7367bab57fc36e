"""The files of a model on Hugging Face's hub: listing them, and downloading one.

`huggingface_hub.snapshot_download` keeps nothing of a file that was interrupted, and compares only its size.
Here a download resumes, also in another run of the program, and its digest is compared.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from neo_desktop.app.words import error_text

CHUNK_BYTES = 1 << 20
TRIES = 4  # of a file without a new byte
PAUSE_S = 1.0  # before each try


class PullError(RuntimeError):
    """A model could not be brought here; the message says why."""


class PullStoppedError(PullError):
    """A person stopped it."""


@dataclass(frozen=True, slots=True)
class HubFile:
    repository: str
    revision: str
    name: str  # with its folders
    size_bytes: int
    digest: str  # SHA-256 of what is large; of other files, git's
    is_large: bool

    def is_in(self, folder: Path) -> bool:
        """True if the folder holds the same content."""
        path = folder / self.name
        return path.is_file() and path.stat().st_size == self.size_bytes and self.is_content_of(path)

    def is_content_of(self, path: Path) -> bool:
        digest = hashlib.sha256()
        if not self.is_large:
            digest = hashlib.sha1(b"blob %d\0" % self.size_bytes, usedforsecurity=False)
        with path.open("rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest() == self.digest

    def part(self, folder: Path) -> Path:
        """Return the hidden file in which it grows; another content has another name."""
        return (folder / self.name).with_name(f".{self.digest[:24]}.part")

    def part_bytes(self, folder: Path) -> int:
        part = self.part(folder)
        return part.stat().st_size if part.exists() else 0


def hub_name() -> str:
    """Return the hub's host, which HF_ENDPOINT may change."""
    from huggingface_hub import constants  # noqa: PLC0415 - takes a while

    return constants.ENDPOINT.partition("://")[2] or constants.ENDPOINT


def list_files(repository: str) -> list[HubFile]:
    """Ask the hub. Raises PullError without the repository or a connection."""
    from huggingface_hub import HfApi  # noqa: PLC0415

    with explained(repository):
        info = HfApi().model_info(repository, files_metadata=True)
    return [
        HubFile(
            repository,
            str(info.sha),
            file.rfilename,
            int(file.size or 0),
            file.lfs.sha256 if file.lfs else str(file.blob_id),
            file.lfs is not None,
        )
        for file in info.siblings or []
        if _is_plain(file.rfilename)
    ]


def fetch(file: HubFile, folder: Path, arrived: Callable[[int], None], stopped: threading.Event) -> None:
    """Download a file, from what an earlier call left; PullError.

    `arrived` gets the number of bytes so far, and may raise; `stopped` ends the pauses between tries.
    """
    part = file.part(folder)
    part.parent.mkdir(parents=True, exist_ok=True)
    left = TRIES
    with explained(file.repository), part.open("ab") as opened:
        while opened.tell() < file.size_bytes:
            before = opened.tell()
            arrived(before)
            try:
                _stream(file, opened, arrived)
            except Exception as error:
                left = TRIES if opened.tell() > before else left - 1
                if not _is_connection(error) or not left:
                    raise
                stopped.wait(PAUSE_S)
    if not file.is_content_of(part):
        part.unlink()
        raise PullError(f"{file.name} arrived damaged, and was thrown away: try again")
    part.replace(folder / file.name)


def _stream(file: HubFile, opened: BinaryIO, arrived: Callable[[int], None]) -> None:
    from huggingface_hub import constants, get_session, hf_hub_url  # noqa: PLC0415
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # noqa: PLC0415
        build_hf_headers,
        hf_raise_for_status,
    )

    url = hf_hub_url(file.repository, file.name, revision=file.revision, endpoint=constants.ENDPOINT)
    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={opened.tell()}-"}
    with get_session().stream(
        "GET", url, headers=headers, follow_redirects=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    ) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:  # the server ignores the range and sends the whole file
            opened.truncate(0)
        for chunk in response.iter_bytes():  # as the bytes come: a cut loses no byte
            opened.write(chunk)
            opened.flush()
            arrived(opened.tell())


def _is_plain(name: str) -> bool:
    """True for a name that stays in the folder, and names no hidden file."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not any(
        part.startswith((".", "/")) or "\\" in part or ":" in part for part in parts
    )


def _is_connection(error: Exception) -> bool:
    # The hub's HTTP library has not always been the same one; each calls it that.
    names = {each.__name__ for each in type(error).__mro__}
    return isinstance(error, ConnectionError) or "TransportError" in names


@contextmanager
def explained(repository: str) -> Iterator[None]:
    """Say in a sentence what the hub's programs raise."""
    from huggingface_hub import errors  # noqa: PLC0415

    host = hub_name()
    try:
        yield
        return
    except PullError:
        raise
    except errors.OfflineModeIsEnabled:
        reason = f"is not here, and HF_HUB_OFFLINE forbids to ask {host}: unset it to download models"
    except errors.GatedRepoError:
        reason = f"needs its licence accepted: do that on {host}/{repository}, then run 'hf auth login'"
    except errors.RepositoryNotFoundError:
        reason = f"is not on {host}, or it is private: look at the name"
    except Exception as error:
        if _is_connection(error):
            raise PullError(
                f"{host} cannot be reached: check the connection. The files that have arrived are kept"
            ) from None
        # The hub's errors are OSErrors; only the system's have a number.
        is_systems = isinstance(error, OSError) and error.errno is not None
        what = error_text(error).partition("\n")[0]
        reason = f"could not be {'written' if is_systems else 'downloaded'}: {what}"
    raise PullError(f"{repository} {reason}")
