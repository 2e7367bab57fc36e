"""Weights from a checkpoint: checked completely before use, then streamed tensor by tensor."""

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.linear.packed import TILE_ROWS
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.linear.quantised import Quantised
from neo_desktop.models.linear.quantised_gpu import QuantisedOnGPU
from neo_desktop.models.matrices import EMBEDDING, HEAD, Matrix
from neo_desktop.models.stored_tensor import FLOATS, Blocks, StoredTensor
from neo_desktop.models.traced.config import TracedConfig, with_source
from neo_desktop.models.traced.experts import parts_of_stacks
from neo_desktop.models.traced.latent import parts_of_heads

BytesRead = Callable[[int, int], None]  # (bytes read so far, bytes in total)
"""Called with (done_bytes, total_bytes) of the checkpoint after each tensor."""
Packed = Quantised | QuantisedOnGPU | OffloadedLinear
SMALL_SHARE = 0.02  # of the bytes; norms are below it
PREFIX = "model."  # prefix of names that checkpoints of a base model lack
_ROWS = 4096  # compared at once
_EQUAL: dict[tuple[object, ...], bool] = {}  # results of comparisons
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


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """A decoder's weight in the form of Hugging Face checkpoints; the decoder may fuse it with others."""

    name: str
    shape: tuple[int, ...]
    # (first row, rows of any floating-point dtype); every row must be loaded once.
    load: Callable[[int, Tensor], object]
    dense: Callable[[], Tensor]  # in the decoder's dtype, a view or a copy
    load_stored: Callable[[int, Tensor], None] | None = None  # replaces `load` for rows in the file's format


def named_weights(decoder: Decoder) -> Iterator[NamedWeight]:
    """Yield all weights of a decoder."""
    yield from (_tensor(name, tensor) for name, tensor in decoder.tensors.items())
    for matrix in decoder.config.own_matrices:
        yield from _parts(matrix, decoder.matrices[matrix.name])


def _tensor(name: str, weight: Tensor) -> NamedWeight:
    def load(row: int, values: Tensor) -> None:
        (weight[row : row + len(values)] if weight.dim() else weight).copy_(values)

    return NamedWeight(name, tuple(weight.shape), load, lambda: weight)


def _parts(matrix: Matrix, linear: Linear) -> Iterator[NamedWeight]:
    """Yield the weights, then the biases, of a matrix."""
    ends = accumulate(matrix.part_rows)
    parts = [slice(end - rows, end) for rows, end in zip(matrix.part_rows, ends, strict=True)]
    for name, part in zip(matrix.weights, parts, strict=True):
        yield _matrix(name, linear, matrix.columns, part)
    for name, part in zip(matrix.biases, parts, strict=False):
        yield _bias(name, linear, part)


def _matrix(name: str, linear: Linear, columns: int, part: slice) -> NamedWeight:
    def load(row: int, values: Tensor) -> None:
        linear.load(part.start + row, values)

    weight = NamedWeight(name, (part.stop - part.start, columns), load, lambda: linear.dense()[part])
    if not isinstance(linear, Packed) or (isinstance(linear, OffloadedLinear) and not linear.takes_stored):
        return weight
    return replace(weight, load_stored=lambda row, raw: linear.load_stored(part.start + row, raw))


def _bias(name: str, linear: Linear, part: slice) -> NamedWeight:
    assert linear.bias is not None
    weight = _tensor(name, linear.bias[part])
    if not isinstance(linear, OffloadedLinear):
        return weight
    return replace(weight, load=lambda row, values: linear.load_bias(part.start + row, values))


