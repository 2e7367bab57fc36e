"""A model that is divided among ranks: processes with a device each, which compute every layer together.

Each rank has some of the heads, with their KV, and of each feed-forward network, or of each expert, some of
the inner numbers (Megatron-LM's division; NEO, section 4, divides the CPU-cache like this, too):

    matrix                  rank r of n has
    queries, keys, values   the rows of its heads
    output                  the columns of its heads
    gates, ups              rows r/n to (r + 1)/n
    down                    columns r/n to (r + 1)/n

What `output` and `down` give is a part of a sum over all ranks, which stages ask for (`stages.Stages`). The
embedding, norms and routers are the same everywhere. Rank 0 alone has the head and the biases of sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.experts_config import EXPERT_UNIT, expert_names
from neo_desktop.models.gguf.types import TYPES, Blocks
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.protocol import LinearForm
from neo_desktop.models.linear.quantised import PartShape
from neo_desktop.models.stored_form import StoredForm
from neo_desktop.models.weights import StoredTensor, Weights

_ROWS = {f"self_attn.{name}_proj" for name in "qkv"} | {"mlp.gate_proj", "mlp.up_proj"}
_COLUMNS = {"self_attn.o_proj", "mlp.down_proj"}
_ELEMENTS = {stored.name: (stored.elements, stored.nbytes) for stored in TYPES.values()}


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of how many ranks."""

    number: int = 0
    count: int = 1

    def part(self, size: int) -> slice:
        """Return its part of so many things, which can be divided evenly."""
        each = size // self.count
        return slice(self.number * each, (self.number + 1) * each)


ALONE = Rank()


