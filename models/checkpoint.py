"""What a model is loaded from: a folder of Hugging Face, or a GGUF file."""

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
    """One of them; each part is read when it is asked for, and raises ModelError if it cannot be used."""

    @property
    def path(self) -> Path:
        """Of the folder or the file."""

    @property
    def name(self) -> str:
        """What the model is called."""

    def config(self) -> ModelConfig:
        """Return the shape of the model."""

    def tokenizer(self) -> Tokenizer:
        """Return its tokenizer, with the chat template."""

    def weights(self) -> Weights:
        """Return its weights, of which only headers have been read."""

    def read_ahead(self) -> None:
        """Have the system begin to read the weights, while something else is made ready; returns soon."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder or a file.

    A folder with weights in safetensors files is Hugging Face's, whatever lies beside them.

    Raises ModelError for what is neither, and for a folder with several models.
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