class Weights:
    """The tensors of a checkpoint, under the names of `named_weights`.

    Args:
        description: name of the file that determines the tensors: "config.json".
        says_tied: the description ties the head to the embedding.
    """

    def __init__(
        self, path: Path, description: str, tensors: dict[str, StoredTensor], *, says_tied: bool = False
    ) -> None:
        self.path = path
        self.description = description
        self.tensors = tensors
        self.says_tied = says_tied
        self.notes: list[str] = []  # for the log, once the tensors are checked
        self.predicting: dict[str, StoredTensor] = {}  # layers of multi-token prediction, once checked
        self._ignored: tuple[re.Pattern[str], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.tensors.values())

    @property
    def stored_as(self) -> str:
        """Types of most bytes, under the format's names: "Q4_1 and Q8_0"."""
        nbytes = Counter[str]()
        for stored in self.tensors.values():
            nbytes[stored.type_name] += stored.nbytes
        names = [name for name, count in nbytes.most_common(3) if count >= SMALL_SHARE * nbytes.total()]
        return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)

    @property
    def is_quantised(self) -> bool:
        return any(stored.is_quantised for stored in self.tensors.values())

    def rename(self, config: ModelConfig, expected: Container[str]) -> None:
        """Rename tensors to weights, as transformers does when it loads them.

        Raise ModelError if two tensors are the same weight, or a conversion fails.
        """
        if isinstance(config, TracedConfig):
            from neo_desktop.models.traced.spec import conversions_of  # noqa: PLC0415 - large

            conversions = conversions_of(config.source)
            self._ignored = conversions.ignored
            self.tensors = conversions.apply(self.tensors, config.of_model.moe_layers)
            return
        for name in list(self.tensors):
            other = name.removeprefix(PREFIX) if name.startswith(PREFIX) else PREFIX + name
            if name in expected or other not in expected:
                continue
            if other in self.tensors:
                raise ModelError(f"{self.path} holds {name} and {other}, which are the same weight.")
            self.tensors[other] = self.tensors.pop(name)

    def untied(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration without ties between weights that differ in the files."""
        ties = ties_of(config)
        self.rename(config, {*ties, *ties.values()})
        apart = tuple(sorted(alias for alias, name in ties.items() if self._differ(alias, name)))
        if not apart:
            return config
        if isinstance(config, TracedConfig):
            return with_source(config, untied=apart)
        return replace(config, tie_word_embeddings=False)

    def _differ(self, alias: str, name: str) -> bool:
        """Return True if the files hold both of a tied pair, with different numbers."""
        has_both = {alias, name} <= self.tensors.keys()
        return has_both and not _are_equal(self.tensors[alias], self.tensors[name])

    def check(self, config: ModelConfig, expected: dict[str, NamedWeight]) -> None:
        """Raise ModelError unless names and shapes are exactly those of `expected`.

        Dropped first: buffers that the model recomputes, weights that text does not need, layers of multi-
        token prediction, copies of tied weights, and the zero biases that GPTQ adds.
        """
        if isinstance(config, TracedConfig):
            parts_of_stacks(config.of_model.moe_layers, self.tensors)
            parts_of_heads(config.of_model.latents, self.tensors)
        for alias, name in ties_of(config).items():
            if self._differ(alias, name):
                raise ModelError(
                    f"{self.path} holds {alias} with other numbers than {name}, but {self.description} says "
                    "that they are the same: set tie_word_embeddings to false there."
                )
            if alias in self.tensors:  # the files have only one of the pair
                self.tensors.setdefault(name, self.tensors.pop(alias))
        untied = config.source.untied if isinstance(config, TracedConfig) else ()
        if untied or (self.says_tied and not config.tie_word_embeddings):
            head = _listed(list(untied)) or HEAD
            self.notes.append(f"holds {head} with other numbers than its embeddings: they are not tied")
        self._drop(config, expected)
        for name, stored in self.tensors.items():
            if not stored.is_quantised and stored.type_name not in FLOATS:
                raise ModelError(
                    f"{name} in {stored.file} is stored as {stored.type_name}, which is not supported: "
                    "choose the original float16 or bfloat16 checkpoint of this model."
                )
        missing = [name for name in expected if name not in self.tensors]
        if missing:
            raise ModelError(f"{self.path} lacks the weights {_listed(missing)}: download the missing files.")
        left_over = [name for name in self.tensors if name not in expected]
        if left_over:
            raise ModelError(
                f"{self.path} holds weights that {self.description} does not describe, {_listed(left_over)}: "
                f"use the {self.description} that belongs to these weights."
            )
        for name, stored in self.tensors.items():
            shape = expected[name].shape
            if stored.shape != shape:
                raise ModelError(
                    f"{name} in {stored.file} has the shape {list(stored.shape)}, but {self.description} "
                    f"describes {list(shape)}: use the {self.description} that belongs to these weights."
                )

    def _drop(self, config: ModelConfig, expected: Container[str]) -> None:
        unread = config.of_model.unread if isinstance(config, TracedConfig) else frozenset[str]()
        if skipped := unread & self.tensors.keys():
            self.notes.append(f"skips {len(skipped)} weights that text does not need")
        unknown = [name for name in self.tensors if name not in expected and name not in unread]
        predicting = _predicting_layers(unknown, config.num_layers)
        self.predicting = {name: self.tensors.pop(name) for name in predicting}
        for name, stored in list(self.tensors.items()):
            is_spare = name.endswith(".bias") and stored.type_name in FLOATS
            if name not in expected and (
                name in unread or self._is_buffer(name, stored) or (is_spare and _is_zero(stored))
            ):
                del self.tensors[name]

    def _is_buffer(self, name: str, stored: StoredTensor) -> bool:
        """Return True if a tensor without a parameter is a buffer that its model recomputes or skips."""
        is_mask = _MASKS.search(name) is not None and (
            len(stored.shape) in (0, 4) or name.endswith(".masked_bias")
        )
        return is_mask or any(pattern.search(name) for pattern in (_BUFFERS, *self._ignored))

    def load_into(
        self, weights: dict[str, NamedWeight], dtype: torch.dtype, progress: BytesRead | None
    ) -> None:
        """Load each tensor as the weight of its name, one at a time.

        Raises ModelError for a weight that is not finite in `dtype`.
        """
        total_bytes, done_bytes = self.nbytes, 0
        for name, stored in self.tensors.items():
            load_stored, blocks = weights[name].load_stored, stored.blocks
            if load_stored is not None and blocks is not None:
                _load_as_stored(load_stored, blocks, name, stored)
            else:
                for row, piece in stored.pieces():
                    _check_finite(piece, dtype, name, stored)
                    weights[name].load(row, piece)
            done_bytes += stored.nbytes
            if progress is not None:
                progress(done_bytes, total_bytes)


def _load_as_stored(
    load: Callable[[int, Tensor], None], blocks: Blocks, name: str, stored: StoredTensor
) -> None:
    try:
        for row, raw in blocks.pieces(TILE_ROWS):
            load(row, raw)
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{name} in {stored.file} has {error}: download the file again.") from None


def _check_finite(tensor: Tensor, dtype: torch.dtype, name: str, stored: StoredTensor) -> None:
    # The extremes show any infinity or NaN, at a tenth of the cost of isfinite. Rounding keeps their order,
    # so only they need the cast.
    if not torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all():
        raise ModelError(
            f"{name} in {stored.file} has values that are not finite as {dtype} (stored as "
            f"{stored.type_name}): use the stored type, or download the file again."
        )


def _is_zero(stored: StoredTensor) -> bool:
    return not any(piece.any() for _, piece in stored.pieces())


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def ties_of(config: ModelConfig) -> dict[str, str]:
    """Return the weights that a configuration ties: another name of a weight → its name."""
    if isinstance(config, TracedConfig):
        return dict(config.of_model.aliases)
    return {HEAD: EMBEDDING} if config.tie_word_embeddings else {}


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
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


def may_predict(names: Iterable[str]) -> bool:
    """Return False if no tensor of a checkpoint can belong to a layer of multi-token prediction."""
    return any(map(_PREDICTS_MORE.search, names))


def _predicting_layers(names: Iterable[str], num_layers: int) -> list[str]:
    """Return the names of tensors of multi-token prediction among those without a parameter.

    DeepSeek-V3, GLM-4.5 and others number these layers after the model's; other models have a separate
    module.
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
