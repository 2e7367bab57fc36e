"""The configuration of a model in GGUF files."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from neo_desktop.models import limits
from neo_desktop.models.config import GenerationDefaults, ModelConfig
from neo_desktop.models.families import written_family
from neo_desktop.models.gguf import families, hybrids
from neo_desktop.models.gguf.container import GGUFFile
from neo_desktop.models.gguf.entries import RMS_EPS, Entries
from neo_desktop.models.gguf.family import Family, Values
from neo_desktop.models.gguf.names import TensorNames
from neo_desktop.models.gguf.tensors import ROPE_FACTORS
from neo_desktop.models.gguf.towers import Tower
from neo_desktop.models.gguf.vocabulary import Vocabulary
from neo_desktop.models.json_file import JsonFile, ModelError, UnsupportedModelError
from neo_desktop.models.matrices import Matrix
from neo_desktop.models.traced.config import TracedConfig, traced_config, with_source
from neo_desktop.models.traced.sizes import Source

FAMILIES = families.FAMILIES | hybrids.HYBRIDS
"""Keys are llama.cpp's names of architectures."""
_MATRIX_BIASES = {
    "qkv_bias": "blk.0.attn_q.bias",
    "output_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_down.bias",
}
_SIZES = {"context_length": "max_position_embeddings", "feed_forward_length": "intermediate_size"}
# Key of generation_config.json -> entry.
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def read_config(files: Sequence[GGUFFile], vocabulary: Vocabulary, tower: Tower | None = None) -> ModelConfig:
    """Read the configuration from the first part's metadata and the tensors' types and names.

    Raise ModelError if an entry is missing or out of range. Raise UnsupportedModelError if an architecture,
    entry or tensor is unknown, or transformers is missing or cannot cut the model into stages.
    """
    path = files[0].path
    metadata = JsonFile(path, dict(files[0].metadata))
    name = metadata.text("general.architecture")
    if metadata.text("general.type", "model") != "model":
        raise ModelError(f"{path} is not a model, but {metadata.raw('general.type')!r} for one.")
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{path} describes a model of the architecture {name[:40]!r}, which is not supported: "
            f"choose one of {', '.join(FAMILIES)}."
        )
    family = FAMILIES[name]
    own = Entries(files, name, family.varying, skips_zeros=family.is_hybrid)
    values = _values(own, family)
    own.refuse_unread(family.idle)
    text = values
    if len(vocabulary.tokens) > values["vocab_size"]:
        raise ModelError(
            f"{path} has {len(vocabulary.tokens)} tokens, but embeddings of {values['vocab_size']}."
        )
    known: dict[str, Any] = {
        "dtype": _stored_dtype(files),
        "eos_token_ids": vocabulary.end_ids,
        "bos_token_id": vocabulary.token_id("bos"),
        "generation": GenerationDefaults.from_json(metadata, _SAMPLING),
    }
    if tower is not None:
        if ROPE_FACTORS in family.unused(text) and ROPE_FACTORS in own.shapes and name != "gemma4":
            raise own.unsupported(f"{ROPE_FACTORS} beside a vision tower")
        values = tower.values(_with_sections(own, values), vocabulary)
    elif written_family(JsonFile(path, values)) is not None:
        return replace(_written(own, values), **known)
    try:
        config = traced_config(
            Source(path, json.dumps(values), transposed=family.transposed(text)),
            architecture=values["architectures"][0],
            **known,
        )
        names = TensorNames(config, name, family)
    except ModelError as error:
        raise UnsupportedModelError(str(error)) from None
    return _without_mixed_types(config, names.quantised(files))


def read_prediction(files: Sequence[GGUFFile], config: TracedConfig) -> TracedConfig:
    """Return the configuration of the layer of multi-token prediction; `config`: of the model."""
    own = with_source(config, predicts="layer")
    return _without_mixed_types(own, tensor_names(files, own).quantised(files))


def _with_sections(own: Entries, values: Values) -> Values:
    """Add the parts of a head that time, height and width rotate; only images need them."""
    sections = own.arrays.get("rope.dimension_sections")
    if sections is None:
        return values
    rotation = {"mrope_section": sections[:3], "mrope_interleaved": True}
    return values | {"rope_parameters": values["rope_parameters"] | rotation}


