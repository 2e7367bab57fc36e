"""A loaded model as a GGUF file, so that llama.cpp computes with the same weights.

Matrices keep the model's dtype; norms and biases are float32, as llama.cpp wants them. The vocabulary is made
up, without special tokens, so that no token ends an answer: llama.cpp is given token ids, and tells them.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.rope import LinearScaling, Llama3Scaling
from neo_desktop.models.weights import named_weights

PROGRAM = "LLAMA_SERVER"  # environment variable: where llama.cpp's server is, if not on the PATH
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}  # enum llama_ftype


def program() -> str | None:
    """Where llama.cpp's server is; None: nowhere."""
    return shutil.which(os.environ.get(PROGRAM, "llama-server"))


def check_installed() -> None:
    """Raise ValueError, which tells what to install, unless all that is needed is there."""
    if program() is None:
        raise ValueError(
            "--baseline llama.cpp needs llama.cpp's llama-server on the PATH, or its path in the environment "
            f"variable {PROGRAM}: https://github.com/ggml-org/llama.cpp has it for every system"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("--baseline llama.cpp needs gguf: pip install 'neo-desktop[llamacpp]'")


def check_expressible(config: ModelConfig) -> None:
    """Raise ValueError for a model that llama.cpp computes otherwise, or that is not written here."""
    scaling = config.rope.scaling
    reason = None
    if config.architecture not in _ARCHITECTURES:
        reason = f"the architecture {config.architecture}"
    elif any(window is not None for window in config.layer_windows):
        reason = "sliding windows"
    elif isinstance(scaling, Llama3Scaling) and _ARCHITECTURES[config.architecture] != "llama":
        reason = f"Llama 3's rotation in {config.architecture}"
    elif not isinstance(scaling, LinearScaling | Llama3Scaling | None):
        reason = f"the rotation {type(scaling).__name__}"
    if reason is not None:
        raise ValueError(f"llama.cpp cannot be given this model, because of {reason}: leave --baseline out")


def write_gguf(gguf: Any, decoder: Decoder, path: Path) -> None:
    """Write the model; one matrix at a time is held twice.

    Args:
        gguf: the module of that name.
        decoder: a model of which `check_expressible` does not complain.
        path: of the new file.

    Raises:
        OSError: it cannot be written.
    """
    config = decoder.config
    architecture = _ARCHITECTURES[config.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _add_metadata(writer, gguf, decoder)
        outline = Decoder(config, dtype=decoder.dtype, device=torch.device("meta"))
        for name, tensor in _tensors(gguf, outline, architecture):
            size = tensor.numel() * (4 if tensor.ndim == 1 else tensor.itemsize)
            kind = _kind(gguf, tensor)
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in _tensors(gguf, decoder, architecture):
            writer.write_tensor_data(_stored(_permuted(name, tensor, config, architecture)))
        writer.flush()
        for file in writer.fout:
            os.fsync(file.fileno())  # so that the disk is idle when llama.cpp is measured
    finally:
        writer.close()


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
    if isinstance(config.rope.scaling, LinearScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope.scaling.factor)
    writer.add_tokenizer_model("rwkv")  # the one that needs no special tokens
    writer.add_token_list(["\\n", *(f"<{token}>" for token in range(1, config.vocab_size))])


def _tensors(gguf: Any, decoder: Decoder, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with their names in GGUF files, as they lie in the model."""
    config = decoder.config
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_layers)
    for weight in named_weights(decoder):
        yield names.get_name(weight.name, try_suffixes=(".weight", ".bias")), weight.dense()
    if isinstance(config.rope.scaling, Llama3Scaling):
        plain = 1.0 / config.rope.theta ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        yield "rope_freqs.weight", plain / config.rope.inverse_frequencies(config.head_dim)


def _permuted(name: str, tensor: Tensor, config: ModelConfig, architecture: str) -> Tensor:
    """Order the rows of queries and keys for llama.cpp's rotation.

    For its architecture `llama`, it rotates channel 2i with 2i + 1; the checkpoints, i with i + head_dim / 2.
    """
    if architecture != "llama" or name.split(".")[-2] not in ("attn_q", "attn_k"):
        return tensor
    halves = tensor.reshape(-1, 2, config.head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).flatten(0, 2)


def _kind(gguf: Any, tensor: Tensor) -> Any:
    """The type in which a tensor is stored."""
    kinds = gguf.GGMLQuantizationType
    if tensor.ndim == 1:
        return kinds.F32
    return {torch.float32: kinds.F32, torch.float16: kinds.F16, torch.bfloat16: kinds.BF16}[tensor.dtype]


def _stored(tensor: Tensor) -> NDArray[Any]:
    """The tensor's bytes in that type."""
    tensor = (tensor.float() if tensor.ndim == 1 else tensor).cpu().contiguous()
    return tensor.view(torch.uint8).numpy()
