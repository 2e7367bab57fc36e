"""The parameters of a model in GGUF files, where some are cut, joined or sorted."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.gguf.container import GGUFFile, TensorPlace
from neo_desktop.models.gguf.family import Family, Values
from neo_desktop.models.gguf.tensors import GGUFTensor, halves_apart, joined
from neo_desktop.models.json_file import ModelError, UnsupportedModelError
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.traced.config import TracedConfig

_BLOCK = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(?:weight|bias))?")
_LAYER = re.compile(r"(.*\.layers\.)(\d+)\.(.+)")
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
_PART = re.compile(r"(.*)\[(\d+)\]")  # of a parameter that files store as several tensors
# Of a layer of multi-token prediction, which has further tensors: `nextn.` and one of these names.
_PREDICTING = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
_FINAL_NORM = "nextn.shared_head_norm"
_SECOND = re.compile(r"^blk\.1\.(?:attn_norm(?=\.))?")  # of Nemotron-H, which a file has in the same block
_COPIES = ("nextn.embed_tokens", "nextn.shared_head_head")  # of the model's own matrices
Target = tuple[str, TensorPlace, Tensor | None]
"""A parameter's name, its place in a file, and its rows there; None: all."""


def name_table(architecture: str, layers: int) -> Any:
    """Return gguf's table of tensor names."""
    import gguf  # noqa: PLC0415 - takes a fifth of a second

    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    return gguf.get_tensor_name_map(number, layers)


class TensorNames:
    """The tensors of GGUF files by parameter name. Raise ModelError if gguf has no name for a parameter."""

    def __init__(self, config: ModelConfig, architecture: str, family: Family) -> None:
        values: Values = {"num_hidden_layers": config.num_layers}
        if isinstance(config, TracedConfig):
            values = json.loads(config.source.config_json or "{}")
            values = values.get("text_config", values)
        self._stacks = _stacks(config)
        self._shapes = config.tensors
        if isinstance(config, TracedConfig):  # older files have both matrices of heads in one tensor
            self._shapes |= {latent.expand: latent.shape for latent in config.of_model.latents}
        for matrix in config.own_matrices:
            self._shapes |= {} if matrix.experts else matrix.shapes
        self._family, self._layers = family, values["num_hidden_layers"]
        self._predicting: str | None = None  # prefix of the layer of multi-token prediction that is meant
        if isinstance(config, TracedConfig) and config.source.predicts:
            # Nemotron-H's has two layers, for which gguf's table must have names.
            self._predicting, self._layers = f"blk.{self._layers}.", 2
        self._orders, self._unused = family.orders(values), family.unused(values)
        self._config, self._prefix = config, ""
        ends = {_PART.sub(r"\1", end) for of_kind in self._orders.values() for end in of_kind}
        names = name_table(architecture, self._layers)
        self._targets: dict[str, str] = {}
        for parameter in self._shapes:
            layer = _LAYER.fullmatch(parameter)
            if layer is not None:
                self._prefix = layer[1]
            if layer is not None and layer[3] in ends:
                continue
            if self._predicting is not None and layer is not None and layer[3] in _PREDICTING:
                self._targets[f"blk.0.nextn.{layer[3]}"] = parameter
                continue
            known = parameter.replace("model.language_model.", "model.")  # beside a vision tower
            for ours, theirs in family.renamed.items():
                known = known.replace(ours, theirs)
            name = names.get_name(known, try_suffixes=(".weight", ".bias"))
            if name is not None and self._predicting is not None:
                name = _folded(name)
            if name is None or name in self._targets:
                raise ModelError(f"{config.architecture} has {parameter}, for which gguf has no name.")
            self._targets[name] = parameter

    def tensors(self, files: Iterable[GGUFFile]) -> dict[str, StoredTensor]:
        """Return the tensors of every part, by parameter name.

        Raise UnsupportedModelError if the model lacks the tensor's parameter, and ModelError if a tensor is
        duplicate, or neither matrix nor vector.
        """
        found: dict[str, dict[int, GGUFTensor]] = {}
        for file in files:
            for place in self._places(file):
                for name, tensor in self._read(file, place):
                    part = _PART.fullmatch(name)
                    parameter, index = (part[1], int(part[2])) if part else (name, 0)
                    parts = found.setdefault(parameter, {})
                    if index in parts:
                        raise ModelError(
                            f"{place.name} is in {parts[index].source.path} and in {file.path}: download "
                            "them again."
                        )
                    parts[index] = tensor
        in_order = {name: [parts[index] for index in sorted(parts)] for name, parts in found.items()}
        return {name: joined(name, parts) for name, parts in in_order.items()}

    def quantised(self, files: Iterable[GGUFFile]) -> set[str]:
        places = [place for file in files for place in self._places(file) if place.type.dtype is None]
        return {name for place in places for name, _, _ in self.of(place)}

    def _places(self, file: GGUFFile) -> Iterator[TensorPlace]:
        """Yield the tensors of a part; a layer of multi-token prediction is named as a model's only layer."""
        for place in file.tensors.values():
            prefix = self._predicting or ""
            end = place.name.removeprefix(prefix)
            if self._predicting is None:
                yield place
            elif end.startswith(_FINAL_NORM):
                yield replace(place, name=end.replace(_FINAL_NORM, "output_norm"))
            elif place.name.startswith(prefix) and not end.startswith(_COPIES):
                yield replace(place, name=f"blk.0.{end}")

    def _read(self, file: GGUFFile, place: TensorPlace) -> Iterator[tuple[str, GGUFTensor]]:
        if place.name in self._unused:
            return
        targets = self.of(place)
        if not targets:
            raise UnsupportedModelError(
                f"{file.path} has {place.name}, which {self._config.architecture} of transformers lacks."
            )
        family, kind = self._family, place.name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
        is_rotated = family.rotates_neighbours and kind in ("attn_q", "attn_k")
        undo = _decay_logarithm if kind == "ssm_a" else None
        if family.shifts_norms and kind.endswith("norm") and kind != "ssm_norm":
            undo = _without_one
        for name, own, order in targets:
            _check(file, own, self._config.head_dim if is_rotated else 1)
            heads = own.shape[0] // self._config.head_dim
            rows = halves_apart(own.shape[0], heads) if is_rotated else order
            yield name, self._shaped(name, GGUFTensor(file, own, rows, undo))

    def of(self, place: TensorPlace) -> list[Target]:
        """Return the parameters in a tensor; none: the model lacks it."""
        block = _BLOCK.fullmatch(place.name)
        if block is not None and int(block[1]) >= self._layers:
            kind = place.name.removeprefix(f"blk.{block[1]}.")
            # Predicts more than one token: `Weights` skips it by its names.
            name = f"{self._prefix}{block[1]}.{kind.removeprefix('nextn.')}"
            return [(name, _stacked(place), None)]
        if place.name in self._stacks:
            return list(_of_experts(self._stacks[place.name], place))
        # Some files lack the suffix, because gguf's table has names with it.
        name = place.name if place.name in self._targets else place.name.removesuffix(".weight")
        if name in self._targets:
            return [(self._targets[name], place, None)]
        if block is None:
            return []
        of_kind, prefix = self._orders.get(block[2], {}), f"{self._prefix}{block[1]}."
        return [
            (prefix + end, _stacked(place), rows)
            for end, rows in of_kind.items()
            if _PART.sub(r"\1", prefix + end) in self._shapes
        ]

    def _shaped(self, parameter: str, tensor: GGUFTensor) -> GGUFTensor:
        """Return a tensor of floats in the parameter's shape, if only ones or groups differ."""
        expected = self._shapes.get(parameter, tensor.shape)
        is_equal = math.prod(expected) == math.prod(tensor.shape)
        without_ones = [[size for size in shape if size > 1] for shape in (expected, tensor.shape)]
        is_same = without_ones[0] == without_ones[1] or len(expected) == 1
        if tensor.is_quantised or expected == tensor.shape or not is_equal or not is_same:
            return tensor
        return replace(tensor, reshaped=expected)


