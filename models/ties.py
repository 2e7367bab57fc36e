"""Weights that a configuration ties although a checkpoint may contain both."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.matrices import EMBEDDING, HEAD
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.traced.config import TracedConfig, with_source

_ROWS = 4096  # compared at once
_EQUAL: dict[tuple[object, ...], bool] = {}  # results of comparisons


def ties_of(config: ModelConfig) -> dict[str, str]:
    """Return tied weights: another name of a weight → its name."""
    if isinstance(config, TracedConfig):
        return dict(config.of_model.aliases)
    return {HEAD: EMBEDDING} if config.tie_word_embeddings else {}


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two tensors hold the same numbers; the result is cached until the files change."""
    tensors = (one, other)
    key = tuple((each.file, each.file.stat().st_mtime_ns, each.nbytes, each.name) for each in tensors)
    if key not in _EQUAL:
        _EQUAL[key] = _have_equal_numbers(one, other)
    return _EQUAL[key]


def _have_equal_numbers(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape:
        return False
    for (first, a), (first_of_other, b) in zip(one.pieces(), other.pieces(), strict=False):
        if first != first_of_other or a.shape != b.shape:
            return False  # stored in different ways
        parts = zip(torch.split(a, _ROWS), torch.split(b, _ROWS), strict=True) if a.dim() else [(a, b)]
        if not all(torch.equal(x.float(), y.float()) for x, y in parts):
            return False
    return True


def without_ties(config: ModelConfig, names: Mapping[str, str]) -> ModelConfig:
    """Return a configuration in which some pairs of `ties_of` are separate weights."""
    if isinstance(config, TracedConfig):
        return with_source(config, untied=tuple(sorted(names)))
    return replace(config, tie_word_embeddings=False)
