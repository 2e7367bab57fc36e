"""Weights from a folder of safetensors files: checked whole before use, then streamed tensor by tensor."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from neo_desktop.models.decoder import Decoder
from neo_desktop.models.json_file import JsonFile, ModelError, check_size
from neo_desktop.models.linear import Linear

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) of the checkpoint after each tensor."""

_SUPPORTED_TYPES = {"F32": 4, "F16": 2, "BF16": 2}  # safetensors' names, bytes per value
MAX_HEADER_BYTES = 8 << 20  # 1,024 layers in one file have less than 2 MB
_PER_HEAD_NORMS = (".q_norm.weight", ".k_norm.weight")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def named_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the decoder's weights under their names in Hugging Face checkpoints.

    Fused matrices appear as views of their parts, so that writing to the parts fills the whole. Of a packed
    matrix (`Decoder.prepare`) they are parts of a copy, which lasts until the next matrix is asked for.
    The norm of queries and keys is kept per head (`[heads, head_dim]`): a checkpoint's `[head_dim]`
    broadcasts into it.
    """
    config = decoder.config
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", decoder.embedding
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", layer.input_norm
        yield prefix + "post_attention_layernorm.weight", layer.post_attention_norm
        if layer.qk_norm is not None:
            yield prefix + "self_attn.q_norm.weight", layer.qk_norm[: config.num_heads]
            yield prefix + "self_attn.k_norm.weight", layer.qk_norm[config.num_heads :]
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        yield from _parts(prefix + "self_attn.", layer.qkv, qkv)
        yield from _parts(prefix + "self_attn.", layer.output, {"o_proj": config.hidden_size})
        gate_up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        yield from _parts(prefix + "mlp.", layer.gate_up, gate_up)
        yield from _parts(prefix + "mlp.", layer.down, {"down_proj": config.hidden_size})
    yield "model.norm.weight", decoder.final_norm
    if not config.tie_word_embeddings:
        yield "lm_head.weight", decoder.lm_head.dense()


def _parts(prefix: str, linear: Linear, rows: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights, then biases, of layers that were fused; `rows` is their names → rows of each."""
    for kind, whole in (("weight", linear.dense()), ("bias", linear.bias)):
        if whole is not None:
            for name, part in zip(rows, torch.split(whole, list(rows.values())), strict=True):
                yield f"{prefix}{name}.{kind}", part


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

    def check(self, expected: dict[str, Tensor], *, tied_embeddings: bool) -> None:
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
            shape = tuple(expected[name].shape)
            if name.endswith(_PER_HEAD_NORMS):
                shape = shape[1:]
            if stored.shape != shape:
                raise ModelError(
                    f"{name} in {stored.file} has the shape {list(stored.shape)}, but config.json describes "
                    f"{list(shape)}: use the config.json that belongs to these weights."
                )

    def copy_to(self, destinations: dict[str, Tensor], progress: Progress | None) -> None:
        """Cast and copy each tensor to the destination of its name, one at a time.

        Raises ModelError for a weight that is not finite once cast.
        """
        total_bytes = sum(stored.size_bytes for stored in self.tensors.values())
        done_bytes = 0
        for file in dict.fromkeys(stored.file for stored in self.tensors.values()):
            with _open(file) as opened:
                for name, stored in self.tensors.items():
                    if stored.file != file:
                        continue
                    destinations[name].copy_(opened.get_tensor(name))
                    _check_finite(destinations[name], name, stored)
                    done_bytes += stored.size_bytes
                    if progress is not None:
                        progress(done_bytes, total_bytes)


def _check_finite(weight: Tensor, name: str, stored: _StoredTensor) -> None:
    # The extremes show an infinity as it is and a NaN as NaN, at a tenth of the cost of isfinite.
    if not torch.stack(torch.aminmax(weight)).isfinite().all():
        raise ModelError(
            f"{name} in {stored.file} has values that are not finite as {weight.dtype} (stored as "
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