def config_of_rank(config: ModelConfig, rank: Rank) -> ModelConfig:
    """Return the shape of a rank's part of a model.

    Raises ModelError for a model that cannot be divided among so many.
    """
    count, experts = rank.count, config.experts
    if count == 1:
        return config
    sizes = {"heads": config.num_heads, "key-value heads": config.num_kv_heads}
    if "gate_up" in config.matrices:
        sizes["inner numbers of the feed-forward networks"] = config.intermediate_size
    units = dict.fromkeys(sizes, 1)
    if experts is not None:
        sizes["inner numbers of each expert"] = experts.intermediate_size
        units["inner numbers of each expert"] = EXPERT_UNIT
    for what, size in sizes.items():
        if size % (count * units[what]):
            of_unit = f" in multiples of {units[what]}" if units[what] > 1 else ""
            raise ModelError(
                f"the model's {size} {what} cannot be divided among {count} processes{of_unit}: choose "
                "another number for --tensor-parallel."
            )
    return replace(
        config,
        num_heads=config.num_heads // count,
        num_kv_heads=config.num_kv_heads // count,
        intermediate_size=config.intermediate_size // count,
        experts=experts and replace(experts, intermediate_size=experts.intermediate_size // count),
        # Where there is no head, the embedding stands for it, and nobody asks.
        tie_word_embeddings=config.tie_word_embeddings or rank.number > 0,
    )


def form_of_rank(form: LinearForm, rank: Rank) -> LinearForm:
    """Return the form of a rank's part of a model whose matrices are kept in this one."""
    if not isinstance(form, StoredForm) or rank.count == 1:
        return form

    def part_of(name: str, parts: tuple[PartShape, ...]) -> tuple[PartShape, ...]:
        if name.partition(".")[2] not in ("qkv", "gate_up", "experts_gate", "experts_up"):
            return parts
        return tuple(replace(part, rows=part.rows // rank.count) for part in parts)

    return replace(form, stored={name: part_of(name, parts) for name, parts in form.stored.items()})


def weights_of_rank(weights: Weights, config: ModelConfig, rank: Rank) -> Weights:
    """Return a rank's part of a model's weights, which have been checked.

    Args:
        weights: of the whole model.
        config: likewise.
        rank: among which `config_of_rank` can divide it.

    Raises ModelError for quantised matrices whose columns cannot be divided.
    """
    if rank.count == 1:
        return weights
    parts = _Parts(config, rank)
    tensors = {name: parts.of(name, stored) for name, stored in weights.tensors.items()}
    found = {name: part for name, part in tensors.items() if part is not None}
    return Weights(weights.path, weights.description, found)


class _Parts:
    def __init__(self, config: ModelConfig, rank: Rank) -> None:
        self._rank = rank
        self._rows, self._columns = set(_ROWS), set(_COLUMNS)
        if config.experts is not None:
            names, each = expert_names(config.architecture), range(config.experts.count)
            self._rows |= {*names.of_each("gate", each), *names.of_each("up", each)}
            self._columns |= {*names.of_each("down", each)}

    def of(self, name: str, stored: StoredTensor) -> StoredTensor | None:
        """Return the rank's part of a tensor; None: it has none."""
        if name == "lm_head.weight":
            return stored if self._rank.number == 0 else None
        if not name.startswith("model.layers."):
            return stored
        _, _, _, in_layer = name.split(".", 3)
        module, _, kind = in_layer.rpartition(".")
        rows = slice(0, stored.shape[0])
        if in_layer == "self_attn.sinks" or module in self._rows:
            return _Part(stored, self._rank.part(stored.shape[0]))
        if module not in self._columns:
            return stored
        if kind == "bias":
            return stored if self._rank.number == 0 else _Zeros(stored, rows)
        part = _Part(stored, rows, self._rank.part(stored.shape[1]))
        if stored.blocks is not None:
            elements, _ = _ELEMENTS[stored.blocks.type_name]
            if part.shape[1] % elements:
                raise ModelError(
                    f"{name} in {stored.file} has blocks of {elements} numbers ({stored.type_name}), into "
                    f"which parts of {part.shape[1]} columns do not fit: it cannot be divided among "
                    f"{self._rank.count} processes."
                )
        return part


@dataclass(frozen=True, slots=True)
class _Part:
    """See `weights.StoredTensor`: some rows and columns of another tensor.

    Args:
        whole: the other one.
        rows: of it.
        columns: of it; None: all, or it is a vector.
    """

    whole: StoredTensor
    rows: slice
    columns: slice | None = None

    @property
    def file(self) -> Path:
        """See `StoredTensor`, likewise the others."""
        return self.whole.file

    @property
    def shape(self) -> tuple[int, ...]:
        _, *columns = self.whole.shape
        if self.columns is not None:
            columns = [self.columns.stop - self.columns.start]
        return self.rows.stop - self.rows.start, *columns

    @property
    def type_name(self) -> str:
        return self.whole.type_name

    @property
    def is_quantised(self) -> bool:
        return self.whole.is_quantised

    @property
    def nbytes(self) -> int:
        part, whole = (torch.Size(shape).numel() for shape in (self.shape, self.whole.shape))
        return self.whole.nbytes * part // whole

    @property
    def blocks(self) -> Blocks | None:
        whole = self.whole.blocks
        if whole is None:
            return None
        elements, nbytes = _ELEMENTS[whole.type_name]
        columns = self.columns
        if columns is not None:
            columns = slice(columns.start // elements * nbytes, columns.stop // elements * nbytes)
        return Blocks(whole.type_name, lambda rows: self._cut(whole.pieces(rows), columns))

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        return self._cut(self.whole.pieces(), self.columns)

    def _cut(
        self, pieces: Iterator[tuple[int, Tensor]], columns: slice | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the part in one: its rows need not begin where a piece does."""
        found = []
        for first, piece in pieces:
            if first >= self.rows.stop:
                break
            rows = piece[max(self.rows.start - first, 0) : self.rows.stop - first]
            found.append(rows if columns is None else rows[:, columns])
        yield 0, torch.cat(found)


class _Zeros(_Part):
    """Zeros in place of a bias that another rank adds."""

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, torch.zeros(self.shape)
