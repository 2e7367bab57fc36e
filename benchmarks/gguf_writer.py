"""Writes a loaded model as a GGUF file, so that llama.cpp computes with the same weights.

Matrices keep the model's dtype; norms and biases become float32, as llama.cpp requires. The vocabulary is
synthetic and has no special tokens, so no token ends an answer. Callers exchange token ids with llama.cpp.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neo_desktop.models import families as written
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder, Experts
from neo_desktop.models.gguf.config import FAMILIES
from neo_desktop.models.gguf.names import name_table
from neo_desktop.models.gguf.tensors import ROPE_FACTORS
from neo_desktop.models.weights import named_weights

_WRITTEN = {family.architecture for family in written.FAMILIES}
ARCHITECTURES: dict[str, str] = {"MistralForCausalLM": "llama", "MixtralForCausalLM": "llama"}
for _name, _family in FAMILIES.items():
    if _family.architecture in _WRITTEN:  # several names may stand for the same text
        ARCHITECTURES.setdefault(_family.architecture, _name)
_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}  # enum llama_ftype
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # of tensors


def write_gguf(gguf: Any, decoder: Decoder, path: Path, type_name: str | None = None) -> None:
    """Write the model; at most one matrix is in memory twice.

    Args:
        type_name: quantisation type of matrices, for example "Q4_1"; None: the model's dtype.

    Raise OSError if the file cannot be written.
    """
    writer = gguf.GGUFWriter(path, ARCHITECTURES[decoder.config.architecture])
    try:
        _add_metadata(writer, gguf, decoder)
        spec = Decoder(decoder.config, dtype=decoder.dtype, device=torch.device("meta"))
        for name, tensor in _tensors(spec):
            kind = gguf.GGMLQuantizationType[_type(tensor, type_name)]
            shape, num_bytes = tensor.shape, tensor.nbytes
            if type_name is not None:  # for quantised tensors the writer expects a shape in bytes
                shape = gguf.quants.quant_shape_to_byte_shape(shape, kind)
                num_bytes = math.prod(shape)
            numbers = np.dtype(np.float32 if type_name is None else np.uint8)
            writer.add_tensor_info(name, shape, numbers, num_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor in _tensors(decoder):
            data = tensor.cpu().contiguous()
            if type_name is None:
                writer.write_tensor_data(data.view(torch.uint8).numpy())
            else:
                kind = gguf.GGMLQuantizationType[_type(tensor, type_name)]
                writer.write_tensor_data(gguf.quants.quantize(data.float().numpy(), kind).view(np.uint8))
        writer.flush()
        for file in writer.fout:
            os.fsync(file.fileno())  # the disk must be idle while llama.cpp is measured
    finally:
        writer.close()


def has_linear_rope(config: ModelConfig) -> bool:
    """Return True if all frequencies of RoPE are divided by one factor."""
    return len(set(config.rope.factors)) == 1


def _type(tensor: Tensor, type_name: str | None) -> str:
    """Return the name of a tensor's type; vectors keep their dtype."""
    return _TYPES[tensor.dtype] if type_name is None or tensor.ndim == 1 else type_name


def _add_metadata(writer: Any, gguf: Any, decoder: Decoder) -> None:
    config = decoder.config
    writer.add_file_type(_FILE_TYPES[decoder.dtype])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.experts is not None:
        writer.add_expert_count(config.experts.count)
        writer.add_expert_used_count(config.experts.per_token)
        writer.add_expert_feed_forward_length(config.experts.intermediate_size)
    if has_linear_rope(config):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope.factors[0])
    writer.add_tokenizer_model("rwkv")  # the only model that needs no special tokens
    writer.add_token_list(["\\n", *(f"<{token}>" for token in range(1, config.vocab_size))])


def _tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under their GGUF names, in GGUF's row order."""
    config = decoder.config
    rotates_neighbours = ARCHITECTURES[config.architecture] == "llama"
    for index, layer in enumerate(decoder.layers):
        if isinstance(layer.mlp, Experts):
            assert config.experts is not None
            for kind in ("gate", "up", "down"):
                matrix = getattr(layer.mlp, kind).dense()
                yield (
                    f"blk.{index}.ffn_{kind}_exps.weight",
                    matrix.view(config.experts.count, -1, matrix.shape[1]),
                )
    names = name_table(ARCHITECTURES[config.architecture], config.num_layers)
    for weight in named_weights(decoder):
        if ".experts." in weight.name:
            continue
        name, tensor = names.get_name(weight.name, try_suffixes=(".weight", ".bias")), weight.dense()
        if rotates_neighbours and name.split(".")[-2] in ("attn_q", "attn_k"):
            halves = tensor.reshape(-1, 2, config.head_dim // 2, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).flatten(0, 2)
        yield name, tensor.float() if tensor.ndim == 1 else tensor
    if config.rope.factors and not has_linear_rope(config):
        yield ROPE_FACTORS, torch.tensor(config.rope.factors)
