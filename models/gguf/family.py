"""An architecture of llama.cpp that the code of `transformers` computes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from neo_desktop.models.gguf.container import NumberArray
from neo_desktop.models.json_file import JsonFile, ModelError, UnsupportedModelError
from neo_desktop.models.limits import MAX_LAYERS

Orders = Mapping[str, Mapping[str, Tensor | None]]
"""Kind of a tensor -> end of a parameter's name -> its rows in the file; None: all."""


YARN = frozenset(
    f"rope.scaling.{key}"
    for key in (
        *("type", "factor", "original_context_length", "yarn_log_multiplier"),
        *("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"),
    )
)
"""Entries of `Described.yarn`."""


@dataclass(frozen=True, slots=True)
class Described:
    """A GGUF file's entries, and the values derived from them.

    Args:
        own: the entries of its architecture, without the prefix.
        values: config.json's sizes.
        head_dim: size of a head.
        tensors: names of the file's tensors.
        arrays: entries with numbers per layer.
        floats: returns the numbers of a small tensor, by its name; none: the file lacks it.
    """

    own: JsonFile
    values: Mapping[str, Any]
    head_dim: int
    tensors: frozenset[str]
    arrays: Mapping[str, list[int]]
    floats: Callable[[str], list[float]]

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

    def has(self, end: str) -> bool:
        """Return True if the name of a tensor ends so."""
        return any(name.endswith(end) for name in self.tensors)

    def yarn(self) -> dict[str, Any]:
        """Return RoPE's parameters: scaled by YaRN, or not scaled."""
        own = self.own
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": own.number("rope.freq_base", 10_000.0)}
        scaled = own.text("rope.scaling.type", "none")
        if scaled == "none":
            return rope
        if scaled != "yarn":
            raise UnsupportedModelError(
                f"{own.path} asks for the rope type {scaled[:40]!r}, which is not supported."
            )
        rope |= {
            "rope_type": "yarn",
            "factor": own.number("rope.scaling.factor"),
            "original_max_position_embeddings": own.integer("rope.scaling.original_context_length"),
            "beta_fast": own.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": own.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        if "rope.scaling.yarn_attn_factor" in own:
            rope["attention_factor"] = own.number("rope.scaling.yarn_attn_factor")
        if "rope.scaling.yarn_log_multiplier" in own:
            # llama.cpp also knows no other factor of rotations than 1 here.
            factor = round(10 * own.number("rope.scaling.yarn_log_multiplier"), 6)
            rope |= {"mscale": factor, "mscale_all_dim": factor}
        return rope

    def scale_of(self, layers_of_the_largest: int) -> int:
        """Return d where attention scores are divided by √d: head_dim, except in Gemma's largest model."""
        if self.values["num_hidden_layers"] == layers_of_the_largest:
            return int(self.values["hidden_size"] // self.values["num_attention_heads"])
        return self.head_dim


class HeadPart(NamedTuple):
    """A tensor [heads, …] whose matrices are rows of a parameter, next to other tensors' rows of a head.

    Args:
        end: of the parameter's name.
        place: of the part in a head; `parts` is the number of parts.
        is_transposed: the file has each matrix transposed.
    """

    end: str
    place: int
    parts: int
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """The counterpart in `transformers` of an architecture of llama.cpp.

    Args:
        model_type: value in config.json; `architecture` is the value there, in `architectures`.
        eps: the entry with the norms' epsilon, and its key in config.json.
        others: further values of config.json.
        keys: further entries that are read.
        varying: entries that may differ between layers; the largest number counts elsewhere.
        has_head_dim: config.json has the head size; otherwise it follows from other sizes.
        has_own_heads: `others` has all sizes of heads, and RoPE's parameters.
        is_partly_rotated: RoPE may cover only part of a head.
        rotates_neighbours: rows of queries and keys are in llama.cpp's order, see `GGUFTensor`.
        is_hybrid: some layers have no attention.
        shifts_norms: the converter has added one to the norms' weights, except a state's (`ssm_norm`).
        renamed: text in parameter names -> text in the names that gguf's table has.
        orders: rows of tensors, from config.json's values; see `Orders`.
        by_head: kind of a tensor -> the parameter of which it has a part per head; see `HeadPart`.
        transposed: matrices with sorted columns, from the same values; see `Source`.
        unused: names of tensors that the model does not read.
    """

    model_type: str
    architecture: str
    eps: tuple[str, str]
    others: Callable[[Described], dict[str, Any]] = lambda _: {}
    keys: frozenset[str] = frozenset()
    varying: frozenset[str] = frozenset()
    has_head_dim: bool = False
    has_own_heads: bool = False
    is_partly_rotated: bool = False
    rotates_neighbours: bool = False
    shifts_norms: bool = False
    is_hybrid: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    orders: Callable[[Mapping[str, Any]], Orders] = lambda _: {}
    by_head: Mapping[str, HeadPart] = field(default_factory=dict)
    transposed: Callable[[Mapping[str, Any]], tuple[tuple[str, int, int], ...]] = lambda _: ()
    unused: Callable[[Mapping[str, Any]], frozenset[str]] = lambda _: frozenset()
