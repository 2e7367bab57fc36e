"""The tensors of a model in GGUF files, under the decoder's names and in its row order."""

import math
import warnings
from collections.abc import Iterable, Iterator
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
    """

    source: GGUFFile
    place: TensorPlace
    rotated_heads: int | None = None
    shift: float = 0.0

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
        return self.place.shape

    @property
    def nbytes(self) -> int:
        return self.place.nbytes

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
        rows = stored.view(self.shape[0], -1)[first:end]
        if self.rotated_heads is None:
            return rows
        pairs = rows.view(-1, self.rotated_heads // 2, 2, rows.shape[1])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def dequantised(self, first: int, end: int) -> Tensor:
        """Return rows as floats: `[rows, columns]`, or `[rows]` for a vector."""
        numbers = self.type.dequantised(self.raw(first, end)).view(-1, *self.shape[1:])
        return numbers - self.shift if self.shift else numbers

    def raw_pieces(self, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and stored bytes of pieces; all but the last have a multiple of `rows` rows."""
        unit = math.lcm(rows, self.rotated_heads or 1)
        step = max(STORED_PIECE_ELEMENTS // self.shape[1] // unit, 1) * unit
        for first in range(0, self.shape[0], step):
            self.source.read_ahead.at(self.place.offset + first * (self.nbytes // self.shape[0]))
            yield first, self.raw(first, min(first + step, self.shape[0]))

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        columns = self.shape[1] if len(self.shape) == 2 else 1
        step = max(PIECE_ELEMENTS // columns, 1)
        if self.rotated_heads is not None:
            step = -(-step // self.rotated_heads) * self.rotated_heads
        if len(self.shape) == 1:
            step = self.shape[0]
        for first in range(0, self.shape[0], step):
            self.source.read_ahead.at(self.place.offset + first * (self.nbytes // self.shape[0]))
            yield first, self.dequantised(first, min(first + step, self.shape[0]))


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
