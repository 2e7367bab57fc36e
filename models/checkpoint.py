"""Checkpoints: a Hugging Face folder or a GGUF file."""

from pathlib import Path
from typing import Protocol

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.gguf.checkpoint import GGUFCheckpoint, gguf_files
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.missing import is_model_folder, why_missing, why_no_model
from neo_desktop.models.safetensors.folder import SafetensorsFolder
from neo_desktop.models.tokenizer import Tokenizer
from neo_desktop.models.weights import Weights


class Checkpoint(Protocol):
    """A checkpoint on disk. Each part is read on demand; reading raises ModelError for unusable content."""

    @property
    def path(self) -> Path:
        """Path of the folder or file."""

    @property
    def name(self) -> str:
        """The model's name, from the path."""

    def config(self) -> ModelConfig:
        """Return the model's configuration."""

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, with the chat template."""

    def weights(self) -> Weights:
        """Return the weights; only headers are read."""

    def read_ahead(self) -> None:
        """Start reading the weights into the page cache in the background."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder or a file.

    A folder with safetensors files is read as a Hugging Face folder, even if it contains GGUF files.

    Raises ModelError for anything else, and for a folder with several models.
    """
    if not path.exists():
        raise ModelError(why_missing(str(path.absolute())))
    if not path.is_dir():
        return GGUFCheckpoint(path)
    if not is_model_folder(path):
        raise ModelError(f"{why_no_model(path)}.")
    models = [] if any(path.glob("*.safetensors")) else gguf_files(path)
    if len(models) > 1:
        names = ", ".join(model.name for model in models[:5])
        raise ModelError(f"{path} has {len(models)} models: name the file that is meant, such as {names}.")
    return GGUFCheckpoint(models[0]) if models else SafetensorsFolder(path)
