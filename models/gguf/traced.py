"""Architectures computed by the code of `transformers`: metadata → the values of a config.json.

Tensor names come from `gguf`, llama.cpp's package. Reading undoes the changes that its converter makes to
numbers. Missing entries take its defaults; an unknown entry is an error that names it.
"""

import json
from collections.abc import Iterator
from typing import Any

from neo_desktop.models.gguf.config import check_is_model, entries_of, generation_defaults, stored_dtype
from neo_desktop.models.gguf.container import GGUFFile, NumberArray, TensorPlace
from neo_desktop.models.gguf.family import YARN, Described, Family
from neo_desktop.models.gguf.hybrids import HYBRIDS, PREDICTS_MORE, decay_logarithm
from neo_desktop.models.gguf.mixtures import MIXTURES
from neo_desktop.models.gguf.parameters import Parameters, joined, values_of, without_mixed_types
from neo_desktop.models.gguf.tensors import GGUFTensor, checked
from neo_desktop.models.gguf.vocabulary import Vocabulary
from neo_desktop.models.json_file import JsonFile, ModelError, UnsupportedModelError
from neo_desktop.models.limits import (
    MAX_CONTEXT_TOKENS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_INTERMEDIATE_SIZE,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
)
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.traced.config import TracedConfig, traced_config
from neo_desktop.models.traced.source import Source

_INTEGERS = {  # entry -> key of config.json, maximum
    "block_count": ("num_hidden_layers", MAX_LAYERS),
    "context_length": ("max_position_embeddings", MAX_CONTEXT_TOKENS),
    "embedding_length": ("hidden_size", MAX_HIDDEN_SIZE),
    "feed_forward_length": ("intermediate_size", MAX_INTERMEDIATE_SIZE),
    "attention.head_count": ("num_attention_heads", MAX_HEADS),
}
_COMMON = frozenset(
    (
        *_INTEGERS,
        *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("rope.dimension_count", "rope.freq_base", "vocab_size"),
    )
)
_NONE_IF_ZERO = frozenset(("expert_count", "expert_used_count", "attention.sliding_window"))


def _gemma2(described: Described) -> dict[str, Any]:
    own = described.own
    return {
        "query_pre_attn_scalar": described.scale_of(46),
        "attn_logit_softcapping": own.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": own.number("final_logit_softcapping", 30.0),
        "sliding_window": own.integer("attention.sliding_window", 4096),
        "layer_types": described.layer_types(2),
    }


def _gemma3(described: Described) -> dict[str, Any]:
    """Layers with a window have their own RoPE base; position scaling applies to the other layers only."""
    own = described.own
    every: dict[str, Any] = {"rope_type": "default", "rope_theta": own.number("rope.freq_base", 10_000.0)}
    scaled = own.text("rope.scaling.type", "none")
    if scaled not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{own.path} asks for the rope type {scaled[:40]!r}, which is not supported."
        )
    if scaled == "linear":
        every |= {"rope_type": "linear", "factor": own.number("rope.scaling.factor")}
    window = own.integer("attention.sliding_window", 0, minimum=0)
    layers = described.values["num_hidden_layers"]
    return {
        "query_pre_attn_scalar": described.scale_of(62),
        "final_logit_softcapping": own.number("final_logit_softcapping", 0.0, allow_zero=True) or None,
        "sliding_window": window or None,
        "layer_types": described.layer_types(6) if window else ["full_attention"] * layers,
        "rope_parameters": {
            "full_attention": every,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": own.number("rope.freq_base_swa", 10_000.0),
            },
        },
    }


def _phi3(described: Described) -> dict[str, Any]:
    """Zero means no window."""
    return {"sliding_window": described.own.integer("attention.sliding_window", 0, minimum=0) or None}


def _olmo(described: Described) -> dict[str, Any]:
    """Only OLMo 3 has windows; YaRN scales its other layers' RoPE."""
    if "attention.sliding_window" not in described.own:
        return {}
    rope = described.yarn()
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": described.own.integer("attention.sliding_window"),
        "layer_types": described.layer_types(4),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        },
    }


def _granite(described: Described) -> dict[str, Any]:
    own = described.own
    return {
        "attention_multiplier": own.number("attention.scale", described.head_dim**-0.5),
        "embedding_multiplier": own.number("embedding_scale", 1.0),
        "residual_multiplier": own.number("residual_scale", 1.0),
        "logits_scaling": own.number("logit_scale"),
    }


def _stablelm(described: Described) -> dict[str, Any]:
    """The tensors decide, because older files lack the entries."""
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in described.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in described.tensors,
    }


