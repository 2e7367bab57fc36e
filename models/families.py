"""What the architectures that are supported mean by their config.json."""

from dataclasses import dataclass

import torch

from neo_desktop.models.experts_config import MAX_EXPERTS, ClampedGate, ExpertsConfig, check_experts
from neo_desktop.models.json_file import JsonFile, ModelError
from neo_desktop.models.limits import MAX_INTERMEDIATE_SIZE
from neo_desktop.models.safetensors.scheme import read_scheme


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes, and what its config.json means where it is silent."""

    architecture: str
    model_type: str
    max_position_embeddings: int
    head_dim: int | None = None
    reads_attention_bias: bool = False
    attention_bias: bool = False  # where it is read
    attention_sinks: bool = False
    reads_mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    dtype: str = "float32"
    has_experts_in_one: bool = False  # a tensor for all experts of a layer
    experts: "ExpertKeys | None" = None


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """What config.json calls the sizes of experts, and what it means where it is silent."""

    count: tuple[tuple[str, ...], int]
    per_token: int
    intermediate_size: str
    normalises: bool | None = None  # None: the file says it
    has_bias: bool = False  # experts and the router
    is_clamped: bool = False


FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        max_position_embeddings=2048,
        reads_attention_bias=True,
        reads_mlp_bias=True,
        bos_token_ids=(1,),
        eos_token_ids=(2,),
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        max_position_embeddings=131_072,
        bos_token_ids=(1,),
        eos_token_ids=(2,),
    ),
    Family("Qwen2ForCausalLM", "qwen2", max_position_embeddings=32_768, qkv_bias=True),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        max_position_embeddings=32_768,
        head_dim=128,
        reads_attention_bias=True,
        qk_norm=True,
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        max_position_embeddings=131_072,
        bos_token_ids=(1,),
        eos_token_ids=(2,),
        rms_norm_eps=1e-5,
        experts=ExpertKeys((("num_local_experts",), 8), 2, "intermediate_size", normalises=True),
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        max_position_embeddings=32_768,
        reads_attention_bias=True,
        qk_norm=True,
        # transformers writes the count under another name than Qwen.
        experts=ExpertKeys((("num_experts", "num_local_experts"), 128), 8, "moe_intermediate_size"),
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        max_position_embeddings=131_072,
        head_dim=64,
        reads_attention_bias=True,
        attention_bias=True,
        attention_sinks=True,
        rms_norm_eps=1e-5,
        dtype="bfloat16",
        has_experts_in_one=True,
        experts=ExpertKeys(
            (("num_local_experts",), 128),
            4,
            "intermediate_size",
            normalises=True,
            has_bias=True,
            is_clamped=True,
        ),
    ),
)
_DEFAULT_WINDOW_TOKENS = 4096
_GPT_OSS_WINDOW_TOKENS = 128
# Whose activations reach beyond the numbers of float16 (65,504), by the beginning of the architecture's name.
_BEYOND_FLOAT16 = ("Gemma2", "Gemma3", "Gemma4", "Glm4", "GptOss", "PLaMo2", "Plamo2", "T5")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def exceeds_float16(architecture: str) -> bool:
    """Return whether a model was trained in bfloat16 and gives infinities in float16."""
    return architecture.startswith(_BEYOND_FLOAT16)


def family_of(file: JsonFile) -> Family:
    """Return what config.json names; ModelError for what is not supported."""
    family = written_family(file)
    if family is not None:
        return family
    names = file.raw("architectures") or [file.raw("model_type")]
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ModelError(f"{file.path} describes {names}, which is not supported: choose a model of {supported}.")


def written_family(file: JsonFile) -> Family | None:
    """Return what config.json names; None: there is no decoder of ours for it."""
    names = file.raw("architectures") or [file.raw("model_type")]
    for family in FAMILIES:
        if names in ([family.architecture], [family.model_type]):
            return family
    return None


def refuse_unsupported(file: JsonFile, family: Family) -> None:
    """Raise ModelError for what would be computed otherwise."""
    read_scheme(file, has_experts_in_one=family.has_experts_in_one)  # complains of what is not supported
    activation = file.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(
            f"{file.path} has hidden_act {activation!r}, which is not supported: choose a model with 'silu'."
        )


def experts_of(file: JsonFile, family: Family, num_layers: int, hidden_size: int) -> ExpertsConfig | None:
    """Return the sizes of experts; None where there are none."""
    keys = family.experts
    if keys is None:
        return None
    names, default = keys.count
    key = next((name for name in names if name in file), names[0])
    count = file.integer(key, default, minimum=0, maximum=MAX_EXPERTS)
    step = file.integer("decoder_sparse_step", 1)
    dense = file.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelError(f"{file.path} has 'mlp_only_layers' that are no list of layers: correct the file.")
    layers = [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0]
    if count == 0 or not layers:
        return None
    experts = ExpertsConfig(
        count=count,
        per_token=file.integer("num_experts_per_tok", keys.per_token),
        intermediate_size=file.integer(keys.intermediate_size, maximum=MAX_INTERMEDIATE_SIZE),
        layers=tuple(layers),
        normalises=file.boolean("norm_topk_prob", False) if keys.normalises is None else keys.normalises,
        router_bias=keys.has_bias,
        bias=keys.has_bias,
        clamped=_clamped_gate(file) if keys.is_clamped else None,
    )
    check_experts(file.path, experts, hidden_size)
    return experts


def _clamped_gate(file: JsonFile) -> ClampedGate:
    usual = ClampedGate()
    return ClampedGate(file.number("swiglu_alpha", usual.alpha), file.number("swiglu_limit", usual.limit))


def stored_dtype(file: JsonFile, family: Family) -> torch.dtype:
    """Return the type of the weights; ModelError for one that is not supported."""
    name = file.text("dtype", file.text("torch_dtype", family.dtype)).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(
            f"{file.path} names the dtype {name!r}, which is not supported: {', '.join(_DTYPES)} are."
        )
    return _DTYPES[name]


def layer_windows(file: JsonFile, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: one window for all layers. Qwen: only with `use_sliding_window`, on the layers named.

    gpt-oss: every other layer, if none are named.
    """
    full: tuple[int | None, ...] = (None,) * num_layers
    if family.model_type in ("mistral", "mixtral"):
        # `null` switches the window off; silence means the first Mistral's, of Mixtral none.
        silent = _DEFAULT_WINDOW_TOKENS if family.model_type == "mistral" else None
        window = file.raw("sliding_window") if "sliding_window" in file else silent
        return full if window is None else (file.integer("sliding_window", window),) * num_layers
    if family.model_type == "gpt_oss":
        window = file.integer("sliding_window", _GPT_OSS_WINDOW_TOKENS)
        every_other = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
        return _windows_of(file, file.raw("layer_types") or every_other, window, num_layers)
    if family.model_type == "llama" or not file.boolean("use_sliding_window", False):
        return full
    window = file.integer("sliding_window", _DEFAULT_WINDOW_TOKENS)
    if family.experts is not None:  # Qwen's experts came when windows were the same in all layers
        return (window,) * num_layers
    kinds = file.raw("layer_types")
    if kinds is None:
        first = file.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return _windows_of(file, kinds, window, num_layers)


def _windows_of(file: JsonFile, kinds: object, window: int, num_layers: int) -> tuple[int | None, ...]:
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ModelError(
            f"{file.path} needs {num_layers} layer_types of 'full_attention' or 'sliding_attention': "
            "correct the file."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
