"""Tensors of a checkpoint that are not weights of its model: buffers, and unused layers."""

import re
from collections.abc import Iterable

from neo_desktop.models.stored_tensor import StoredTensor

# RoPE frequencies, cos, sin and position ids: current code computes them.
_BUFFERS = re.compile(
    r"(^|\.)(rotary_(pos_)?emb|rope)\.((original_)?inv_freq|(cos|sin)_cached)$|(^|\.)position_ids$"
)
# Causal masks of GPT-2 and related models, and their fill value.
_MASKS = re.compile(r"(^|\.)(self_)?(attn|attention)\.(bias|masked_bias|causal_mask)$")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# Name components that only layers of multi-token prediction have.
_PREDICTS_MORE = re.compile(r"(^|\.)(eh_proj|enorm|hnorm|shared_head|mtp\w*)(\.|$)")
_MTP_MODULE = re.compile(r"(?:^|\.)(mtp\w*)(?=\.|$)")


def is_buffer(name: str, stored: StoredTensor, ignored: Iterable[re.Pattern[str]] = ()) -> bool:
    """Return True if a tensor without a parameter is a buffer that its model recomputes.

    Args:
        ignored: names that the model's own code skips.
    """
    is_mask = _MASKS.search(name) is not None and (
        len(stored.shape) in (0, 4) or name.endswith(".masked_bias")
    )
    return is_mask or _BUFFERS.search(name) is not None or any(pattern.search(name) for pattern in ignored)


def may_predict(names: Iterable[str]) -> bool:
    """Return False if no tensor of a checkpoint can belong to a layer of multi-token prediction."""
    return any(map(_PREDICTS_MORE.search, names))


def predicting_layers(names: Iterable[str], num_layers: int) -> list[str]:
    """Return the names of a checkpoint's tensors of multi-token prediction.

    DeepSeek-V3, GLM-4.5 and others number these layers after the model's; other models have a separate
    module.

    Args:
        names: tensors that are not parameters of the model.
    """
    names_by_layer: dict[str, list[str]] = {}
    for name in names:
        module, layer = _MTP_MODULE.search(name), _LAYER.search(name)
        if module is not None and (layer is None or layer.start() >= module.start()):
            names_by_layer.setdefault(module[1], []).append(name)
        elif layer is not None and int(layer[1]) >= num_layers:
            names_by_layer.setdefault(layer[1], []).append(name)
    return [
        name for layer_names in names_by_layer.values() if may_predict(layer_names) for name in layer_names
    ]
