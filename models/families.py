"""The families that the project's own decoder supports, and the meaning of their config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from neo_desktop.models.experts_config import MAX_EXPERTS, ClampedGate, ExpertsConfig, Gating, check_experts
from neo_desktop.models.json_file import JsonFile, ModelError, NotWrittenError
from neo_desktop.models.limits import MAX_INTERMEDIATE_SIZE
from neo_desktop.models.safetensors.scheme import read_scheme

# The keys that every configuration class has, with common defaults; a class may override them.
_USUAL: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MISTRAL = _USUAL | {
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = _USUAL | {
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_QWEN_WINDOWS = {"max_window_layers": 28, "layer_types": None}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Keys that the code of transformers reads from any configuration, and the values that mean "not set".
_GENERAL = {"is_causal": True, "per_layer_config": None, "attention_chunk_size": None}


# Keys without a default that every family reads.
_OF_ALL = frozenset(
    (
        *("head_dim", "num_key_value_heads", "num_experts", "num_local_experts", "dtype", "torch_dtype"),
        *("rope_scaling", "partial_rotary_factor", "original_max_position_embeddings"),
    )
)


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture that the project's own decoder supports.

    Args:
        defaults: the keys of the configuration class in transformers that its code reads, with their
            defaults; the code ignores other keys of config.json.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    attention_sinks: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"
    has_experts_in_one: bool = False  # one tensor holds the experts of a layer
    experts: "ExpertKeys | None" = None


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Names of the sizes of a mixture of experts in config.json.

    Args:
        count: names of the number of experts, the one with precedence first.
        normalises: None: read from the file.
    """

    count: tuple[str, ...]
    intermediate_size: str
    normalises: bool | None = None
    has_bias: bool = False
    is_clamped: bool = False


FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        _MISTRAL
        | {
            "intermediate_size": 11_008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    # With `layer_types`, transformers makes it Ministral.
    Family("MistralForCausalLM", "mistral", _MISTRAL | {"sliding_window": 4096, "layer_types": None}),
    Family("Qwen2ForCausalLM", "qwen2", _QWEN | _QWEN_WINDOWS, qkv_bias=True),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        _QWEN | _QWEN_WINDOWS | {"head_dim": 128, "attention_bias": False},
        qk_norm=True,
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        _MISTRAL
        | {
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        experts=ExpertKeys(("num_experts", "num_local_experts"), "intermediate_size", normalises=True),
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _QWEN
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        qk_norm=True,
        experts=ExpertKeys(("num_local_experts", "num_experts"), "moe_intermediate_size"),
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        _USUAL
        | {
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": _GPT_OSS_ROPE,
            "sliding_window": 128,
            "layer_types": None,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        attention_sinks=True,
        dtype="bfloat16",
        has_experts_in_one=True,
        experts=ExpertKeys(
            ("num_experts", "num_local_experts"),
            "intermediate_size",
            normalises=True,
            has_bias=True,
            is_clamped=True,
        ),
    ),
)
# Architectures (prefixes) with activations beyond the range of float16 (65,504).
_BEYOND_FLOAT16 = ("Gemma2", "Gemma3", "Gemma4", "Glm4", "GptOss", "PLaMo2", "Plamo2", "T5")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "Model")


def exceeds_float16(architecture: str) -> bool:
    """Return True if the model was trained in bfloat16 and overflows in float16."""
    return architecture.startswith(_BEYOND_FLOAT16)


def family_of(file: JsonFile) -> Family:
    """Return the family that config.json names. Raise ModelError if it is not supported."""
    family = written_family(file)
    if family is not None:
        return family
    names = file.raw("architectures") or [file.raw("model_type")]
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ModelError(f"{file.path} describes {names}, which is not supported: choose a model of {supported}.")


def written_family(file: JsonFile) -> Family | None:
    """Return the family that config.json names; None if the project has no decoder for it.

    As in transformers, `model_type` selects the code. Without one, `architectures` does.
    """
    model_type, names = file.raw("model_type"), file.raw("architectures")
    for family in FAMILIES:
        if model_type == family.model_type:
            return family if is_language_model(names) else None
        if model_type is None and names == [family.architecture]:
            return family
    return None


