"""Checkpoints: a Hugging Face folder or a GGUF file."""

from pathlib import Path

from neo_desktop.models.gguf.checkpoint import GGUFCheckpoint, gguf_files
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.missing import is_model_folder, why_missing, why_no_model
from neo_desktop.models.safetensors.folder import SafetensorsFolder

Checkpoint = SafetensorsFolder | GGUFCheckpoint
"""A checkpoint on disk. Each part is read on demand; reading raises ModelError for unusable content."""


def open_checkpoint(path: Path, mmproj: Path | None = None) -> Checkpoint:
    """Open a folder or a file.

    A folder with safetensors files is read as a Hugging Face folder, even if it contains GGUF files.

    Raises ModelError for anything else, for a folder with several models, and for `mmproj` with a model that
    is no GGUF file.
    """
    if not path.exists():
        raise ModelError(why_missing(str(path.absolute())))
    if not path.is_dir():
        return GGUFCheckpoint(path, mmproj)
    if not is_model_folder(path):
        raise ModelError(f"{why_no_model(path)}.")
    models = [] if any(path.glob("*.safetensors")) else gguf_files(path)
    if len(models) > 1:
        names = ", ".join(model.name for model in models[:5])
        raise ModelError(f"{path} has {len(models)} models: name the file that is meant, such as {names}.")
    if models:
        return GGUFCheckpoint(models[0], mmproj)
    if mmproj is not None:
        raise ModelError(f"{path} is no GGUF file, so mmproj does not go with it: leave mmproj out.")
    return SafetensorsFolder(path)
