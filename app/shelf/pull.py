"""Bringing models from Hugging Face's hub to this computer, and taking them away again."""

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neo_desktop.app.shelf.catalogue import own_folder
from neo_desktop.engine.progress import Progress
from neo_desktop.models.gguf.checkpoint import split_files

WANTED = ["*.json", "*.safetensors", "LICENSE*"]  # no code, no pickles
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
SPARE_BYTES = 1 << 30  # that a download leaves free


class PullError(RuntimeError):
    """A model that could not be brought here; the message says why."""


class PullStoppedError(PullError):
    """Somebody stopped it; what has arrived is kept, and the next time goes on from there."""


def pull(name: str, progress: Progress, stopped: threading.Event | None = None) -> Path:
    """Download a model into this program's folder; what has arrived of it before is kept.

    Args:
        name: ORGANISATION/NAME.
        progress: told the share of the bytes.
        stopped: set by another thread to end the download.

    Raises:
        PullError: there is no such model, no connection, or no room.
    """
    # Loading it takes a while, and who never downloads does without.
    from huggingface_hub import hf_hub_download, snapshot_download  # noqa: PLC0415

    if not NAME.fullmatch(name):
        raise PullError(f"{name!r} is no model's name: write ORGANISATION/NAME, as on huggingface.co")
    folder = own_folder().joinpath(*name.split("/"))
    progress(0.0, "Asking huggingface.co")
    with _explained(name):
        files: Any = snapshot_download(name, local_dir=folder, allow_patterns=WANTED, dry_run=True)
    sizes = {file.filename: int(file.file_size) for file in files if file.will_download}
    # Weights in a folder of their own are another program's.
    wanted = {file.filename for file in files if "/" not in file.filename}
    if not any(file.endswith(".safetensors") for file in wanted):
        raise PullError(f"{name} has no safetensors files, and others cannot be run: choose another model")
    total = sum(size for file, size in sizes.items() if file in wanted)
    _check_room(folder, total)
    done = 0
    stopped = stopped or threading.Event()
    for file in sorted(wanted & sizes.keys(), key=lambda file: sizes[file]):
        start = done

        def arrived(num_bytes: int, start: int = start, file: str = file) -> None:
            if stopped.is_set():
                raise PullStoppedError(f"the download of {name} was stopped: what has arrived is kept")
            progress(min((start + num_bytes) / max(total, 1), 1.0), file)

        arrived(0)
        with _explained(name):
            hf_hub_download(name, file, local_dir=folder, tqdm_class=_reporting(arrived))
        done += sizes[file]
    progress(1.0, "Done")
    return folder


def check_removable(path: Path) -> None:
    """Check that a model was pulled by this program. Raises PullError where it was not."""
    top, real = own_folder().resolve(), path.resolve()
    # A link is another folder's: following it would delete what is not ours.
    if path.is_symlink() or not real.is_relative_to(top) or real == top:
        raise PullError(
            f"{path} is not in {own_folder()}, where pulled models are: delete it yourself, if you want"
        )


def remove(path: Path) -> None:
    """Delete a model that was pulled, a folder or a file. Raises PullError where it was not."""
    check_removable(path)
    real = path.resolve()
    if real.is_file():
        for part in split_files(real):
            part.unlink(missing_ok=True)
    else:
        shutil.rmtree(real)
    if real.parent != own_folder().resolve() and not any(real.parent.iterdir()):
        real.parent.rmdir()


def _check_room(folder: Path, needed: int) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed + SPARE_BYTES > free:
        raise PullError(
            f"{needed / 1e9:.1f} GB are to be downloaded, but only {free / 1e9:.1f} GB are free on the disk "
            f"of {existing}: make room, or name another folder in NEO_DESKTOP_DATA"
        )


def _reporting(arrived: Callable[[int], None]) -> Any:
    """A progress bar of the hub's kind that shows nothing and tells how many bytes there are."""
    from tqdm.auto import tqdm  # noqa: PLC0415

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)  # the hub's own
            super().__init__(*arguments, **options | {"disable": True})
            self.n = options.get("initial") or 0

        def update(self, n: float | None = 1) -> bool | None:
            self.n += int(n or 0)
            arrived(self.n)
            return None

    return Reporting


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Say in a sentence what the hub's programs raise."""
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        yield
    except PullError:
        raise
    except errors.GatedRepoError:
        raise PullError(
            f"{name} is given to those who agreed to its licence: do that on huggingface.co/{name}, then run "
            "'hf auth login'"
        ) from None
    except errors.RepositoryNotFoundError:
        raise PullError(f"there is no model {name} on huggingface.co, or it is private") from None
    except OSError as error:  # no connection, and all that comes of it
        if error.errno is not None and not isinstance(error, ConnectionError):
            raise PullError(f"{name} could not be written: {error.strerror or error}") from None
        raise PullError("huggingface.co cannot be reached: check the connection") from None
    except Exception as error:
        if isinstance(error.__cause__, PullError):
            raise error.__cause__ from None
        text = str(error).strip().splitlines()
        raise PullError(
            f"{name} could not be downloaded: {text[0] if text else type(error).__name__}"
        ) from None
