"""The tensors of a model in GGUF files, under the decoder's names and in its row order."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from neo_desktop.models.experts_config import ExpertNames, expert_names
from neo_desktop.models.gguf.container import GGUFFile, TensorPlace
from neo_desktop.models.gguf.types import PIECE_ELEMENTS, Blocks, StoredType
from neo_desktop.models.json_file import ModelError

STORED_PIECE_ELEMENTS = 2**25  # of rows kept in the file's format; one piece occupies many threads
ROPE_FACTORS = "rope_freqs.weight"  # part of the configuration

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT_OSS_NAMES = {"post_attention_norm": "post_attention_layernorm"}
SINKS = "attn_sinks"
ROUTER = "ffn_gate_inp"
# One tensor holds a layer's experts.
EXPERTS = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A `weights.StoredTensor` in a GGUF file.

    Args:
        source: its file.
        place: its location in the file.
        rotated_heads: head size if RoPE pairs are interleaved as in llama.cpp, which rotates channel 2i with
            2i + 1; the decoder rotates i with i + head_dim / 2. None: rows are in the decoder's order.
        shift: an offset that the file adds to the floats; reading subtracts it.
        order: indices of the stored rows, in the parameter's order; not with `rotated_heads`.
        undo: reverts the converter's function of the floats.
        reshaped: the parameter's shape, if the file has other dimensions of size 1, or a vector's groups.
    """

    source: GGUFFile
    place: TensorPlace
    rotated_heads: int | None = None
    shift: float = 0.0
    order: Tensor | None = None
    undo: Callable[[Tensor], Tensor] | None = None
    reshaped: tuple[int, ...] | None = None

    @property
    def file(self) -> Path:
        return self.source.path

    @property
    def type(self) -> StoredType:
        """Quantisation type or dtype of the stored numbers."""
        return self.place.type

    @property
    def type_name(self) -> str:
        return self.type.name

    @property
    def is_quantised(self) -> bool:
        return self.type.dtype is None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reshaped or (self.num_rows, *self.place.shape[1:])

    @property
    def num_rows(self) -> int:
        """Rows in the file, or chosen by `order`."""
        return self.place.shape[0] if self.order is None else len(self.order)

    @property
    def nbytes(self) -> int:
        return self.place.nbytes * self.num_rows // self.place.shape[0]

    @property
    def blocks(self) -> Blocks | None:
        return Blocks(self.type_name, self.raw_pieces) if self.is_quantised else None

    def raw(self, first: int, end: int) -> Tensor:
        """Return rows in the file's format but the decoder's order: `[rows, bytes of a row]` uint8.

        If the order is the same, it is a read-only view of the file. Otherwise `first` and `end` must be
        multiples of the head size.
        """
        with warnings.catch_warnings():  # torch warns that the view is read-only
            warnings.simplefilter("ignore")
            stored = torch.from_numpy(self.source.raw(self.place))
        rows = stored.view(self.place.shape[0], -1)
        rows = rows[first:end] if self.order is None else rows[self.order[first:end]]
        if self.rotated_heads is None:
            return rows
        pairs = rows.view(-1, self.rotated_heads // 2, 2, rows.shape[1])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def dequantised(self, first: int, end: int) -> Tensor:
        """Return rows as floats: `[rows, columns]`, or `[rows]` for a vector."""
        numbers = self.type.dequantised(self.raw(first, end)).view(-1, *self.shape[1:])
        numbers = numbers - self.shift if self.shift else numbers
        return numbers if self.undo is None else self.undo(numbers)

    def raw_pieces(self, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and stored bytes of pieces; all but the last have a multiple of `rows` rows."""
        unit = math.lcm(rows, self.rotated_heads or 1)
        step = max(STORED_PIECE_ELEMENTS // self.place.shape[1] // unit, 1) * unit
        for first, end in self._pieces_of(step):
            yield first, self.raw(first, end)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        step = max(PIECE_ELEMENTS // math.prod(self.shape[1:]), 1)
        if self.rotated_heads is not None:
            step = -(-step // self.rotated_heads) * self.rotated_heads
        if len(self.shape) == 1 or self.reshaped is not None:
            step = self.num_rows
        for first, end in self._pieces_of(step):
            yield first, self.dequantised(first, end)

    def _pieces_of(self, step: int) -> Iterator[tuple[int, int]]:
        for first in range(0, self.num_rows, step):
            self.source.read_ahead.at(self.place.offset + first * (self.nbytes // self.num_rows))
            yield first, min(first + step, self.num_rows)


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """A `weights.StoredTensor`: a parameter that files store as several tensors, its rows in order."""

    parts: Sequence[GGUFTensor]

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def type_name(self) -> str:
        """Types of the parts; several have no kernel."""
        turned = {
            part.type_name + (" by columns" if part.undo and part.is_quantised else "") for part in self.parts
        }
        return " and ".join(sorted(turned))

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]

    @property
    def is_quantised(self) -> bool:
        return any(part.is_quantised for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def blocks(self) -> Blocks | None:
        is_uniform = len({part.type_name for part in self.parts}) == 1
        is_kept = self.is_quantised and is_uniform and all(part.undo is None for part in self.parts)
        return Blocks(self.type_name, self._raw_pieces) if is_kept else None

    def _raw_pieces(self, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Yield as `GGUFTensor.raw_pieces`; parts that end within a tile are read at once."""
        if all(part.num_rows % rows == 0 for part in self.parts[:-1]):
            yield from self._in_order([part.raw_pieces(rows) for part in self.parts])
        else:
            yield 0, torch.cat([part.raw(0, part.num_rows) for part in self.parts])

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        yield from self._in_order([part.pieces() for part in self.parts])

    def _in_order(self, pieces: Sequence[Iterator[tuple[int, Tensor]]]) -> Iterator[tuple[int, Tensor]]:
        start = 0
        for part, own in zip(self.parts, pieces, strict=True):
            for first, piece in own:
                yield start + first, piece
            start += part.shape[0]


def read_tensors(files: list[GGUFFile], head_dim: int) -> dict[str, GGUFTensor]:
    """Return the tensors of every part.

    Raises ModelError for a duplicate tensor, and for one that is neither matrix nor vector.
    """
    architecture = files[0].metadata.get("general.architecture")
    rotated_heads = head_dim if architecture == "llama" else None
    moe_layers = {"llama": "MixtralForCausalLM", "gpt-oss": "GptOssForCausalLM"}
    names = expert_names(moe_layers.get(str(architecture), ""))

    def named() -> Iterator[tuple[str, GGUFTensor]]:
        for file in files:
            for name, place in _named(file.tensors.values(), names):
                kind = place.name.split(".")[-2:-1]
                is_rotated = rotated_heads is not None and kind in (["attn_q"], ["attn_k"])
                if place.name != ROPE_FACTORS:
                    yield name, GGUFTensor(file, place, rotated_heads if is_rotated else None)

    return checked(named())


def checked(named: Iterable[tuple[str, GGUFTensor]]) -> dict[str, GGUFTensor]:
    """Return tensors by name.

    Raises ModelError for a duplicate tensor, and for one that is neither matrix nor vector.
    """
    tensors: dict[str, GGUFTensor] = {}
    for name, tensor in named:
        place, file = tensor.place, tensor.source
        if name in tensors:
            raise ModelError(
                f"{place.name} is in {tensors[name].file} and in {file.path}: download them again."
            )
        if len(place.shape) > 2 or place.shape[0] % (tensor.rotated_heads or 1):
            raise ModelError(
                f"{place.name} in {file.path} has the shape {list(place.shape)}, which no matrix of this "
                "model has: download it again."
            )
        if len(place.shape) == 1 and place.type.dtype is None:
            raise ModelError(f"{place.name} in {file.path} is a quantised vector, which is not supported.")
        tensors[name] = tensor
    return tensors


def _named(places: Iterable[TensorPlace], names: ExpertNames) -> Iterator[tuple[str, TensorPlace]]:
    """Yield tensors under their Hugging Face names; each expert becomes a tensor."""
    for place in places:
        match place.name.split("."):
            case ["blk", layer, kind, end] if kind in EXPERTS and len(place.shape) == 2 + (end == "weight"):
                count, *shape = place.shape
                nbytes = place.nbytes // count
                for expert, module in enumerate(names.of_each(EXPERTS[kind], range(count))):
                    offset = place.offset + expert * nbytes
                    one = TensorPlace(place.name, place.type, tuple(shape), offset, nbytes)
                    yield f"model.layers.{layer}.{module}.{end}", one
            case _:
                yield _name(place.name, names), place


def _name(name: str, names: ExpertNames) -> str:
    """Return the Hugging Face name; unknown names stay."""
    match name.split("."):
        case ["blk", layer, kind, end] if kind == ROUTER:
            return f"model.layers.{layer}.{names.block}.{names.router}.{end}"
        case ["blk", layer, kind, "weight"] if kind == SINKS:
            return f"model.layers.{layer}.self_attn.sinks"
        case ["blk", layer, kind, end] if kind in _GPT_OSS_NAMES:
            return f"model.layers.{layer}.{_GPT_OSS_NAMES[kind]}.{end}"
        case [kind, end] if kind in _NAMES:
            return f"{_NAMES[kind]}.{end}"
        case ["blk", layer, kind, end] if kind in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{end}"
    return name


def stored_name(name: str) -> str:
    """Return the GGUF name of a known tensor that belongs to no expert; the inverse of `_name`."""
    names = {ours: stored for stored, ours in (_NAMES | _LAYER_NAMES).items()}
    module, _, end = name.rpartition(".")
    if module in names:
        return f"{names[module]}.{end}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{names.get(part, ROUTER)}.{end}"
