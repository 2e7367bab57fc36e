"""A Hugging Face folder: config.json, tokenizer.json, and weights in safetensors files."""

import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.experts_config import expert_names
from neo_desktop.models.families import written_family
from neo_desktop.models.json_file import JsonFile, ModelError, check_size
from neo_desktop.models.read_ahead import ReadAhead
from neo_desktop.models.safetensors.experts import take_experts
from neo_desktop.models.safetensors.packed import NAMES, packed_tensor
from neo_desktop.models.safetensors.scaled import TYPES, scaled_tensor
from neo_desktop.models.safetensors.scheme import Packed, Scaled, read_scheme
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.tokenizer import Tokenizer
from neo_desktop.models.traced.config import TracedConfig, read_config, with_source
from neo_desktop.models.traced.predicting import parameters_of_layer
from neo_desktop.models.weights import Weights, ties_of

_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}  # bytes of a number; others have one
MAX_HEADER_BYTES = 8 << 20  # headers of 1,024 layers in one file have less than 2 MB
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Unused: scales of 8-bit activations and KV, which are not quantised here, and a shape that is known anyway.
_NOT_NEEDED = (
    *("input_scale", "input_scale_ub", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale"),
    "weight_shape",
)


class SafetensorsFolder:
    """A `checkpoint.Checkpoint` in a Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def config(self) -> ModelConfig:
        """Return config.json's content; weights that it ties are untied if the files hold other numbers."""
        return self._config

    @cached_property
    def _config(self) -> ModelConfig:
        _refuse_adapter(self.path)
        config = read_config(self.path)
        if not ties_of(config):
            return config
        try:
            return self.weights().untied(config)
        except ModelError:  # the check of the weights will raise it again
            return config

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_pretrained(self.path)

    def read_ahead(self) -> None:
        ReadAhead(_weight_files(self.path)[0]).at(0)

    def weights(self) -> Weights:
        """Read headers of `model.safetensors`, or of the files that `model.safetensors.index.json` names."""
        tensors: dict[str, StoredTensor] = {}
        for file in _weight_files(self.path):
            opened = _open(file)
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name in tensors:
                    raise ModelError(
                        f"{name} is in {tensors[name].file} and in {file}: download the model again."
                    )
                tensors[name] = _stored(file, name, opened)
        description = JsonFile.read(self.path / "config.json")
        family = written_family(description)
        in_one = family.architecture if family is not None and family.has_experts_in_one else None
        scheme = read_scheme(description, has_experts_in_one=in_one is not None)
        if in_one is not None:
            tensors |= take_experts(tensors, expert_names(in_one))
        if scheme is not None:
            tensors |= _take_matrices(tensors, scheme)
        is_tied = description.raw("tie_word_embeddings") is True
        return Weights(self.path, "config.json", tensors, says_tied=is_tied)

    def prediction(
        self, config: TracedConfig, tensors: Mapping[str, StoredTensor]
    ) -> tuple[TracedConfig, Weights]:
        """Return the configuration and tensors of the model's first layer of multi-token prediction."""
        own = with_source(config, predicts="layer")
        return own, Weights(self.path, "config.json", parameters_of_layer(tensors, own.of_model.parameters))


def _stored(file: Path, name: str, opened: Any) -> StoredTensor:
    header = opened.get_slice(name)
    shape, type_name = tuple(header.get_shape()), header.get_dtype()
    nbytes = math.prod(shape) * _SIZES.get(type_name, 1)
    return StoredTensor(name, file, shape, type_name, nbytes, lambda: iter([(0, opened.get_tensor(name))]))


def _refuse_adapter(path: Path) -> None:
    """Raise ModelError for a PEFT adapter: transformers would apply it, this engine does not."""
    file = path / "adapter_config.json"
    if not file.exists():
        return
    base = JsonFile.read(file).raw("base_model_name_or_path")
    of = f" for {base[:100]}" if isinstance(base, str) and base else ""
    advice = "merge it into its base model with `merge_and_unload` of peft, and load what that saves"
    if (path / "config.json").exists():
        raise ModelError(
            f"{path} holds a model and an adapter of PEFT{of}, which this engine does not apply: {advice}, "
            "or remove adapter_config.json to run the model without it."
        )
    raise ModelError(f"{path} is an adapter of PEFT{of}, not a complete model: {advice}.")


def _take_matrices(tensors: dict[str, StoredTensor], scheme: Packed | Scaled) -> dict[str, StoredTensor]:
    """Return the quantised matrices by weight name; remove their tensors from `tensors`."""
    matrices: dict[str, StoredTensor] = {}
    for name, tensor in list(tensors.items()):
        module, _, kind = name.rpartition(".")
        if kind in _NOT_NEEDED:
            del tensors[name]
        elif isinstance(scheme, Packed):
            if kind == NAMES[scheme.layout][0]:
                matrices[f"{module}.weight"] = packed_tensor(tensors, module, scheme)
        elif kind == "weight" and tensor.type_name in TYPES:
            matrices[name] = scaled_tensor(tensors, module, scheme)
    for name in matrices:
        if name in tensors:
            raise ModelError(
                f"{tensors[name].file} has {name} twice, quantised and as floats: download it again."
            )
    return matrices


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
    present = os.listdir(path)  # a name with folders in it could reach outside the checkpoint
    for name in names:
        if name not in present or not (path / name).is_file():
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
