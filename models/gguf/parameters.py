"""The parameters of a `transformers` model in GGUF files, where some are cut, joined or sorted."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from torch import Tensor

from neo_desktop.models.gguf.container import TensorPlace
from neo_desktop.models.gguf.family import HeadPart, Orders
from neo_desktop.models.gguf.tensors import EXPERTS, GGUFTensor, JoinedTensor
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.traced.config import TracedConfig
from neo_desktop.models.traced.sizes import FusedSizes, TracedSpec

_BLOCK = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(?:weight|bias))?")
_LAYER = re.compile(r"(.*\.layers\.\d+\.)(.+)")
_PART = re.compile(r"(.*)\[(\d+)\]")  # of a parameter that files store as several tensors
_GATE_AND_UP = "ffn_gate_up_exps"
Target = tuple[str, TensorPlace, Tensor | None]
"""A parameter's name, its place in a file, and its rows there; None: all."""


class Parameters:
    """The tensors of GGUF files by parameter name.

    Args:
        config: of the model.
        architecture: in llama.cpp.
        renamed: text in parameter names -> text in the names that gguf's table has.
        orders: of tensors that gguf's table lacks, or with rows in another order.
        by_head: tensors with a part per head; see `Family`.

    Raises:
        ModelError: gguf is not installed, or has no name for a parameter.
    """

    def __init__(
        self,
        config: TracedConfig,
        architecture: str,
        renamed: Mapping[str, str],
        orders: Orders,
        by_head: Mapping[str, HeadPart],
    ) -> None:
        self._layers = int(values_of(config)["num_hidden_layers"])
        self._prefix = ""
        spec = config.of_model
        matrices = [*spec.matrices, *(() if spec.head is None else (spec.head,))]
        self._shapes: dict[str, tuple[int, ...]] = dict(spec.parameters)
        for fused in matrices:
            sizes = zip(fused.weights, fused.rows, strict=True)
            self._shapes |= {name: (rows, fused.columns) for name, rows in sizes}
            self._shapes |= dict.fromkeys(fused.biases, ())
        self._orders, self._by_head = orders, by_head
        ends = {_PART.sub(r"\1", end) for of_kind in orders.values() for end in of_kind}
        names = _table(config, architecture, self._layers)
        self._targets: dict[str, str] = {}
        for parameter in self._shapes:
            layer = _LAYER.fullmatch(parameter)
            if layer is not None:
                self._prefix = layer[1][: layer[1].index("layers.")]
            if layer is not None and layer[2] in ends:
                continue
            known = parameter
            for ours, theirs in renamed.items():
                known = known.replace(ours, theirs)
            name = names.get_name(known, try_suffixes=(".weight", ".bias"))
            if name is None or name in self._targets:
                raise ModelError(f"{config.source.path} needs {parameter}, for which gguf has no name.")
            self._targets[name] = parameter
        self._stacks = dict(_stacks(spec))

    def of(self, place: TensorPlace) -> list[Target]:
        """Return the parameters in a tensor; none: the model lacks it."""
        block = _BLOCK.fullmatch(place.name)
        if block is not None and int(block[1]) >= self._layers:
            kind = place.name.removeprefix(f"blk.{block[1]}.")
            # Predicts more than one token: `Weights` skips it by its names.
            name = f"{self._prefix}layers.{block[1]}.{kind.removeprefix('nextn.')}"
            shape = (math.prod(place.shape[:-1]), place.shape[-1])
            return [(name, replace(place, shape=shape), None)]
        if place.name in self._stacks:
            return list(_of_experts(self._stacks[place.name], place))
        # Some files lack the suffix, because gguf's table has names with it.
        name = place.name if place.name in self._targets else place.name.removesuffix(".weight")
        if name in self._targets:
            return [(self._targets[name], place, None)]
        of_kind = {} if block is None else self._orders.get(block[2], {})
        prefix = "" if block is None else f"{self._prefix}layers.{block[1]}."
        part = None if block is None else self._by_head.get(block[2])
        if part is not None and len(place.shape) == 3 and prefix + part.end in self._shapes:
            return [(f"{prefix}{part.end}[{at}]", own, None) for at, own in _of_heads(part, place)]
        return [
            (prefix + end, place, rows)
            for end, rows in of_kind.items()
            if _PART.sub(r"\1", prefix + end) in self._shapes
        ]

    def shaped(self, parameter: str, tensor: GGUFTensor) -> GGUFTensor:
        """Return a tensor of floats in the parameter's shape, if only ones or groups differ."""
        expected = self._shapes.get(parameter, tensor.shape)
        is_equal = math.prod(expected) == math.prod(tensor.shape)
        without_ones = [[size for size in shape if size > 1] for shape in (expected, tensor.shape)]
        is_same = without_ones[0] == without_ones[1] or len(expected) == 1
        if tensor.is_quantised or expected == tensor.shape or not is_equal or not is_same:
            return tensor
        return replace(tensor, reshaped=expected)


