"""A folder as Hugging Face has them: config.json, tokenizer.json, and weights in safetensors files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.json_file import JsonFile, ModelError, check_size
from neo_desktop.models.tokenizer import Tokenizer
from neo_desktop.models.weights import Weights

_SUPPORTED_TYPES = {"F32": 4, "F16": 2, "BF16": 2}  # safetensors' names, bytes per value
MAX_HEADER_BYTES = 8 << 20  # 1,024 layers in one file have less than 2 MB
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsFolder:
    """See `checkpoint.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:  # noqa: D102
        return self.path.resolve().name

    def config(self) -> ModelConfig:  # noqa: D102
        return ModelConfig.from_pretrained(self.path)

    def tokenizer(self) -> Tokenizer:  # noqa: D102
        return Tokenizer.from_pretrained(self.path)

    def weights(self) -> Weights:
        """Read `model.safetensors`, or the headers of the files that `model.safetensors.index.json` names."""
        tensors: dict[str, _SafeTensor] = {}
        for file in _weight_files(self.path):
            opened = _open(file)
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name in tensors:
                    raise ModelError(
                        f"{name} is in {tensors[name].file} and in {file}: download the model again."
                    )
                header = opened.get_slice(name)
                tensors[name] = _tensor(file, opened, name, header.get_shape(), header.get_dtype())
        return Weights(self.path, "config.json", dict(tensors))


@dataclass(frozen=True, slots=True)
class _SafeTensor:
    """See `weights.StoredTensor`."""

    file: Path
    name: str
    shape: tuple[int, ...]
    type_name: str  # safetensors' name of the dtype
    opened: Any
    is_quantised = False

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * _SUPPORTED_TYPES[self.type_name]

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.opened.get_tensor(self.name)


def _tensor(file: Path, opened: Any, name: str, shape: list[int], type_name: str) -> _SafeTensor:
    if type_name not in _SUPPORTED_TYPES:
        raise ModelError(
            f"{name} in {file} is stored as {type_name}, which is not supported: "
            "choose the original float16 or bfloat16 checkpoint of this model."
        )
    return _SafeTensor(file, name, tuple(shape), type_name, opened)


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        single = path / "model.safetensors"
        if not single.exists():
            raise ModelError(_no_weights(path))
        return [single]
    weight_map = JsonFile.read(index, MAX_HEADER_BYTES).section("weight_map")
    names = sorted({weight_map.text(weight) for weight in weight_map.values}) if weight_map else []
    if not names:
        raise ModelError(f"{index} names no weight files: download it again.")
    for name in names:
        # A name with folders in it could reach outside the checkpoint.
        if Path(name).name != name or not (path / name).is_file():
            raise ModelError(f"{path} has no {name}, which {index.name} names: complete the download.")
    return [path / name for name in names]


def _no_weights(path: Path) -> str:
    if any(file.suffix in _PICKLE_SUFFIXES for file in path.iterdir()):
        return (
            f"{path} holds its weights only as pickle files, which can run code when opened: download the "
            "safetensors files of this model, or convert it with `save_pretrained` of transformers."
        )
    if any(path.glob("*.safetensors")):
        return f"{path} has no model.safetensors.index.json to go with its files: complete the download."
    return f"{path} has no weights (model.safetensors): complete the download."


def _open(file: Path) -> Any:
    check_size(file)
    try:
        with file.open("rb") as start:
            header_bytes = int.from_bytes(start.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelError(
                f"{file} is truncated or damaged (a header of {header_bytes} bytes, more than the "
                f"{MAX_HEADER_BYTES} that one may have): download it again."
            )
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is truncated or damaged ({error}): download it again.") from None
