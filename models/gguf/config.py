"""The configuration of a model from the metadata of a GGUF file."""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

import torch

from neo_desktop.models.config import (
    GenerationDefaults,
    ModelConfig,
    check_heads,
    stretched_tokens,
)
from neo_desktop.models.experts_config import MAX_EXPERTS, ClampedGate, ExpertsConfig, check_experts
from neo_desktop.models.gguf.container import GGUFFile, NumberArray
from neo_desktop.models.gguf.tensors import ROPE_FACTORS, GGUFTensor
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
from neo_desktop.models.rope import (
    FactorScaling,
    LinearScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
    yarn_temperature,
)


@dataclass(frozen=True, slots=True)
class _Family:
    """The transformers architecture of a llama.cpp architecture, and its fixed flags."""

    architecture: str
    qk_norm: bool = False


FAMILIES = {  # Mistral's and SmolLM's models are also "llama"
    "llama": _Family("LlamaForCausalLM"),
    "qwen2": _Family("Qwen2ForCausalLM"),
    "qwen3": _Family("Qwen3ForCausalLM", qk_norm=True),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", qk_norm=True),
    "gpt-oss": _Family("GptOssForCausalLM"),
}
_PER_LAYER = frozenset(("attention.head_count", "attention.head_count_kv", "feed_forward_length"))
_MIXTRAL = _Family("MixtralForCausalLM")  # "llama" with experts
# Settings of other architectures, and the values with which they have no effect.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            *("logit_scale", "residual_scale", "embedding_scale", "attention.scale"),
            *("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"),
            *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale"),
            *("expert_weights_scale", "expert_weights_norm", "expert_gating_func"),  # a softmax, normalised
            *("expert_group_count", "expert_group_used_count", "interleave_moe_layer_step"),
            *("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"),
            "moe_every_n_layers",
        ),
        (0, 1),
    ),
    **dict.fromkeys(("expert_shared_count", "leading_dense_block_count", "nextn_predict_layers"), (0,)),
    "rope.scaling.yarn_log_multiplier": (0,),
    "attention.causal": (True,),
}
# Entries that are read, or that do not affect inference.
_KNOWN = frozenset(
    (
        *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
        *("attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window"),
        *("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type"),
        *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.finetuned"),
        *("expert_count", "expert_used_count", "expert_feed_forward_length"),
        *("attention.layer_norm_epsilon", "use_parallel_residual", "tensor_data_layout", "pooling_type"),
    )
)


