"""The conversions by which `transformers` makes parameters of the tensors in a checkpoint."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neo_desktop.models.gguf.types import Blocks
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.traced.experts import KINDS
from neo_desktop.models.traced.sizes import Mixed

_NUMBER = re.compile(r"\.(\d+)\.")
# Operations of the conversions that put single experts together.
_OF_EXPERTS = (["MergeModulelist", "Concatenate"], ["MergeModulelist"])


class Conversions:
    """Renames and converts tensors as `from_pretrained` of transformers does.

    Args:
        model: of transformers; its numbers are not needed.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - large
        from transformers.core_model_loading import WeightConverter, WeightRenaming  # noqa: PLC0415 - as above

        found = get_model_conversion_mapping(model)
        self._renamings = [each for each in found if isinstance(each, WeightRenaming)]
        self._converters = [each for each in found if isinstance(each, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._model = _Shapes({name: value.shape for name, value in model.state_dict().items()})
        self._config = model.config
        buffers = {name for name, _ in model.named_buffers()} - self._model.shapes.keys()
        patterns = [*(model._keys_to_ignore_on_load_unexpected or ())]
        patterns += [rf"^{re.escape(name)}$" for name in sorted(buffers)]
        self.ignored = tuple(re.compile(pattern) for pattern in patterns)

    def apply(
        self, tensors: Mapping[str, StoredTensor], moe_layers: Sequence[Mixed]
    ) -> dict[str, StoredTensor]:
        """Return tensors by the names of parameters; those of no parameter keep their names.

        Args:
            tensors: of a checkpoint.
            mixtures: whose experts are named one by one.

        Raises:
            ModelError: two tensors are the same parameter, or they cannot be converted.
        """
        from transformers.core_model_loading import dot_natural_key  # noqa: PLC0415 - as above

        found: dict[str, StoredTensor] = {}
        groups: dict[str, dict[str, list[str]]] = {}
        renamings = deepcopy(self._renamings)  # some remember what they have seen
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = self._target(name, renamings)
            if target not in self._model.shapes:
                target, pattern = name, None
            if pattern is not None:
                groups.setdefault(target, {}).setdefault(pattern, []).append(name)
            elif target in found:
                raise ModelError(
                    f"{tensors[name].file} has {name}, which is {target} once more: download the model again."
                )
            else:
                found[target] = tensors[name]
        of_moe = {name: each for each in moe_layers for name in (each.gate_up, each.down)}
        for target, group in groups.items():
            converter = next(each for each in self._converters if next(iter(group)) in each.source_patterns)
            steps = [type(step).__name__ for step in converter.operations]
            if target in of_moe and steps in _OF_EXPERTS:
                for name, stored in _of_experts(of_moe[target], target, converter, group):
                    found[name] = tensors[stored]
                continue
            sources = {
                pattern: [tensors[name] for name in group[pattern]]
                for pattern in converter.source_patterns
                if pattern in group
            }
            found |= _Conversion(converter, target, sources, self._model, self._config).results()
        return found

    def _target(self, name: str, renamings: Sequence[Any]) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key  # noqa: PLC0415 - as above

        of = {"base_model_prefix": self._prefix, "meta_state_dict": self._model.shapes}
        target, pattern = rename_source_key(name, renamings, self._converters, **of)  # type: ignore[arg-type]
        if target not in self._model.shapes and name in self._model.shapes:
            return name, None
        return target, pattern


def _of_experts(
    moe: Mixed, target: str, converter: Any, group: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Yield, for each stored matrix of one expert, what it is called here, and there."""
    kinds = KINDS[:2] if target == moe.gate_up else KINDS[2:]
    for kind, pattern in zip(kinds, converter.source_patterns, strict=True):
        names = moe.matrices[KINDS.index(kind)].weights
        for stored in group.get(pattern, ()):
            number = int(_NUMBER.findall(stored)[-1])
            yield (names[number] if number < len(names) else stored), stored


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Stand in for the model that conversions ask for shapes."""

    shapes: Mapping[str, torch.Size]

    def get_parameter(self, name: str) -> Tensor:
        """Return a parameter, without numbers."""
        return torch.empty(self.shapes[name], device="meta")


class _Conversion:
    """Several tensors of a file that become several parameters.

    Args:
        converter: of transformers.
        target: the first parameter.
        sources: pattern of the converter → tensors.
        model: has the shapes of parameters.
        config: of the model, of transformers.
    """

    def __init__(
        self,
        converter: Any,
        target: str,
        sources: Mapping[str, Sequence[StoredTensor]],
        model: _Shapes,
        config: Any,
    ) -> None:
        self._converter, self._target, self._model, self._config = converter, target, model, config
        self.sources = sources
        self._ready: dict[str, Tensor] = {}  # converted, and not yet taken

    @property
    def stored(self) -> list[StoredTensor]:
        """All tensors."""
        return [each for of_pattern in self.sources.values() for each in of_pattern]

    def results(self) -> dict[str, "ConvertedTensor"]:
        """Return the parameters, which are read when they are asked for."""
        found = self._converted(lambda stored: torch.empty(stored.shape, device="meta"))
        numbers = sum(value.numel() for value in found.values())
        nbytes = sum(stored.nbytes for stored in self.stored)
        return {
            name: ConvertedTensor(self, name, tuple(value.shape), nbytes * value.numel() // max(numbers, 1))
            for name, value in found.items()
        }

    def take(self, name: str) -> Tensor:
        """Return one parameter; all are read together, and those not taken wait."""
        if name not in self._ready:
            self._ready = self._converted(_whole)
        return self._ready.pop(name)

    def _converted(self, read: Callable[[StoredTensor], Tensor]) -> dict[str, Tensor]:
        converter = deepcopy(self._converter)
        for pattern, stored in self.sources.items():
            converter.collected_tensors[pattern] = [partial(read, each) for each in stored]
        try:
            found = converter.convert(self._target, model=self._model, config=self._config)
        except Exception as error:  # code of transformers may raise anything
            names = ", ".join(self.sources)
            raise ModelError(
                f"{self.stored[0].file} has {names} in shapes that transformers cannot make {self._target} "
                f"from ({str(error).strip().splitlines()[-1][:100]}): download the model again."
            ) from None
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """See `StoredTensor`: a parameter that is computed from tensors of a file."""

    conversion: _Conversion
    name: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def file(self) -> Path:
        return self.conversion.stored[0].file

    @property
    def type_name(self) -> str:
        return self.conversion.stored[0].type_name

    @property
    def is_quantised(self) -> bool:
        return any(stored.is_quantised for stored in self.conversion.stored)

    @property
    def blocks(self) -> Blocks | None:
        return None

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.conversion.take(self.name)


def _whole(stored: StoredTensor) -> Tensor:
    pieces = [piece for _, piece in stored.pieces()]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
