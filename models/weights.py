"""Weights from a folder of safetensors files: checked whole before use, then streamed tensor by tensor."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from neo_desktop.models.decoder import Decoder
from neo_desktop.models.json_file import JsonFile, ModelError, check_size
from neo_desktop.models.linear.protocol import Linear

BytesRead = Callable[[int, int], None]  # (bytes read so far, bytes in total)
"""Called with (done_bytes, total_bytes) of the checkpoint after each tensor."""

_SUPPORTED_TYPES = {"F32": 4, "F16": 2, "BF16": 2}  # safetensors' names, bytes per value
MAX_HEADER_BYTES = 8 << 20  # 1,024 layers in one file have less than 2 MB
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """A decoder's weight as checkpoints of Hugging Face have it; in the decoder it may be part of another."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[Tensor], object]  # takes it once, of any floating-point dtype
    dense: Callable[[], Tensor]  # returns it in the decoder's dtype, a view or a copy


def named_weights(decoder: Decoder) -> Iterator[NamedWeight]:
    """Yield all weights of a decoder."""
    config = decoder.config
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield _tensor("model.embed_tokens.weight", decoder.embedding)
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        yield _tensor(prefix + "input_layernorm.weight", layer.input_norm)
        yield _tensor(prefix + "post_attention_layernorm.weight", layer.post_attention_norm)
        if layer.qk_norm is not None:
            heads = zip(("q_norm", "k_norm"), layer.qk_norm.tensor_split([config.num_heads]), strict=True)
            for name, rows in heads:  # a row per head, all alike
                yield replace(_tensor(f"{prefix}self_attn.{name}.weight", rows[0]), load=rows.copy_)
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        yield from _parts(prefix + "self_attn.", layer.qkv, hidden, qkv)
        yield from _parts(prefix + "self_attn.", layer.output, q_rows, {"o_proj": hidden})
        gate_up = {"gate_proj": intermediate, "up_proj": intermediate}
        yield from _parts(prefix + "mlp.", layer.gate_up, hidden, gate_up)
        yield from _parts(prefix + "mlp.", layer.down, intermediate, {"down_proj": hidden})
    yield _tensor("model.norm.weight", decoder.final_norm)
    if not config.tie_word_embeddings:
        yield from _parts("", decoder.lm_head, hidden, {"lm_head": config.vocab_size})


def _tensor(name: str, weight: Tensor) -> NamedWeight:
    return NamedWeight(name, tuple(weight.shape), weight.copy_, lambda: weight)


def _parts(prefix: str, linear: Linear, columns: int, rows: dict[str, int]) -> Iterator[NamedWeight]:
    """Yield weights, then biases, of layers that were fused; `rows` is their names → rows of each."""
    ends = list(accumulate(rows.values()))
    for (name, count), end in zip(rows.items(), ends, strict=True):
        first = end - count
        dense = partial(_dense_rows, linear, slice(first, end))
        yield NamedWeight(f"{prefix}{name}.weight", (count, columns), partial(linear.load, first), dense)
    if linear.bias is not None:
        for name, bias in zip(rows, torch.split(linear.bias, list(rows.values())), strict=True):
            yield _tensor(f"{prefix}{name}.bias", bias)


