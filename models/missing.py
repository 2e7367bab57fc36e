"""Error sentences for a missing model: the kind of name, and the remedy. They have no full stop."""

import difflib
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

MOST_NAMES = 5  # in a list
MOST_LOOKED_AT = 2000  # entries of a folder
WEIGHTS_ENDS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
_FILE_ENDS = (*WEIGHTS_ENDS, ".json")
PACKAGED = "smollm2-135m-instruct"  # a name that `models pull` accepts
_PULL = "neo-desktop models pull"


def why_missing(name: str, known: Sequence[str] = ()) -> str:
    """Say that no model has this name, or that this path does not exist, and suggest similar ones."""
    if not name.strip():
        return "the model's name is empty: name a folder, a GGUF file or 'builtin'"
    if _is_path(name):
        return _no_path(Path(os.path.expanduser(name)))
    reason = f"no model named {name!r} is on this computer"
    if near := _near(name, known):
        return f"{reason}: did you mean {' or '.join(map(repr, near))}?"
    if known:
        more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
        reason += f"; here are: {', '.join(known[:MOST_NAMES])}{more}"
    pulled = name if name.count("/") == 1 else PACKAGED
    return f"{reason}; fetch one with '{_PULL} {pulled}', or name a folder or a GGUF file"


def why_no_model(path: Path) -> str:
    """Say why an existing file or folder is not a model."""
    if not path.is_dir():
        if path.suffix == ".safetensors" and (path.parent / "config.json").is_file():
            return f"{path} is one file of a model: name its folder, {path.parent}"
        if path.suffix == ".gguf":
            return f"{path} is not a GGUF file, because it does not start with GGUF: download it again"
        return f"{path} is not a GGUF file: name a GGUF file, or the folder of a Hugging Face checkpoint"
    inside = _models_below(path)
    if inside:
        return (
            f"{path} is not a model, but a folder of models: name one of them, such as {inside[0]}, or offer "
            f"all of them with --models-dir {path}"
        )
    return (
        f"{path} has no model: name a folder with config.json and *.safetensors, or a GGUF file; fetch one "
        f"with '{_PULL} {PACKAGED}'"
    )


def is_model_folder(path: Path) -> bool:
    """Return True for a folder with a part of a model or adapter."""
    return any(
        name in ("config.json", "adapter_config.json") or name.endswith(WEIGHTS_ENDS) for name in _names(path)
    )


def _is_path(name: str) -> bool:
    """Return True if the name is meant as a path: names of models have at most one slash."""
    begins = (".", "~", os.sep, *([os.altsep] if os.altsep else []))
    return name.startswith(begins) or name.count("/") > 1 or name.endswith(("/", *_FILE_ENDS))


def _no_path(path: Path) -> str:
    parents = [parent for parent in path.parents if not parent.exists()]
    if parents:
        path = parents[-1]
    elif path.is_symlink():
        return f"{path} is a link to nowhere: remove it, or fetch what it named"
    kind = "file" if path.suffix in _FILE_ENDS else "file or folder"
    reason = f"there is no {kind} {path}"
    near = [str(path.parent / name) for name in _near(path.name, _names(path.parent))]
    return f"{reason}: did you mean {' or '.join(near)}?" if near else f"{reason}: check the path"


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Return known names with the same last part, and names with a small typing error."""
    lowered = {candidate.lower(): candidate for candidate in known}
    last = name.lower().rpartition("/")[2]
    same = [candidate for candidate in known if candidate.lower().rpartition("/")[2] == last]
    close = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.75)
    return list(dict.fromkeys([*same, *(lowered[match] for match in close)]))[:3]


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, MOST_LOOKED_AT)]
    except OSError:
        return []


def _models_below(folder: Path) -> list[Path]:
    """Return folders of models, one or two levels below."""
    level = [folder / name for name in sorted(_names(folder)) if not name.startswith(".")]
    for _ in range(2):
        if models := [path for path in level if path.is_dir() and is_model_folder(path)]:
            return models
        level = [path / name for path in level if path.is_dir() for name in sorted(_names(path))]
        level = level[:MOST_LOOKED_AT]
    return []