_WINDOWS = frozenset(("attention.sliding_window", "attention.sliding_window_pattern"))
_RMS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
_EPS = "attention.layer_norm_epsilon"
FAMILIES = (
    {
        "gemma2": Family(
            "gemma2",
            "Gemma2ForCausalLM",
            _RMS,
            _gemma2,
            _WINDOWS | {"attn_logit_softcapping", "final_logit_softcapping"},
            has_head_dim=True,
            shifts_norms=True,
        ),
        "gemma3": Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _RMS,
            _gemma3,
            _WINDOWS
            | {"final_logit_softcapping", "rope.scaling.type", "rope.scaling.factor", "rope.freq_base_swa"},
            has_head_dim=True,
            shifts_norms=True,
        ),
        "granite": Family(
            "granite",
            "GraniteForCausalLM",
            _RMS,
            _granite,
            frozenset(("attention.scale", "embedding_scale", "residual_scale", "logit_scale")),
            rotates_neighbours=True,
        ),
        "olmo2": Family("olmo2", "Olmo2ForCausalLM", _RMS, _olmo, _WINDOWS | YARN),
        "phi3": Family(
            "phi3",
            "Phi3ForCausalLM",
            _RMS,
            _phi3,
            # The original context length matters only with scaling factors, which would be tensors.
            frozenset(("attention.sliding_window", "rope.scaling.original_context_length")),
            is_partly_rotated=True,
        ),
        "smollm3": Family(
            "smollm3",
            "SmolLM3ForCausalLM",
            _RMS,
            lambda _: {"no_rope_layer_interval": 4},  # fixed in llama.cpp
            rotates_neighbours=True,
        ),
        "stablelm": Family(
            "stablelm",
            "StableLmForCausalLM",
            (_EPS, "layer_norm_eps"),
            _stablelm,
            frozenset(("use_parallel_residual",)),
            is_partly_rotated=True,
        ),
        "starcoder2": Family("starcoder2", "Starcoder2ForCausalLM", (_EPS, "norm_epsilon")),
    }
    | HYBRIDS
    | MIXTURES
)
"""Keys are llama.cpp's names of architectures."""


def read_traced(files: list[GGUFFile], vocabulary: Vocabulary) -> TracedConfig:
    """Read the configuration of a model for the code of `transformers`; see `gguf.config.read_config`.

    Raises:
        UnsupportedModelError: an entry or tensor is unknown, transformers is not installed, or it cannot cut
            the model into stages.
        ModelError: an entry is missing or out of range.
    """
    path = files[0].path
    metadata = JsonFile(path, dict(files[0].metadata))
    check_is_model(metadata)
    name = metadata.text("general.architecture")
    family = FAMILIES[name]
    values = _config_json(files, name, family)
    if len(vocabulary.tokens) > values["vocab_size"]:
        raise ModelError(
            f"{path} has {len(vocabulary.tokens)} tokens, but embeddings of {values['vocab_size']}."
        )
    try:
        config = traced_config(
            Source(path, json.dumps(values), transposed=family.transposed(values)),
            path.stat().st_mtime_ns,
            architecture=values["architectures"][0],
            max_context_tokens=values["max_position_embeddings"],
            dtype=stored_dtype(files),
            eos_token_ids=vocabulary.end_ids,
            bos_token_id=vocabulary.token_id("bos"),
            generation=generation_defaults(metadata),
        )
        parameters = _parameters(name, config)
    except ModelError as error:
        raise UnsupportedModelError(str(error)) from None
    quantised = {
        parameter
        for file in files
        for place in file.tensors.values()
        if place.type.dtype is None
        for parameter, _, _ in parameters.of(place)
    }
    return without_mixed_types(config, quantised)


def read_traced_tensors(files: list[GGUFFile], config: TracedConfig) -> dict[str, StoredTensor]:
    """Return the tensors of every part, by parameter name.

    Raises:
        UnsupportedModelError: the model of `transformers` lacks the tensor's parameter.
        ModelError: a tensor is duplicate, or neither matrix nor vector.
    """
    architecture = str(files[0].metadata["general.architecture"])
    family, parameters = FAMILIES[architecture], _parameters(architecture, config)

    unused = family.unused(values_of(config))

    def named() -> Iterator[tuple[str, GGUFTensor]]:
        for file in files:
            for place in file.tensors.values():
                if place.name in unused:
                    continue
                targets = parameters.of(place)
                if not targets:
                    raise UnsupportedModelError(
                        f"{file.path} has {place.name}, which {config.architecture} of transformers lacks."
                    )
                kind = place.name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
                is_rotated = family.rotates_neighbours and kind in ("attn_q", "attn_k")
                is_shifted = family.shifts_norms and kind.endswith("norm") and kind != "ssm_norm"
                heads = config.head_dim if is_rotated else None
                undo = decay_logarithm if kind == "ssm_a" else None
                shift = 1.0 if is_shifted else 0.0
                part = family.by_head.get(kind)
                for name, own, order in targets:
                    if part is not None and part.is_transposed:
                        yield name, _transposed(file, own)
                    else:
                        yield name, parameters.shaped(name, GGUFTensor(file, own, heads, shift, order, undo))

    return joined(checked(named()))