def _dense_rows(linear: Linear, rows: slice) -> Tensor:
    return linear.dense()[rows]


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Where one tensor lies, read from the header of its file."""

    file: Path
    shape: tuple[int, ...]
    type_name: str  # safetensors' name of the dtype

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return int(torch.Size(self.shape).numel()) * _SUPPORTED_TYPES[self.type_name]


class Checkpoint:
    """The tensors of a folder: `model.safetensors`, or the files that `model.safetensors.index.json` names.

    Opening it reads headers only. Raises ModelError for a file that is missing, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, _StoredTensor] = {}
        for file in _weight_files(path):
            with _open(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    if name in self.tensors:
                        raise ModelError(
                            f"{name} is in {self.tensors[name].file} and in {file}: download the model again."
                        )
                    header = opened.get_slice(name)
                    self.tensors[name] = _StoredTensor(file, tuple(header.get_shape()), header.get_dtype())

    def check(self, expected: dict[str, NamedWeight], *, tied_embeddings: bool) -> None:
        """Raise ModelError unless names, shapes and dtypes are exactly those of `expected`.

        Rotation buffers of old Llama checkpoints, and the copy of the embeddings that a tied checkpoint may
        carry as its head, are dropped.
        """
        for name in list(self.tensors):
            if name.endswith(".rotary_emb.inv_freq") or (tied_embeddings and name == "lm_head.weight"):
                del self.tensors[name]
        missing = [name for name in expected if name not in self.tensors]
        if missing:
            raise ModelError(f"{self.path} lacks the weights {_listed(missing)}: download the missing files.")
        left_over = [name for name in self.tensors if name not in expected]
        if left_over:
            raise ModelError(
                f"{self.path} holds weights that config.json does not describe, {_listed(left_over)}: "
                "use the config.json that belongs to these weights."
            )
        for name, stored in self.tensors.items():
            if stored.type_name not in _SUPPORTED_TYPES:
                raise ModelError(
                    f"{name} in {stored.file} is stored as {stored.type_name}, which is not supported: "
                    "choose the original float16 or bfloat16 checkpoint of this model."
                )
            shape = expected[name].shape
            if stored.shape != shape:
                raise ModelError(
                    f"{name} in {stored.file} has the shape {list(stored.shape)}, but config.json describes "
                    f"{list(shape)}: use the config.json that belongs to these weights."
                )

    def load_into(
        self, weights: dict[str, NamedWeight], dtype: torch.dtype, progress: BytesRead | None
    ) -> None:
        """Load each tensor as the weight of its name, one at a time.

        Raises ModelError for a weight that is not finite once cast to `dtype`.
        """
        total_bytes = sum(stored.size_bytes for stored in self.tensors.values())
        done_bytes = 0
        for file in dict.fromkeys(stored.file for stored in self.tensors.values()):
            with _open(file) as opened:
                for name, stored in self.tensors.items():
                    if stored.file != file:
                        continue
                    tensor = opened.get_tensor(name)
                    _check_finite(tensor, dtype, name, stored)
                    weights[name].load(tensor)
                    done_bytes += stored.size_bytes
                    if progress is not None:
                        progress(done_bytes, total_bytes)


def _check_finite(tensor: Tensor, dtype: torch.dtype, name: str, stored: _StoredTensor) -> None:
    # The extremes show an infinity as it is and a NaN as NaN, at a tenth of the cost of isfinite. Rounding
    # keeps their order, so that only they need to be cast.
    if not torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all():
        raise ModelError(
            f"{name} in {stored.file} has values that are not finite as {dtype} (stored as "
            f"{stored.type_name}): use the stored type, or download the file again."
        )


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        single = path / "model.safetensors"
        if not single.exists():
            raise ModelError(_no_weights(path))
        return [single]
    weight_map = JsonFile.read(index, MAX_HEADER_BYTES).section("weight_map")
    names = sorted({weight_map.text(weight) for weight in weight_map.values}) if weight_map else []
    if not names:
        raise ModelError(f"{index} names no weight files: download it again.")
    for name in names:
        # A name with folders in it could reach outside the checkpoint.
        if Path(name).name != name or not (path / name).is_file():
            raise ModelError(f"{path} has no {name}, which {index.name} names: complete the download.")
    return [path / name for name in names]


def _no_weights(path: Path) -> str:
    if any(file.suffix in _PICKLE_SUFFIXES for file in path.iterdir()):
        return (
            f"{path} holds its weights only as pickle files, which can run code when opened: download the "
            "safetensors files of this model, or convert it with `save_pretrained` of transformers."
        )
    if any(path.glob("*.safetensors")):
        return f"{path} has no model.safetensors.index.json to go with its files: complete the download."
    return f"{path} has no weights (model.safetensors): complete the download."


def _open(file: Path) -> Any:
    check_size(file)
    try:
        with file.open("rb") as start:
            header_bytes = int.from_bytes(start.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelError(
                f"{file} is truncated or damaged (a header of {header_bytes} bytes, more than the "
                f"{MAX_HEADER_BYTES} that one may have): download it again."
            )
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is truncated or damaged ({error}): download it again.") from None


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
