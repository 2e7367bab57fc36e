"""The conversions of `transformers` from tensors of a checkpoint to parameters."""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from neo_desktop.models.json_file import ModelError
from neo_desktop.models.stored_tensor import Rows, StoredTensor
from neo_desktop.models.traced.sizes import Mixed

_NUMBER = re.compile(r"\.(\d+)\.")
# Operations that stack single experts.
_OF_EXPERTS = (["MergeModulelist", "Concatenate"], ["MergeModulelist"])


class Conversions:
    """Renames and converts tensors as `from_pretrained` of transformers does."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - large
        from transformers.core_model_loading import WeightConverter, WeightRenaming  # noqa: PLC0415 - as above

        found = get_model_conversion_mapping(model)
        self._renamings = [step for step in found if isinstance(step, WeightRenaming)]
        self._converters = [step for step in found if isinstance(step, WeightConverter)]
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
        """Return tensors by parameter name; tensors without a parameter keep their names.

        Args:
            moe_layers: their experts are named one by one.

        Raise ModelError if two tensors become the same parameter, or a conversion fails.
        """
        from transformers.core_model_loading import dot_natural_key  # noqa: PLC0415 - as above

        found: dict[str, StoredTensor] = {}
        groups: dict[str, dict[str, list[str]]] = {}
        renamings = deepcopy(self._renamings)  # some are stateful
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = self._target(name, renamings)
            if target not in self._model.shapes:
                target, pattern = name, None
            if pattern is not None:
                groups.setdefault(target, {}).setdefault(pattern, []).append(name)
            elif target in found:
                raise ModelError(
                    f"{tensors[name].file} has {name}, a duplicate of {target}: download the model again."
                )
            else:
                found[target] = tensors[name]
        moe_of = {name: moe for moe in moe_layers for name in (moe.gate_up, moe.down)}
        for target, group in groups.items():
            converter = next(each for each in self._converters if next(iter(group)) in each.source_patterns)
            steps = [type(step).__name__ for step in converter.operations]
            if target in moe_of and steps in _OF_EXPERTS:
                for fused, pattern in zip(moe_of[target].of(target), converter.source_patterns, strict=True):
                    for stored in group.get(pattern, ()):
                        number = int(_NUMBER.findall(stored)[-1])
                        name = fused.weights[number] if number < len(fused.weights) else stored
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


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Stands in for the model when conversions ask for shapes."""

    shapes: Mapping[str, torch.Size]

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device="meta")


@dataclass(slots=True)
class _Conversion:
    """A conversion of several tensors to several parameters.

    Args:
        target: the first parameter.
        sources: pattern of the converter → tensors.
    """

    converter: Any
    target: str
    sources: Mapping[str, Sequence[StoredTensor]]
    model: _Shapes
    config: Any
    _ready: dict[str, Tensor] = field(default_factory=dict)  # converted, but not taken yet

    def results(self) -> dict[str, StoredTensor]:
        """Return the parameters; their data is read on demand."""
        stored = [each for tensors in self.sources.values() for each in tensors]
        found = self._converted(lambda each: torch.empty(each.shape, device="meta"))
        numbers = max(sum(value.numel() for value in found.values()), 1)
        nbytes = sum(each.nbytes for each in stored)
        return {
            name: replace(
                stored[0],
                name=name,
                shape=tuple(value.shape),
                nbytes=nbytes * value.numel() // numbers,
                pieces=partial(self._take, name),
                blocks=None,
                is_quantised=any(each.is_quantised for each in stored),
            )
            for name, value in found.items()
        }

    def _take(self, name: str) -> Rows:
        """Yield one parameter; all are converted together, and the others are cached until taken."""
        if name not in self._ready:
            self._ready = self._converted(StoredTensor.read)
        yield 0, self._ready.pop(name)

    def _converted(self, read: Callable[[StoredTensor], Tensor]) -> dict[str, Tensor]:
        converter = deepcopy(self.converter)
        for pattern, stored in self.sources.items():
            converter.collected_tensors[pattern] = [partial(read, each) for each in stored]
        try:
            found = converter.convert(self.target, model=self.model, config=self.config)
        except Exception as error:  # transformers may raise any exception
            names, (first, *_) = ", ".join(self.sources), next(iter(self.sources.values()))
            raise ModelError(
                f"{first.file} has {names} in shapes that transformers cannot convert "
                f"to {self.target} ({str(error).strip().splitlines()[-1][:100]}): download the model again."
            ) from None
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}
