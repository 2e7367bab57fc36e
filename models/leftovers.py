"""Tensors of a checkpoint that are no weights of its model: buffers, and layers that are not used."""

import re
from collections.abc import Iterable
from typing import Protocol

# Frequencies and angles of rotations, and numbers of positions, which code computes by itself today.
_BUFFERS = re.compile(
    r"(^|\.)(rotary_(pos_)?emb|rope)\.((original_)?inv_freq|(cos|sin)_cached)$|(^|\.)position_ids$"
)
# Causal masks of GPT-2's kin, and the number that stands for what they hide.
_MASKS = re.compile(r"(^|\.)(self_)?(attn|attention)\.(bias|masked_bias|causal_mask)$")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# Components of names that only layers of multi-token prediction have.
_PREDICTS_MORE = re.compile(r"(^|\.)(eh_proj|enorm|hnorm|shared_head|mtp\w*)(\.|$)")
_MTP_MODULE = re.compile(r"(?:^|\.)(mtp\w*)(?:\.(?:layers\.)?(\d+))?(?=\.|$)")


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]:
        """Return its sizes, rows first."""


def is_buffer(name: str, stored: _Shaped, ignored: Iterable[re.Pattern[str]] = ()) -> bool:
    """Return whether a tensor that is no parameter is a buffer that its model computes itself.

    Args:
        name: of the tensor.
        stored: the tensor.
        ignored: names that the model's own code skips.
    """
    is_mask = _MASKS.search(name) is not None and (
        len(stored.shape) in (0, 4) or name.endswith(".masked_bias")
    )
    return is_mask or _BUFFERS.search(name) is not None or any(each.search(name) for each in ignored)


def predicting_layers(names: Iterable[str], num_layers: int) -> tuple[list[str], int]:
    """Return the tensors of multi-token prediction that a checkpoint has, and of how many layers they are.

    DeepSeek-V3, GLM-4.5 and others number these layers after the model's; others have a module for them.

    Args:
        names: tensors that are no parameters of the model.
        num_layers: of the model.
    """
    of_layer: dict[str, list[str]] = {}
    numbers: dict[str, set[str]] = {}  # of a module's layers
    for name in names:
        module, layer = _MTP_MODULE.search(name), _LAYER.search(name)
        if module is not None and (layer is None or layer.start() >= module.start()):
            of_layer.setdefault(module[1], []).append(name)
            numbers.setdefault(module[1], set()).update([module[2]] if module[2] else [])
        elif layer is not None and int(layer[1]) >= num_layers:
            of_layer.setdefault(layer[1], []).append(name)
    found = {
        layer: names_of
        for layer, names_of in of_layer.items()
        if any(_PREDICTS_MORE.search(name) for name in names_of)
    }
    count = sum(max(len(numbers.get(layer, ())), 1) for layer in found)
    return [name for names_of in found.values() for name in names_of], count
