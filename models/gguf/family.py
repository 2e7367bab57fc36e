"""An architecture of llama.cpp that the code of `transformers` computes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from neo_desktop.models.gguf.container import NumberArray
from neo_desktop.models.json_file import JsonFile, ModelError
from neo_desktop.models.limits import MAX_LAYERS

Orders = Mapping[str, Mapping[str, Tensor | None]]
"""Kind of a tensor -> end of a parameter's name -> its rows in the file; None: all."""


@dataclass(frozen=True, slots=True)
class Described:
    """A GGUF file's entries, and the values derived from them.

    Args:
        own: the entries of its architecture, without the prefix.
        values: config.json's sizes.
        head_dim: size of a head.
        tensors: names of the file's tensors.
        arrays: entries with numbers per layer.
    """

    own: JsonFile
    values: Mapping[str, Any]
    head_dim: int
    tensors: frozenset[str]
    arrays: Mapping[str, list[int]]

    def per_layer(self, key: str) -> list[int]:
        """Return an entry's number for each layer; zeros included."""
        layers = self.values["num_hidden_layers"]
        numbers = self.arrays.get(key) or [self.own.integer(key)] * layers
        if len(numbers) < layers:
            raise ModelError(f"{self.own.path} has no {key} for each layer: download it again.")
        return numbers[:layers]

    def layer_types(self, period: int) -> list[str]:
        """Return each layer's type: the last one in a period has full attention, unless the file says
        otherwise.
        """
        layers, key = self.values["num_hidden_layers"], "attention.sliding_window_pattern"
        pattern = self.own.raw(key)
        if isinstance(pattern, NumberArray):
            has_window = [bool(flag) for flag in pattern.data.tolist()]
            if len(has_window) < layers:
                raise ModelError(f"{self.own.path} has no {key} for each layer: download it again.")
        else:
            period = self.own.integer(key, period, maximum=MAX_LAYERS)
            has_window = [(layer + 1) % period != 0 for layer in range(layers)]
        return ["sliding_attention" if windowed else "full_attention" for windowed in has_window[:layers]]

    def scale_of(self, layers_of_the_largest: int) -> int:
        """Return d where attention scores are divided by √d: head_dim, except in Gemma's largest model."""
        if self.values["num_hidden_layers"] == layers_of_the_largest:
            return int(self.values["hidden_size"] // self.values["num_attention_heads"])
        return self.head_dim


@dataclass(frozen=True, slots=True)
class Family:
    """The counterpart in `transformers` of an architecture of llama.cpp.

    Args:
        model_type: value in config.json; `architecture` is the value there, in `architectures`.
        eps: the entry with the norms' epsilon, and its key in config.json.
        others: further values of config.json.
        keys: further entries that are read.
        has_head_dim: config.json has the head size; otherwise it follows from other sizes.
        is_partly_rotated: RoPE may cover only part of a head.
        rotates_neighbours: rows of queries and keys are in llama.cpp's order, see `GGUFTensor`.
        is_hybrid: some layers have no attention.
        shifts_norms: the converter has added one to the norms' weights, except a state's (`ssm_norm`).
        renamed: text in parameter names -> text in the names that gguf's table has.
        orders: rows of tensors, from config.json's values; see `Orders`.
        transposed: matrices with sorted columns, from the same values; see `Source`.
    """

    model_type: str
    architecture: str
    eps: tuple[str, str]
    others: Callable[[Described], dict[str, Any]] = lambda _: {}
    keys: frozenset[str] = frozenset()
    has_head_dim: bool = False
    is_partly_rotated: bool = False
    rotates_neighbours: bool = False
    shifts_norms: bool = False
    is_hybrid: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    orders: Callable[[Mapping[str, Any]], Orders] = lambda _: {}
    transposed: Callable[[Mapping[str, Any]], tuple[tuple[str, int, int], ...]] = lambda _: ()
