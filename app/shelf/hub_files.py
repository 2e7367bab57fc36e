"""The files of a model on Hugging Face's hub: which there are, and fetching one, also in several goes."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from neo_desktop.app.shelf.pull_errors import PullError

CHUNK_BYTES = 1 << 20
TRIES = 4  # to go on with a file of which nothing more has come
PAUSE_S = 1.0  # before each of them


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of one state of a repository."""

    repository: str
    revision: str
    name: str  # with its folders
    size_bytes: int
    digest: str  # SHA-256 of what is large; of other files, git's
    is_large: bool

    def is_in(self, folder: Path) -> bool:
        """Whether it is there already, as it is on the hub."""
        path = folder / self.name
        if not path.is_file() or path.stat().st_size != self.size_bytes:
            return False
        return bool(_read(path, self.new_digest()).hexdigest() == self.digest)

    def part(self, folder: Path) -> Path:
        """Return where it grows: a hidden file of its content's name, since another state is another file."""
        return (folder / self.name).with_name(f".{self.digest[:24]}.part")

    def new_digest(self) -> Any:
        """Return what computes the digest."""
        if self.is_large:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size_bytes, usedforsecurity=False)


def hub_name() -> str:
    """Return how the hub is called: its host, which HF_ENDPOINT may change."""
    from huggingface_hub import constants  # noqa: PLC0415 - takes a while

    return constants.ENDPOINT.partition("://")[2] or constants.ENDPOINT


def list_files(repository: str) -> list[HubFile]:
    """Ask the hub. Raises PullError where there is no such repository, or no connection."""
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
    """Download a file; what an earlier call left of it is kept.

    Args:
        arrived: told how many of its bytes are there; what it raises ends the download.
        stopped: ends the pauses between tries.

    Raises:
        PullError: it cannot be had, or is not what the hub says.
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
    if _read(part, file.new_digest()).hexdigest() != file.digest:
        part.unlink()
        raise PullError(f"{file.name} arrived damaged, and was thrown away: try again")
    part.replace(folder / file.name)


def _stream(file: HubFile, opened: BinaryIO, arrived: Callable[[int], None]) -> None:
    from huggingface_hub import constants, get_session, hf_hub_url  # noqa: PLC0415
    from huggingface_hub.utils._headers import build_hf_headers  # noqa: PLC0415
    from huggingface_hub.utils._http import hf_raise_for_status  # noqa: PLC0415

    url = hf_hub_url(file.repository, file.name, revision=file.revision, endpoint=constants.ENDPOINT)
    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={opened.tell()}-"}
    with get_session().stream(
        "GET", url, headers=headers, follow_redirects=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    ) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:  # it sends all of it, whatever was asked for
            opened.truncate(0)
        for chunk in response.iter_bytes():  # as it comes: of larger pieces a cut would lose the last one
            opened.write(chunk)
            opened.flush()
            arrived(opened.tell())


def _read(path: Path, digest: Any) -> Any:
    with path.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest


def _is_plain(name: str) -> bool:
    """Whether a repository's name for a file leads nowhere else, and to no hidden file."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not any(
        part.startswith((".", "/")) or "\\" in part or ":" in part for part in parts
    )


def _is_connection(error: Exception) -> bool:
    # The hub's HTTP library has not always been the same one; all of them call it that.
    names = {each.__name__ for each in type(error).__mro__}
    return isinstance(error, ConnectionError) or "TransportError" in names


@contextmanager
def explained(repository: str) -> Iterator[None]:
    """Say in a sentence what the hub's programs raise."""
    from huggingface_hub import errors  # noqa: PLC0415

    host = hub_name()
    try:
        yield
    except PullError:
        raise
    except errors.OfflineModeIsEnabled:
        raise PullError(
            f"{repository} is not here, and HF_HUB_OFFLINE forbids to ask {host}: unset it to download models"
        ) from None
    except errors.GatedRepoError:
        raise PullError(
            f"{repository} is given to those who agreed to its licence: do that on {host}/{repository}, then "
            "run 'hf auth login'"
        ) from None
    except errors.RepositoryNotFoundError:
        raise PullError(f"there is no model {repository} on {host}, or it is private") from None
    except OSError as error:
        # The hub's errors are of this kind, too; those of the system have a number.
        if error.errno is not None and not isinstance(error, ConnectionError):
            raise PullError(f"{repository} could not be written: {error.strerror or error}") from None
        if _is_connection(error):
            raise PullError(f"{host} cannot be reached: check the connection") from None
        raise PullError(f"{repository} could not be downloaded: {_first_line(error)}") from None
    except Exception as error:
        if _is_connection(error):
            raise PullError(
                f"{host} cannot be reached: check the connection. What has arrived is kept"
            ) from None
        raise PullError(f"{repository} could not be downloaded: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
