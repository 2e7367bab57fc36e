"""A GGUF file with a vision tower, which llama.cpp calls "mmproj": its entries and its tensors."""

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from neo_desktop.models import limits
from neo_desktop.models.gguf.container import GGUFFile, NumberArray
from neo_desktop.models.gguf.tensors import GGUFTensor
from neo_desktop.models.json_file import JsonFile, ModelError

ARCHITECTURE = "clip"  # llama.cpp's name for all towers
_PREFIX = "clip.vision."
_KIND = "projector_type"
_MAXIMA = {
    "block_count": limits.MAX_LAYERS,
    "embedding_length": limits.MAX_HIDDEN_SIZE,
    "projection_dim": limits.MAX_HIDDEN_SIZE,
    "feed_forward_length": limits.MAX_INTERMEDIATE_SIZE,
    "attention.head_count": limits.MAX_HEADS,
    "image_size": 2**16,
    "patch_size": 2**10,
    "spatial_merge_size": 2**6,
    "projector.scale_factor": 2**6,
}
# Entries without the prefix, which either are read or follow from tensors and from the kind of tower.
_KNOWN = _MAXIMA.keys() | {
    *(_KIND, "attention.layer_norm_epsilon", "image_mean", "image_std"),
    *("image_min_pixels", "image_max_pixels", "is_deepstack_layers"),
}


class TowerFile(JsonFile):
    """The entries of a vision tower without "clip.vision.", and its tensors.

    Raise ModelError if the file is damaged, or has another content.
    """

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        found = metadata.get("general.architecture")
        if found != ARCHITECTURE:
            raise ModelError(
                f"{path} is not a vision tower (mmproj), but of the architecture {str(found)[:40]!r}: "
                "choose the model's mmproj file."
            )
        own = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
        if f"clip.{_KIND}" in metadata:
            own.setdefault(_KIND, metadata[f"clip.{_KIND}"])
        super().__init__(path, own)
        self._top = JsonFile(path, dict(metadata))
        self.shapes = {place.name: place.shape for place in self._file.tensors.values()}
        self._read = set[str]()

    @property
    def kind(self) -> str:
        """llama.cpp's name of this kind of tower."""
        return self.text(_KIND)

    @property
    def activation(self) -> str | None:
        """The activation that the file names; None: the kind's own."""
        found = [name for name in ("gelu", "silu") if self._top.boolean(f"clip.use_{name}", False)]
        return found[0] if len(found) == 1 else None

    @property
    def rope_theta(self) -> float:
        return self._top.number("clip.rope.freq_base", 10_000.0)

    def size(self, key: str, default: int | None = None) -> int:
        """Return an integer up to the entry's limit."""
        return self.integer(key, default, maximum=_MAXIMA[key])

    def numbers(self, key: str, count: int) -> list[float]:
        value = self.raw(key)
        if not isinstance(value, NumberArray) or len(value) != count:
            raise ModelError(f"{self.path} has no {count} numbers of {key}: download it again.")
        return [float(number) for number in value.data.tolist()]

    @cached_property
    def pixels(self) -> dict[str, list[float]]:
        """The colours' means and deviations, as image processors name them."""
        return {key: self.numbers(key, 3) for key in ("image_mean", "image_std")}

    def unknown(self) -> str | None:
        """Return an entry that is not known; None: all are."""
        return next((key for key in self.values if key not in _KNOWN), None)

    def floats(self, name: str) -> Tensor:
        """Return a tensor's numbers in float32. Raise ModelError if the file lacks it."""
        if name not in self._file.tensors:
            raise ModelError(f"{self.path} lacks {name}: download it again.")
        self._read.add(name)
        place = self._file.tensors[name]
        return GGUFTensor(self._file, place).dequantised(0, place.shape[0]).to(torch.float32)

    def unread(self) -> list[str]:
        """Return the tensors that `floats` has not read."""
        return sorted(self.shapes.keys() - self._read)