def read_config(files: list[GGUFFile], vocabulary: Vocabulary) -> ModelConfig:
    """Read the configuration from the first part's metadata and the tensors' types and names.

    Raises ModelError for an unsupported architecture and for numbers out of range.
    """
    path = files[0].path
    metadata = JsonFile(path, dict(files[0].metadata))
    name = _architecture(metadata)
    own = entries_of(metadata, name)
    places = {place.name: place for file in files for place in file.tensors.values()}
    _refuse_unsupported(own)
    hidden_size = own.integer("embedding_length", maximum=MAX_HIDDEN_SIZE)
    num_heads = own.integer("attention.head_count", maximum=MAX_HEADS)
    num_kv_heads = own.integer("attention.head_count_kv", num_heads, maximum=MAX_HEADS)
    head_dim = own.integer("attention.key_length", max(hidden_size // num_heads, 1), maximum=MAX_HEAD_DIM)
    check_heads(path, num_heads, num_kv_heads, head_dim, UnsupportedModelError)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.integer(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{path} has {key} other than the size of a head, which is not supported."
            )
    num_layers = own.integer("block_count", maximum=MAX_LAYERS)
    trained_tokens = own.integer("context_length", maximum=MAX_CONTEXT_TOKENS)
    is_gpt_oss = name == "gpt-oss"
    scaling = _scaling(own, files, trained_tokens, head_dim, truncate=not is_gpt_oss)
    rope = RopeConfig(own.number("rope.freq_base", 10_000.0), scaling)
    if rope.theta <= 1:
        raise ModelError(f"{path} has a rope.freq_base of {rope.theta:g}, which is not above 1: correct it.")
    max_context_tokens = stretched_tokens(trained_tokens, rope)
    # llama.cpp reads the window only for gpt-oss.
    window = own.integer("attention.sliding_window", 0, minimum=0) if is_gpt_oss else 0
    is_windowed = 0 < window < max_context_tokens
    experts = _experts(own, name, num_layers, hidden_size, places.keys())
    family = _MIXTRAL if name == "llama" and experts is not None else FAMILIES[name]
    embedding = places.get("token_embd.weight")
    vocab_size = embedding.shape[0] if embedding is not None else len(vocabulary.tokens)
    if len(vocabulary.tokens) > vocab_size:
        raise ModelError(f"{path} has {len(vocabulary.tokens)} tokens, but embeddings of {vocab_size}.")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ModelError(f"{path} has embeddings of {vocab_size} tokens, more than any model.")
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=own.integer("feed_forward_length", maximum=MAX_INTERMEDIATE_SIZE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=own.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tie_word_embeddings="output.weight" not in places,
        layer_windows=tuple(
            window if is_windowed and layer % 2 == 0 else None for layer in range(num_layers)
        ),
        dtype=stored_dtype(files),
        qkv_bias="blk.0.attn_q.bias" in places,
        output_bias="blk.0.attn_output.bias" in places,
        mlp_bias="blk.0.ffn_down.bias" in places,
        qk_norm=family.qk_norm,
        attention_sinks=is_gpt_oss,
        experts=experts,
        eos_token_ids=vocabulary.end_ids,
        bos_token_id=vocabulary.token_id("bos"),
        generation=generation_defaults(metadata),
    )


def _architecture(metadata: JsonFile) -> str:
    name = metadata.text("general.architecture")
    check_is_model(metadata)
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{metadata.path} describes a model of the architecture {name[:40]!r}, which is not supported: "
            f"choose one of {', '.join(FAMILIES)} (Llama, Mistral, Mixtral, SmolLM, Qwen2, Qwen2.5, Qwen3, "
            "Qwen3-MoE, gpt-oss), or one that transformers computes."
        )
    return name


def entries_of(
    metadata: JsonFile, architecture: str, *, skips_zeros: bool = False, varying: Set[str] = frozenset()
) -> JsonFile:
    """Return the entries of an architecture without its prefix; an array of equal numbers becomes one number.

    Args:
        skips_zeros: some layers lack the operation of an entry, so zeros do not count.
        varying: entries that may differ between layers; the largest number is returned.

    Raises:
        UnsupportedModelError: layers have different sizes.
        ModelError: an array's length differs from the number of layers.
    """
    path, prefix = metadata.path, f"{architecture}."
    values = {key[len(prefix) :]: value for key, value in metadata.values.items() if key.startswith(prefix)}
    own = JsonFile(path, values)
    for key, value in values.items():
        if key not in _PER_LAYER or not isinstance(value, NumberArray):
            continue
        numbers, num_layers = value.data.tolist(), own.integer("block_count", maximum=MAX_LAYERS)
        if len(numbers) != num_layers:
            raise ModelError(
                f"{path} has {len(numbers)} numbers of {key} for {num_layers} layers: download it again."
            )
        sizes = {number for number in numbers if number or not skips_zeros} or {0}
        if len(sizes) > 1 and key not in varying:
            raise UnsupportedModelError(f"{path} has layers with different {key}, which is not supported.")
        values[key] = max(sizes)
    return own


def check_is_model(metadata: JsonFile) -> None:
    """Raise ModelError for a GGUF file of another kind (an adapter)."""
    if metadata.text("general.type", "model") != "model":
        raise ModelError(f"{metadata.path} is not a model, but {metadata.raw('general.type')!r} for one.")


def _experts(
    own: JsonFile, name: str, num_layers: int, hidden_size: int, tensors: Set[str]
) -> ExpertsConfig | None:
    count = own.integer("expert_count", 0, minimum=0, maximum=MAX_EXPERTS)
    if count == 0:
        return None
    if name not in ("llama", "qwen3moe", "gpt-oss"):
        raise UnsupportedModelError(
            f"{own.path} has a mixture of experts unlike Mixtral's and Qwen3's, which is not supported: "
            "choose another model."
        )
    layers = tuple(layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in tensors)
    size = "expert_feed_forward_length"
    experts = ExpertsConfig(
        count=count,
        per_token=own.integer("expert_used_count"),
        intermediate_size=own.integer(
            size if size in own else "feed_forward_length", maximum=MAX_INTERMEDIATE_SIZE
        ),
        layers=layers or tuple(range(num_layers)),
        router_bias="blk.0.ffn_gate_inp.bias" in tensors,
        bias="blk.0.ffn_down_exps.bias" in tensors,
        gating=ClampedGate() if name == "gpt-oss" else "silu",
    )
    check_experts(own.path, experts, hidden_size, UnsupportedModelError)
    return experts


def _refuse_unsupported(own: JsonFile) -> None:
    for key, value in own.values.items():
        is_number = isinstance(value, int | float)
        if key not in _KNOWN and not (is_number and value in _NEUTRAL.get(key, ())):
            raise UnsupportedModelError(
                f"{own.path} sets {key}, which is not supported: choose another model."
            )


def _scaling(
    own: JsonFile, files: list[GGUFFile], trained_tokens: int, head_dim: int, *, truncate: bool
) -> Scaling | None:
    kind = own.text("rope.scaling.type", "linear")  # as in llama.cpp
    key = "rope.scaling.factor" if "rope.scaling.factor" in own else "rope.scale_linear"
    factor = 1.0 if own.raw(key) in (None, 0) else own.number(key)
    attention_factor = own.number("rope.scaling.attn_factor", 1.0)
    factors = _factors(files, head_dim)
    is_stretched = kind == "yarn" or (kind == "linear" and factor != 1)
    if (factors is not None and is_stretched) or (kind != "yarn" and attention_factor != 1):
        raise UnsupportedModelError(f"{own.path} scales RoPE in two ways, which is not supported.")
    match kind:
        case "none":
            return factors
        case "linear":
            return factors if factor == 1 else LinearScaling(factor)
        case "yarn":
            original = own.integer("rope.scaling.original_context_length", trained_tokens)
            factor = own.number("rope.scaling.factor", trained_tokens / original)
            return YarnScaling(
                factor=factor,
                original_max_tokens=original,
                beta_fast=own.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=own.number("rope.scaling.yarn_beta_slow", 1.0),
                truncate=truncate,
                attention_factor=attention_factor * yarn_temperature(factor),
            )
    raise UnsupportedModelError(f"{own.path} asks for the rope type {kind[:40]!r}, which is not supported.")


def _factors(files: list[GGUFFile], head_dim: int) -> FactorScaling | None:
    """Return the frequency factors stored in a file; None: no file has them."""
    for file in files:
        place = file.tensors.get(ROPE_FACTORS)
        if place is not None:
            tensor = GGUFTensor(file, place)
            if place.shape != (head_dim // 2,) or place.type.dtype is None:
                raise ModelError(
                    f"{file.path} has {ROPE_FACTORS} with the shape {list(place.shape)}: download it again."
                )
            factors = tensor.dequantised(0, head_dim // 2)
            if not ((factors > 1e-6) & (factors < 1e9)).all():
                raise ModelError(
                    f"{file.path} has {ROPE_FACTORS} that are not valid factors: download it again."
                )
            return FactorScaling(tuple(factors.tolist()))
    return None


def stored_dtype(files: list[GGUFFile]) -> torch.dtype:
    """Return the dtype of most weights, by bytes; quantised weights count as bfloat16."""
    nbytes: Counter[torch.dtype] = Counter()
    for file in files:
        for place in file.tensors.values():
            nbytes[place.type.dtype or torch.bfloat16] += place.nbytes
    return max(nbytes, key=lambda dtype: nbytes[dtype], default=torch.bfloat16)


def generation_defaults(metadata: JsonFile) -> GenerationDefaults:
    """Return the sampling parameters that the file recommends."""

    def number(key: str) -> float | None:
        key = f"general.sampling.{key}"
        return None if key not in metadata else metadata.number(key, allow_zero=True)

    top_k = "general.sampling.top_k"
    values = {
        "temperature": number("temp"),
        "top_p": number("top_p"),
        "min_p": number("min_p"),
        "repetition_penalty": number("penalty_repeat"),
    }
    return GenerationDefaults.within_bounds(
        values, top_k=None if top_k not in metadata else metadata.integer(top_k, minimum=0)
    )
