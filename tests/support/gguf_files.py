"""Small GGUF files of transformers models, in the format of llama.cpp's converter."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from neo_desktop.models.gguf.types import TYPES as STORED_TYPES

TYPES = {
    name: gguf.GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
}
STORED = {stored.name: stored for stored in STORED_TYPES.values()}
# Offsets of float16 fields in a block, unless the only one is at its start.
HALVES = {
    "MXFP4": (),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
}
# GPT-2's alphabet: one character per byte.
ALPHABET = [
    chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(256, 324))
]


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str = "llama",
    type_name: str = "F32",
    type_names: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Path:
    """Write a transformers model as a GGUF file.

    Args:
        type_name: type of matrices; types that gguf cannot quantise get random numbers.
        type_names: types of matrices by a part of their names; others have `type_name`.
        metadata: changed entries, by full name; None removes an entry.
        tensors: additional tensors.
    """
    config = model.config
    writer = gguf.GGUFWriter(None, architecture)
    entries = entries_of(config, architecture) | vocabulary(config.vocab_size) | (metadata or {})
    for key, value in entries.items():
        if value is not None:
            add(writer, key, value)
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, architecture.upper().replace("-", "_")), config.num_hidden_layers
    )
    state = dict(model.named_parameters())  # tied parameters appear once
    for tensor, value in _of_gpt_oss(state) if architecture == "gpt-oss" else _of_experts(state):
        kind = next((kind for part, kind in (type_names or {}).items() if part in tensor), type_name)
        add_tensor(writer, tensor, value.detach(), kind if tensor.endswith("_exps.weight") else "F32")
    for name, value in state.items():
        is_permuted = architecture == "llama" and name.split(".")[-2] in ("q_proj", "k_proj")
        stored = permuted(value, config.head_dim) if is_permuted else value
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        kind = next((kind for part, kind in (type_names or {}).items() if part in gguf_name), type_name)
        add_tensor(writer, gguf_name, stored.detach(), kind if value.ndim == 2 else "F32")
    for name, value in (tensors or {}).items():
        add_tensor(writer, name, value, "F32")
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _of_experts(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Remove the MoE tensors from `state`, and yield them under llama.cpp's names."""
    for name in list(state):
        prefix = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if name.endswith("experts.gate_up_proj"):
            gate, up = state.pop(name).chunk(2, dim=1)
            yield f"{prefix}.ffn_gate_exps.weight", gate
            yield f"{prefix}.ffn_up_exps.weight", up
        elif name.endswith("experts.down_proj"):
            yield f"{prefix}.ffn_down_exps.weight", state.pop(name)
        elif name.endswith("mlp.gate.weight"):
            yield f"{prefix}.ffn_gate_inp.weight", state.pop(name)


def _of_gpt_oss(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Do the same for gpt-oss, whose gates and ups interleave in transposed matrices."""
    for name in list(state):
        prefix = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        _, is_expert, part = name.partition(".mlp.experts.")
        if is_expert:
            value, end = state.pop(name), "bias" if part.endswith("_bias") else "weight"
            rows = value if end == "bias" else value.transpose(1, 2)
            if part.startswith("gate_up"):
                yield f"{prefix}.ffn_gate_exps.{end}", rows[:, ::2]
                yield f"{prefix}.ffn_up_exps.{end}", rows[:, 1::2]
            else:
                yield f"{prefix}.ffn_down_exps.{end}", rows
        elif ".mlp.router." in name:
            yield f"{prefix}.ffn_gate_inp.{name.rpartition('.')[2]}", state.pop(name)
        elif name.endswith(".sinks"):
            yield f"{prefix}.attn_sinks.weight", state.pop(name)
        elif name.endswith("post_attention_layernorm.weight"):
            yield f"{prefix}.post_attention_norm.weight", state.pop(name)


def stored_rows(name: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return random bits, `[rows, bytes of a row]`, with finite scales and minima."""
    generator = torch.Generator().manual_seed(seed)
    stored = STORED[name]
    shape = (rows, columns // stored.elements, stored.nbytes)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for start in HALVES.get(name, (0,)):
        halves = torch.randn(*shape[:2], 1, generator=generator).half()
        blocks[:, :, start : start + 2] = halves.view(torch.uint8)
    if name == "MXFP4":
        exponents = torch.randint(117, 122, shape[:2], dtype=torch.uint8, generator=generator)
        blocks[:, :, 0] = exponents
    return blocks.flatten(1)


def small_rows(name: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return random rows of about the size of weights."""
    raw = stored_rows(name, rows, columns, seed)
    factor = 0.02 / STORED[name].dequantised(raw).std().item()
    blocks = raw.view(rows, -1, STORED[name].nbytes)
    for start in HALVES.get(name, (0,)):
        halves = blocks[:, :, start : start + 2].contiguous().view(torch.float16) * factor
        blocks[:, :, start : start + 2] = halves.view(torch.uint8)
    return raw


def permuted(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of queries or keys like llama.cpp's converter for architecture "llama"."""
    heads = rows.shape[0] // head_dim
    return rows.view(heads, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def dequantised(weight: Tensor, type_name: str) -> Tensor:
    """Return a weight after a round trip through a type."""
    kind = TYPES[type_name]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))


def vocabulary(size: int) -> dict[str, Any]:
    """Return a byte-level vocabulary with two merges and an end token."""
    tokens = [*ALPHABET, "th", "the", "<|end|>"]
    padding = [f"[PAD{index}]" for index in range(len(tokens), size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3] + [5] * len(padding),
        "tokenizer.ggml.merges": ["t h", "th e"],
    }


def entries_of(config: Any, architecture: str) -> dict[str, Any]:
    """Return the converter's entries of the architecture, by full name."""
    rope = config.rope_parameters
    entries = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if hasattr(config, "num_experts_per_tok"):
        of_each = getattr(config, "moe_intermediate_size", config.intermediate_size)
        entries |= {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": of_each,
        }
    if architecture == "gpt-oss":
        entries |= {
            "attention.sliding_window": config.sliding_window,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return {f"{architecture}.{key}": value for key, value in entries.items()}


def add(writer: Any, key: str, value: Any) -> None:
    """Add an entry with the type of its value."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def add_tensor(writer: Any, name: str, value: Tensor, type_name: str) -> None:
    """Add a tensor; types that gguf cannot quantise get random numbers."""
    if type_name not in TYPES:  # gguf cannot quantise to it
        kind = gguf.GGMLQuantizationType[type_name]
        raw = small_rows(type_name, value.shape[:-1].numel(), value.shape[-1])
        writer.add_tensor(name, raw.view(*value.shape[:-1], -1).numpy(), raw_dtype=kind)
        return
    kind = TYPES[type_name]
    numbers = np.ascontiguousarray(value.float().numpy())
    if type_name == "F32":
        writer.add_tensor(name, numbers)
    else:
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)


def joined(pieces: Iterable[tuple[int, Tensor]]) -> Tensor:
    """Concatenate the pieces of a tensor."""
    return torch.cat([piece for _, piece in pieces])