def is_language_model(names: object) -> bool:
    """Return True if `architectures` of config.json names a decoder with a language-model head."""
    if not names:
        return True
    return isinstance(names, list) and any(str(name).endswith(_LANGUAGE_MODELS) for name in names)


def described(file: JsonFile, family: Family) -> JsonFile:
    """Return the keys of config.json that the family reads, with the defaults of its configuration class.

    Raise NotWrittenError if the decoder lacks a feature that the file asks for, and ModelError if the weights
    are quantised in an unsupported way.
    """
    read_scheme(file, has_experts_in_one=family.has_experts_in_one)  # raises for unsupported schemes
    read = {key: value for key, value in file.values.items() if key in family.defaults or key in _OF_ALL}
    whole = JsonFile(file.path, {**family.defaults, **read})
    if whole.raw("rope_parameters") is None:
        whole.values["rope_parameters"] = family.defaults["rope_parameters"]
    activation = whole.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise NotWrittenError(f"{file.path} has hidden_act {activation!r}; the decoder here computes 'silu'.")
    for key, neutral in _GENERAL.items():
        if key in file and file.raw(key) != neutral:
            raise NotWrittenError(f"{file.path} sets {key}, which the decoder here does not read.")
    return whole


def experts_of(
    file: JsonFile, family: Family, num_layers: int, hidden_size: int, unsupported: type[ModelError]
) -> ExpertsConfig | None:
    """Return the sizes of the mixture of experts; None for a dense model."""
    keys = family.experts
    if keys is None:
        return None
    count = file.integer(next(key for key in keys.count if key in file), minimum=0, maximum=MAX_EXPERTS)
    step = file.integer("decoder_sparse_step", 1)
    dense = file.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelError(
            f"{file.path} has 'mlp_only_layers' that are not a list of layers: correct the file."
        )
    layers = [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0]
    if count == 0 or not layers:
        return None
    gating: Gating = "silu"
    if keys.is_clamped:
        gating = ClampedGate(file.number("swiglu_alpha"), file.number("swiglu_limit"))
    experts = ExpertsConfig(
        count=count,
        per_token=file.integer("num_experts_per_tok"),
        intermediate_size=file.integer(keys.intermediate_size, maximum=MAX_INTERMEDIATE_SIZE),
        layers=tuple(layers),
        normalises=file.boolean("norm_topk_prob") if keys.normalises is None else keys.normalises,
        router_bias=keys.has_bias,
        bias=keys.has_bias,
        gating=gating,
    )
    check_experts(file.path, experts, hidden_size, unsupported)
    return experts


def stored_dtype(file: JsonFile, silent: str) -> torch.dtype:
    """Return the dtype of the weights, `silent` if none is named. Raise ModelError if it is not supported."""
    name = file.text("dtype", file.text("torch_dtype", silent)).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(
            f"{file.path} names the dtype {name!r}, which is not supported: {', '.join(_DTYPES)} are."
        )
    return _DTYPES[name]


def layer_windows(file: JsonFile, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return the number of tokens that each layer attends to; None: all.

    Without `layer_types`, these layers have a window: Qwen2's and Qwen3's from `max_window_layers` on, every
    other layer of gpt-oss, and every layer of the other families.
    """
    is_on = file.boolean("use_sliding_window", True) and file.raw("sliding_window") is not None
    window = file.integer("sliding_window") if is_on else None
    kinds = file.raw("layer_types")
    if kinds is not None:
        return _windows_of(file, kinds, window, num_layers)
    if window is None:
        return (None,) * num_layers
    layers = range(num_layers)
    if "max_window_layers" in file:
        first = file.integer("max_window_layers", minimum=0)
        return tuple(window if layer >= first else None for layer in layers)
    is_every_other = family.model_type == "gpt_oss"
    return tuple(None if is_every_other and layer % 2 else window for layer in layers)


def _windows_of(file: JsonFile, kinds: object, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    known = ("full_attention", "attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise NotWrittenError(
            f"{file.path} needs {num_layers} layer_types of 'full_attention' or 'sliding_attention' for the "
            "decoder here."
        )
    if window is None and "sliding_attention" in kinds:
        raise ModelError(
            f"{file.path} has layer_types of 'sliding_attention', but no sliding_window: correct the file."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