def _transposed(file: GGUFFile, place: TensorPlace) -> GGUFTensor:
    rows, columns = place.shape
    return GGUFTensor(
        file, place, undo=lambda numbers: numbers.reshape(rows, columns).t(), reshaped=(columns, rows)
    )


def _parameters(architecture: str, config: TracedConfig) -> Parameters:
    family = FAMILIES[architecture]
    orders = family.orders(values_of(config))
    return Parameters(config, architecture, family.renamed, orders, family.by_head)


def _config_json(files: list[GGUFFile], name: str, family: Family) -> dict[str, Any]:
    """Return the values of the model's config.json. Raise ModelError if some are missing or unsupported."""
    path = files[0].path
    metadata = JsonFile(path, dict(files[0].metadata))
    own = entries_of(metadata, name, skips_zeros=family.is_hybrid, varying=family.varying)
    arrays = {
        key.removeprefix(f"{name}."): value.data.tolist()
        for key, value in metadata.values.items()
        if key.startswith(f"{name}.") and isinstance(value, NumberArray)
    }
    for key, value in own.values.items():
        is_known = key in _COMMON or key in family.keys or key == family.eps[0]
        if not is_known and not (key in _NONE_IF_ZERO and value == 0):
            raise UnsupportedModelError(f"{path} sets {key}, which is not supported: choose another model.")
    shapes = {place.name: place.shape for file in files for place in file.tensors.values()}
    values: dict[str, Any] = {
        ours: own.integer(key, maximum=most)
        for key, (ours, most) in _INTEGERS.items()
        if key in own or "expert_count" not in own  # with experts in every layer, files may lack one
    }
    values["num_hidden_layers"] -= own.integer(PREDICTS_MORE, 0, minimum=0)
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = own.integer("attention.head_count_kv", heads, maximum=MAX_HEADS)
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{path} lacks the weights token_embd.weight: download the missing files.")
    values["vocab_size"] = shapes["token_embd.weight"][0]
    if values["vocab_size"] > MAX_VOCAB_SIZE:
        raise ModelError(f"{path} has embeddings of {values['vocab_size']} tokens, more than any model.")
    head_dim = 0
    if not family.has_own_heads:
        head_dim = _head_dim(own, family, values)
    values |= {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "tie_word_embeddings": "output.weight" not in shapes,
        family.eps[1]: own.number(family.eps[0] if family.eps[0] in own else _RMS[0]),
        # The token ids come from the vocabulary.
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    described = Described(own, values, head_dim, frozenset(shapes), arrays, lambda name: _floats(files, name))
    return values | family.others(described)


def _head_dim(own: JsonFile, family: Family, values: dict[str, Any]) -> int:
    """Return the size of a head, and add it and RoPE's parameters to the values of config.json."""
    path, heads, hidden_size = own.path, values["num_attention_heads"], values["hidden_size"]
    head_dim = own.integer("attention.key_length", max(hidden_size // heads, 1), maximum=MAX_HEAD_DIM)
    if family.has_head_dim:
        values["head_dim"] = head_dim
    elif head_dim * heads != hidden_size:
        raise UnsupportedModelError(f"{path} has heads whose sizes do not add up to embedding_length.")
    if own.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{path} has values of another size than keys, which is not supported.")
    rope = {"rope_type": "default", "rope_theta": own.number("rope.freq_base", 10_000.0)}
    rotated = own.integer("rope.dimension_count", head_dim, maximum=MAX_HEAD_DIM)
    if family.is_partly_rotated:
        rope["partial_rotary_factor"] = rotated / head_dim
    can_rotate = family.is_partly_rotated and int(head_dim * (rotated / head_dim)) == rotated
    if rotated != head_dim and not can_rotate:
        raise UnsupportedModelError(
            f"{path} has rope.dimension_count other than the size of a head, which is not supported."
        )
    values["rope_parameters"] = rope
    return head_dim


def _floats(files: list[GGUFFile], name: str) -> list[float]:
    for file in files:
        place = file.tensors.get(name)
        if place is not None and len(place.shape) == 1 and place.type.dtype is not None:
            return [float(number) for number in GGUFTensor(file, place).dequantised(0, place.shape[0])]
    return []