def tensor_names(files: Sequence[GGUFFile], config: ModelConfig) -> TensorNames:
    """Return the names of a model's tensors; `config`: of these files."""
    name = str(files[0].metadata["general.architecture"])
    return TensorNames(config, name, FAMILIES[name])


def _written(own: Entries, values: Values) -> ModelConfig:
    config = ModelConfig.from_json(JsonFile(own.path, values), UnsupportedModelError)
    biases: dict[str, Any] = {flag: name in own.shapes for flag, name in _MATRIX_BIASES.items()}
    if ROPE_FACTORS not in own.shapes:
        return replace(config, **biases)
    if config.rope.factors:
        raise UnsupportedModelError(f"{own.path} scales RoPE in two ways, which is not supported.")
    factors = tuple(own.rope_factors(ROPE_FACTORS, config.head_dim // 2))
    return replace(config, rope=replace(config.rope, factors=factors), **biases)


def _values(own: Entries, family: Family) -> Values:
    """Return the values of the model's config.json. Raise ModelError if some are missing or unsupported."""
    if "token_embd.weight" not in own.shapes:
        raise ModelError(f"{own.path} lacks the weights token_embd.weight: download the missing files.")
    vocab_size = own.shapes["token_embd.weight"][0]
    if vocab_size > limits.MAX_VOCAB_SIZE:
        raise ModelError(f"{own.path} has embeddings of {vocab_size} tokens, more than any model.")
    values: Values = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": vocab_size,
        "hidden_size": own.hidden_size,
        "num_hidden_layers": own.num_layers,
        "num_attention_heads": own.heads,
        "num_key_value_heads": own.integer("attention.head_count_kv", own.heads),
        "tie_word_embeddings": "output.weight" not in own.shapes,
        family.eps: own.number(family.eps_entry if family.eps_entry in own else RMS_EPS),
        # The token ids come from the vocabulary.
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    values |= {
        ours: own.integer(key)
        for key, ours in _SIZES.items()
        if key in own or "expert_count" not in own  # with experts in every layer, files may lack one
    }
    if not family.has_own_heads:
        values |= _heads(own, family)
    return values | family.values(own)


def _heads(own: Entries, family: Family) -> Values:
    head_dim, values = own.head_dim, Values()
    if family.has_head_dim:
        values["head_dim"] = head_dim
    elif head_dim * own.heads != own.hidden_size:
        raise own.unsupported("heads whose sizes do not add up to embedding_length")
    if own.integer("attention.value_length", head_dim) != head_dim:
        raise own.unsupported("values of another size than keys")
    rope = own.default_rope()
    rotated = own.integer("rope.dimension_count", head_dim)
    if family.is_partly_rotated:
        rope["partial_rotary_factor"] = rotated / head_dim
    can_rotate = family.is_partly_rotated and int(head_dim * (rotated / head_dim)) == rotated
    if rotated != head_dim and not can_rotate:
        raise own.unsupported("rope.dimension_count other than the size of a head")
    return values | {"rope_parameters": rope}


def _stored_dtype(files: Sequence[GGUFFile]) -> torch.dtype:
    """Return the dtype of most weights, by bytes; quantised weights count as bfloat16."""
    nbytes: Counter[torch.dtype] = Counter()
    for file in files:
        for place in file.tensors.values():
            nbytes[place.type.dtype or torch.bfloat16] += place.nbytes
    return max(nbytes, key=lambda dtype: nbytes[dtype], default=torch.bfloat16)


def _without_mixed_types(config: TracedConfig, quantised: Set[str]) -> TracedConfig:
    """Return the configuration with quantised matrices apart from others, which would be fused with them."""

    def split(fused: Matrix) -> Iterator[Matrix]:
        for are_quantised in (True, False):
            chosen = [
                index for index, name in enumerate(fused.weights) if (name in quantised) == are_quantised
            ]
            if chosen:
                yield replace(
                    fused,
                    name=fused.weights[chosen[0]].removesuffix(".weight"),
                    weights=tuple(fused.weights[index] for index in chosen),
                    part_rows=tuple(fused.part_rows[index] for index in chosen),
                    biases=tuple(fused.biases[index] for index in chosen if fused.biases),
                )

    matrices = tuple(each for fused in config.of_model.matrices for each in split(fused))
    return replace(config, of_model=replace(config.of_model, matrices=matrices))