def _stacked(place: TensorPlace) -> TensorPlace:
    """Return a tensor's matrices as one, with all their rows."""
    if len(place.shape) < 3:
        return place
    return replace(place, shape=(math.prod(place.shape[:-1]), place.shape[-1]))


def _folded(name: str) -> str:
    """Return the name of a tensor in the only block of a layer of multi-token prediction."""
    return _SECOND.sub(lambda found: "blk.0." + ("post_attention_norm" if "norm" in found[0] else ""), name)


def _check(file: GGUFFile, place: TensorPlace, unit: int = 1) -> None:
    """Raise ModelError unless a tensor is a matrix or a vector, with a multiple of `unit` rows."""
    if len(place.shape) > 2 or place.shape[0] % unit:
        raise ModelError(
            f"{place.name} in {file.path} has the shape {list(place.shape)}, which no matrix of this "
            "model has: download it again."
        )
    if len(place.shape) == 1 and place.type.dtype is None:
        raise ModelError(f"{place.name} in {file.path} is a quantised vector, which is not supported.")


def _without_one(stored: Tensor) -> Tensor:
    return stored - 1


def _decay_logarithm(stored: Tensor) -> Tensor:
    """Return A_log of the stored -exp(A_log)."""
    return torch.log(-stored)


def _stacks(config: ModelConfig) -> dict[str, list[list[str]]]:
    """Return tensors that hold a layer's experts -> the experts' names, one list per block of rows."""
    stacks: dict[str, list[list[str]]] = {}
    predicts = isinstance(config, TracedConfig) and config.source.predicts
    for matrix in config.own_matrices:
        if matrix.experts:
            layer = None if predicts else _NUMBER.search(matrix.weights[0])
            prefix, kind = f"blk.{layer[1] if layer else 0}.", matrix.name.rpartition("experts_")[2]
            stacks[f"{prefix}ffn_{kind}_exps.weight"] = [list(matrix.weights)]
            if matrix.biases:
                stacks[f"{prefix}ffn_{kind}_exps.bias"] = [list(matrix.biases)]
            if kind != "down":
                stacks.setdefault(f"{prefix}ffn_gate_up_exps.weight", []).append(list(matrix.weights))
    return stacks


def _of_experts(blocks: list[list[str]], place: TensorPlace) -> Iterator[Target]:
    count, *shape = place.shape
    if count != len(blocks[0]) or not shape or shape[0] % len(blocks):
        yield blocks[0][0], place, None  # its shape is refused
        return
    parts = count * len(blocks)
    own_shape, nbytes = (shape[0] // len(blocks), *shape[1:]), place.nbytes // parts
    for index in range(parts):
        expert, block = divmod(index, len(blocks))
        own = replace(place, shape=own_shape, offset=place.offset + index * nbytes, nbytes=nbytes)
        yield blocks[block][expert], own, None
