"""A model in a GGUF file, or in several files of a split model."""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.gguf.config import read_config, read_prediction, tensor_names
from neo_desktop.models.gguf.container import GGUFFile
from neo_desktop.models.gguf.tokenizer import check_kind, make_tokenizer
from neo_desktop.models.gguf.towers import Tower, find_tower, is_tower
from neo_desktop.models.gguf.vocabulary import Vocabulary
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.tokenizer import Tokenizer
from neo_desktop.models.traced.config import TracedConfig
from neo_desktop.models.weights import Weights

MAX_PARTS = 512
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def gguf_files(folder: Path) -> list[Path]:
    """Return the models in a folder: first parts only of split models, and no vision towers."""
    files = sorted(path for path in folder.glob("*.gguf") if not is_tower(path.name))
    return [path for path in files if is_first_part(path.name)]


def model_name(path: Path) -> str:
    """Return the model's name: the file name without part number and suffix."""
    part = _PART.fullmatch(path.name)
    return part["name"] if part else path.name.removesuffix(".gguf")


def split_files(path: Path) -> list[Path]:
    """Return all files of the split model to which `path` belongs, by its name; else `path` alone."""
    return [path.with_name(name) for name in parts_of(path.name)]


def parts_of(name: str) -> list[str]:
    """Return the names of the files of the split model to which `name` belongs; else `name` alone."""
    part = _PART.fullmatch(name)
    if part is None or not 0 < int(part["count"]) <= MAX_PARTS:
        return [name]
    return [f"{part['name']}-{number + 1:05}-of-{part['count']}.gguf" for number in range(int(part["count"]))]


def is_first_part(name: str) -> bool:
    """Return True for the first part of a split model and for a file that is not split."""
    part = _PART.fullmatch(name)
    return part is None or part["number"] == "00001"


class GGUFCheckpoint:
    """A `checkpoint.Checkpoint` in GGUF files. The constructor reads the first file; ModelError if invalid.

    Args:
        path: of the file; any part of a split model.
        mmproj: the file of its vision tower; None: one beside the model, if there is one.
    """

    def __init__(self, path: Path, mmproj: Path | None = None) -> None:
        self.path = path
        self._mmproj = mmproj
        self.file = GGUFFile(split_files(path)[0])

    @property
    def name(self) -> str:
        return model_name(self.path)

    def config(self) -> ModelConfig:
        return self._config

    @cached_property
    def _config(self) -> ModelConfig:
        tower = self.tower
        try:
            return read_config(self.files, self.vocabulary, tower)
        except ModelError as error:
            if tower is None or self._mmproj is not None:
                raise
            config = read_config(self.files, self.vocabulary, None)
            self._tower = str(error).rstrip(".")  # the text runs without it
            return config

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return make_tokenizer(self.vocabulary)

    def read_ahead(self) -> None:
        self.file.read_ahead.at(0)

    def check_tokenizer(self) -> None:
        """Raise ModelError for an unsupported kind of tokenizer, without building it."""
        check_kind(self.vocabulary)

    def weights(self) -> Weights:
        names = tensor_names(self.files, self.config())
        return Weights(self.path, "metadata", names.tensors(self.files))

    def prediction(self, config: TracedConfig, _: Mapping[str, StoredTensor]) -> tuple[TracedConfig, Weights]:
        """Return the configuration and tensors of the model's first layer of multi-token prediction."""
        own = read_prediction(self.files, config)
        return own, Weights(self.path, "metadata", tensor_names(self.files, own).tensors(self.files))

    @property
    def tower(self) -> Tower | None:
        """The vision tower, if the model has one."""
        return self._tower if isinstance(self._tower, Tower) else None

    @property
    def why_no_tower(self) -> str:
        """The reason, as a sentence without its end; empty: there is one."""
        return "" if isinstance(self._tower, Tower) else self._tower

    @cached_property
    def _tower(self) -> Tower | str:
        architecture = str(self.file.metadata.get("general.architecture"))
        hidden_size = self.file.metadata.get(f"{architecture}.embedding_length")
        width = hidden_size if isinstance(hidden_size, int) else 0
        return find_tower(self.file.path, architecture, width, self._mmproj)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Tokens and tokenizer settings from the metadata."""
        return Vocabulary.read(self.file)

    @cached_property
    def files(self) -> list[GGUFFile]:
        """All parts in order. Raises ModelError if one is missing or belongs to another model."""
        count = self.file.metadata.get("split.count", 0) or 1
        path, parts = self.file.path, split_files(self.file.path)
        if count == 1:
            return [self.file]
        if count != len(parts):
            raise ModelError(
                f"{path} says that it is one of {str(count)[:20]} parts, but its name does not: parts are "
                "called NAME-00001-of-00002.gguf. Download all of them under their own names."
            )
        files = [self.file]
        for number, other in enumerate(parts[1:], start=1):
            if not other.exists():
                raise ModelError(f"{path.parent} has no {other.name}: complete the download.")
            files.append(GGUFFile(other))
            if [files[-1].metadata.get(key) for key in ("split.no", "split.count")] != [number, count]:
                raise ModelError(f"{other} is not part {number + 1} of {count}: download it again.")
        return files
