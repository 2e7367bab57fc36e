"""The models on this computer: the built-in one, and those in a few folders.

    <folder>/NAME/config.json                                   a model called NAME
    <folder>/NAME.gguf, <folder>/NAME/*.gguf                    the same
    <folder>/ORGANISATION/NAME/config.json                      ORGANISATION/NAME
    <hub's cache>/models--ORGANISATION--NAME/snapshots/*/       ORGANISATION/NAME

Names are looked up here and never made into paths.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from neo_desktop.app.data_folder import data_folder
from neo_desktop.app.shelf.checkpoint_summary import LocalModel, summarize
from neo_desktop.engine.loading import BUILTIN_NAME, model_path
from neo_desktop.engine.options import BUILTIN, EngineOptions
from neo_desktop.models.gguf.checkpoint import gguf_files, model_name
from neo_desktop.models.missing import why_missing
from neo_desktop.models.shapes import shape as published_shape

MAX_FOLDERS = 2000  # looked at in one folder of models, however many there are
MAX_MODELS = 500
MAX_DEPTH = 3

Options = TypeVar("Options", bound=EngineOptions)


class UnknownModelError(ValueError):
    """No model on this computer has that name."""


def own_folder() -> Path:
    return data_folder() / "models"


def hub_folder() -> Path:
    """Return where Hugging Face's own programs put theirs."""
    named = os.environ.get("HF_HUB_CACHE")
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(named).expanduser() if named else Path(home).expanduser() / "hub"


class Catalogue:
    """Finds models, anew at each call: folders change.

    Args:
        folders: beside this program's own; None: Hugging Face's.
        model: the one that was asked for at the start, by name, folder or "builtin".
        shape: the published shape that was asked for instead.

    Raises UnknownModelError, ValueError: no model, or no shape, has that name.
    """

    def __init__(
        self, folders: Sequence[Path] | None = None, *, model: str = BUILTIN, shape: str | None = None
    ) -> None:
        self.folders = [own_folder(), hub_folder()] if folders is None else [own_folder(), *folders]
        self._shape = shape
        self._path: Path | None = None
        self.first = BUILTIN_NAME  # the name of the model that was asked for
        if shape is not None:
            published_shape(shape)  # ValueError where there is none
            self.first = f"{shape} (random weights)"
        elif model not in (BUILTIN, BUILTIN_NAME):
            path = model_path(model)
            if model and path.exists():
                self._path = path.absolute()
                self.first = model_name(path) if path.is_file() else path.resolve().name or str(path)
            else:
                self.first = self.get(model).name

    def models(self) -> list[LocalModel]:
        """Return the models, the one that was asked for and the built-in one first."""
        found: dict[str, LocalModel] = {}
        seen: set[Path] = set()
        for name, path in self._candidates():
            real = _real(path)
            if real is None or real in seen:
                continue
            seen.add(real)
            # Two folders may hold models of one name: then the later one's path is its name.
            unique = name if name not in found else str(path)
            found[unique] = replace(summarize(path), name=unique)
            if len(found) >= MAX_MODELS:
                break
        if self._shape is not None:
            found = {self.first: _of_shape(self._shape, self.first)} | found
        return list(found.values())

    def get(self, name: str) -> LocalModel:
        """Return the model of that name; UnknownModelError."""
        models = {model.name: model for model in self.models()}
        wanted = BUILTIN_NAME if name == BUILTIN else name
        if wanted not in models:
            raise UnknownModelError(why_missing(name, list(models)))
        return models[wanted]

    def source(self, name: str) -> str:
        """Return the model of that name, or at that path, in the form of the options; UnknownModelError."""
        path = model_path(name)
        return str(path.absolute()) if name and path.exists() else self.get(name).source

    def _candidates(self) -> Iterator[tuple[str, Path]]:
        if self._path is not None:
            yield self.first, self._path
        yield BUILTIN_NAME, model_path(BUILTIN)
        for folder in self.folders:
            yield from _models_in(folder.expanduser().absolute())


def with_model(options: Options, name: str) -> Options:
    """Return the options for a model of this computer; UnknownModelError where there is none of that name."""
    catalogue = Catalogue(model=name)
    draft = options.draft_model and Path(catalogue.source(str(options.draft_model)))
    return replace(options, model=catalogue.get(catalogue.first).source, draft_model=draft)


def _models_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield names and folders of models, those of the first level first."""
    yield from ((model_name(file), file) for file in gguf_files(folder))
    left = MAX_FOLDERS
    level = [folder]
    for _ in range(MAX_DEPTH):
        below: list[Path] = []
        for parent in level:
            for path in _subfolders(parent):
                left -= 1
                if left < 0:
                    return
                if parent == folder and path.name.startswith("models--"):
                    snapshot = _snapshot(path)
                    if snapshot is not None:
                        yield from _of_one_name("/".join(path.name.split("--")[1:]), snapshot)
                elif _is_model(path):
                    yield from _of_one_name(path.relative_to(folder).as_posix(), path)
                    if gguf_files(path):  # large ones of the same repository have folders of their own
                        below.append(path)
                else:
                    below.append(path)
        level = below


def _of_one_name(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the model of a folder, or those of several GGUF files in it."""
    files = gguf_files(folder)
    if len(files) < 2 or any(folder.glob("*.safetensors")):
        yield name, folder
    else:
        yield from ((f"{name}/{model_name(file)}", file) for file in files)


def _subfolders(path: Path) -> list[Path]:
    with suppress(OSError):
        folders = (entry for entry in path.iterdir() if not entry.name.startswith(".") and entry.is_dir())
        return sorted(islice(folders, MAX_FOLDERS))
    return []


def _is_model(path: Path) -> bool:
    with suppress(OSError), os.scandir(path) as entries:
        return any(entry.name.endswith(("config.json", ".safetensors", ".gguf")) for entry in entries)
    return False


def _snapshot(repository: Path) -> Path | None:
    """Return the state of a downloaded repository that is in use, or else the newest."""
    snapshots = [path for path in _subfolders(repository / "snapshots") if _is_model(path)]
    with suppress(OSError, UnicodeDecodeError):
        main = (repository / "refs" / "main").read_text(encoding="utf-8")[:200].strip()
        snapshots = [path for path in snapshots if path.name == main] or snapshots
    with suppress(OSError):
        return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)
    return None


def _real(path: Path) -> Path | None:
    with suppress(OSError, RuntimeError):  # nowhere, or a link to itself
        return path.resolve(strict=True)
    return None


def _of_shape(shape: str, name: str) -> LocalModel:
    config = published_shape(shape)
    return LocalModel(
        path=Path(),
        size_bytes=0,
        dtype=str(config.dtype).removeprefix("torch."),
        architecture=config.architecture,
        parameters=config.num_parameters,
        context_tokens=config.max_context_tokens,
        config=config,
        name=name,
        shape=shape,
    )