def joined(tensors: Mapping[str, GGUFTensor]) -> dict[str, StoredTensor]:
    """Join the parts of parameters."""
    whole: dict[str, StoredTensor] = {}
    parts: dict[str, dict[int, GGUFTensor]] = {}
    for name, tensor in tensors.items():
        if (part := _PART.fullmatch(name)) is None:
            whole[name] = tensor
        else:
            parts.setdefault(part[1], {})[int(part[2])] = tensor
    return whole | {name: JoinedTensor([own[part] for part in sorted(own)]) for name, own in parts.items()}


def without_mixed_types(config: TracedConfig, quantised: Set[str]) -> TracedConfig:
    """Return the configuration with quantised matrices apart from others, which would be fused with them."""

    def split(fused: FusedSizes) -> Iterator[FusedSizes]:
        for are_quantised in (True, False):
            chosen = [
                index for index, name in enumerate(fused.weights) if (name in quantised) == are_quantised
            ]
            if chosen:
                yield replace(
                    fused,
                    weights=tuple(fused.weights[index] for index in chosen),
                    biases=tuple(fused.biases[index] for index in chosen if fused.biases),
                    rows=tuple(fused.rows[index] for index in chosen),
                )

    matrices = tuple(each for fused in config.of_model.matrices for each in split(fused))
    return replace(config, of_model=replace(config.of_model, matrices=matrices))


def values_of(config: TracedConfig) -> dict[str, Any]:
    """Return the values of the config.json of a GGUF file."""
    values: dict[str, Any] = json.loads(config.source.config_json or "{}")
    return values


def _table(config: TracedConfig, architecture: str, layers: int) -> Any:
    try:
        import gguf  # noqa: PLC0415 - only these models need it
    except ImportError:
        raise ModelError(
            f"{config.source.path} describes a model that only transformers knows: install "
            "neo-desktop[transformers], or choose another model."
        ) from None
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    return gguf.get_tensor_name_map(number, layers)


def _stacks(spec: TracedSpec) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield the tensor that holds a layer's experts, and the experts' names, one list per block of rows."""
    for moe in spec.moe_layers:
        layer = _LAYER.fullmatch(moe.gate_up)
        number = moe.gate_up.split("layers.")[1].split(".")[0] if layer else "0"
        names = {kind: fused.weights for kind, fused in moe.named().items()}
        of_kind = {stored: [names[kind]] for stored, kind in EXPERTS.items() if kind in names}
        if "gate" in names:
            of_kind[_GATE_AND_UP] = [names["gate"], names["up"]]
        yield from ((f"blk.{number}.{kind}.weight", names) for kind, names in of_kind.items())


def _of_experts(names: Iterable[tuple[str, ...]], place: TensorPlace) -> Iterator[Target]:
    blocks = list(names)
    count, rows = len(blocks[0]), place.shape[1] // len(blocks)
    if len(place.shape) != 3 or place.shape[0] != count or place.shape[1] % len(blocks):
        yield blocks[0][0], place, None  # its shape is refused
        return
    nbytes = place.nbytes // count // len(blocks)
    for block, of_each in enumerate(blocks):
        for expert, name in enumerate(of_each):
            offset = place.offset + (expert * len(blocks) + block) * nbytes
            own = replace(place, shape=(rows, place.shape[2]), offset=offset, nbytes=nbytes)
            yield name, own, None


def _of_heads(part: HeadPart, place: TensorPlace) -> Iterator[tuple[int, TensorPlace]]:
    """Yield the index of a part of a parameter, and its matrix in the file."""
    heads, *shape = place.shape
    nbytes = place.nbytes // heads
    for head in range(heads):
        own = replace(place, shape=tuple(shape), offset=place.offset + head * nbytes, nbytes=nbytes)
        yield head * part.parts + part.place, own
