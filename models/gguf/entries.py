"""The entries of a model's architecture in a GGUF file, and the sizes of its tensors."""

from collections.abc import Sequence, Set
from typing import Any

from neo_desktop.models import limits
from neo_desktop.models.experts_config import MAX_EXPERTS
from neo_desktop.models.gguf.container import GGUFFile, NumberArray
from neo_desktop.models.gguf.tensors import GGUFTensor
from neo_desktop.models.json_file import JsonFile, ModelError, UnsupportedModelError

RMS_EPS, NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
PREDICTING_LAYERS, _PATTERN = "nextn_predict_layers", "attention.sliding_window_pattern"
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
# Entries that do not affect inference; files may have either epsilon.
_IDLE = frozenset(
    (
        *(RMS_EPS, NORM_EPS, "vocab_size", "tensor_data_layout", "pooling_type"),
        *("rope.scaling.finetuned", "use_parallel_residual"),
    )
)
_OF_YARN = tuple(
    f"rope.scaling.{key}" for key in ("factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow")
)
# Settings of some architectures, and the values with which they have no effect.
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
    **dict.fromkeys(
        (
            *("expert_count", "expert_used_count", "expert_shared_count", "attention.sliding_window"),
            *("leading_dense_block_count", PREDICTING_LAYERS, "rope.scaling.yarn_log_multiplier"),
        ),
        (0,),
    ),
    "attention.causal": (True,),
}


_MAXIMA = {
    key: most
    for most, keys in (
        (limits.MAX_CONTEXT_TOKENS, "context_length"),
        (limits.MAX_LAYERS, f"block_count leading_dense_block_count full_attention_interval {_PATTERN}"),
        (limits.MAX_LAYERS, "attention.shared_kv_layers"),
        (limits.MAX_HIDDEN_SIZE, "embedding_length embedding_length_per_layer_input moe_latent_size"),
        (limits.MAX_HIDDEN_SIZE, "attention.q_lora_rank attention.kv_lora_rank"),
        (limits.MAX_INTERMEDIATE_SIZE, "feed_forward_length expert_feed_forward_length"),
        (limits.MAX_INTERMEDIATE_SIZE, "expert_shared_feed_forward_length"),
        (limits.MAX_HEADS, "attention.head_count attention.head_count_kv ssm.group_count ssm.time_step_rank"),
        (limits.MAX_HEAD_DIM, "attention.key_length attention.key_length_swa attention.key_length_mla"),
        (limits.MAX_HEAD_DIM, "attention.value_length attention.value_length_swa attention.value_length_mla"),
        (limits.MAX_HEAD_DIM, "rope.dimension_count shortconv.l_cache ssm.conv_kernel ssm.state_size"),
        (limits.MAX_HEADS * limits.MAX_HEAD_DIM, "ssm.inner_size"),
        (MAX_EXPERTS, "expert_count expert_used_count expert_shared_count"),
        (MAX_EXPERTS, "expert_group_count expert_group_used_count"),
    )
    for key in keys.split()
}


class Entries(JsonFile):
    """The entries of an architecture, without its prefix. They record their reads, see `refuse_unread`.

    A number per layer (`_PER_LAYER`) reads as the largest one.

    Args:
        varying: entries that may differ between layers.

    Raise UnsupportedModelError if layers have different sizes, and ModelError if an array's length differs
    from the number of layers, or there is no embedding.
    """

    def __init__(
        self, files: Sequence[GGUFFile], architecture: str, varying: Set[str], *, skips_zeros: bool
    ) -> None:
        path, prefix = files[0].path, f"{architecture}."
        own = {key for key in files[0].metadata if key.startswith(prefix)}
        super().__init__(path, {key.removeprefix(prefix): files[0].metadata[key] for key in own})
        self._files, self._read = files, set[str]()
        self.shapes = {place.name: place.shape for file in files for place in file.tensors.values()}
        self.arrays = {
            key: value.data.tolist() for key, value in self.values.items() if isinstance(value, NumberArray)
        }
        for key in self.arrays.keys() & _PER_LAYER:
            numbers, blocks = self.arrays[key], self.integer("block_count")
            if len(numbers) != blocks:
                raise ModelError(
                    f"{path} has {len(numbers)} numbers of {key} for {blocks} layers: download it again."
                )
            sizes = {number for number in numbers if number or not skips_zeros} or {0}
            if len(sizes) > 1 and key not in varying:
                raise UnsupportedModelError(
                    f"{path} has layers with different {key}, which is not supported."
                )
            self.values[key] = max(sizes)
        predicting = self.integer(PREDICTING_LAYERS, 0, minimum=0)
        self.num_layers = self.integer("block_count") - predicting
        self.hidden_size = self.integer("embedding_length")
        self.heads = self.integer("attention.head_count")
        default = max(self.hidden_size // self.heads, 1)
        self.head_dim = self.integer("attention.key_length", default)

    def raw(self, key: str) -> Any:
        self._read.add(key)
        return super().raw(key)

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 0) -> int:
        """Return an integer up to the entry's limit."""
        return super().integer(key, default, minimum, maximum or _MAXIMA.get(key, 2**31 - 1))

    def _present(self, key: str, default: Any) -> Any:
        self._read.add(key)
        return super()._present(key, default)

    def refuse_unread(self, idle: Set[str]) -> None:
        """Raise UnsupportedModelError for an unread entry, unless it has no effect or is `idle`."""
        for key, value in self.values.items():
            if key not in self._read | _IDLE | idle and value not in _NEUTRAL.get(key, ()):
                raise UnsupportedModelError(
                    f"{self.path} sets {key}, which is not supported: choose another model."
                )

    def unsupported(self, what: str) -> UnsupportedModelError:
        """Return an error: the file "has `what`, which is not supported"."""
        return UnsupportedModelError(f"{self.path} has {what}, which is not supported.")

    def has(self, end: str) -> bool:
        return any(name.endswith(end) for name in self.shapes)

    def floats(self, name: str) -> list[float]:
        """Return the numbers of a vector of floats; none: the file lacks it."""
        for file in self._files:
            place = file.tensors.get(name)
            if place is not None and len(place.shape) == 1 and place.type.dtype is not None:
                return [float(number) for number in GGUFTensor(file, place).dequantised(0, place.shape[0])]
        return []

    def rope_factors(self, name: str, count: int) -> list[float]:
        """Return the divisors of RoPE's frequencies. Raise ModelError for impossible numbers."""
        factors = self.floats(name)
        if len(factors) != count or not all(1e-6 < factor < 1e9 for factor in factors):
            raise ModelError(f"{self.path} has {name} that are not valid factors: download it again.")
        return factors

    def per_layer(self, key: str) -> list[int]:
        """Return an entry's number for each layer; zeros included."""
        numbers = self.arrays.get(key) or [self.integer(key)] * self.num_layers
        self._read.add(key)
        if len(numbers) < self.num_layers:
            raise ModelError(f"{self.path} has no {key} for each layer: download it again.")
        return numbers[: self.num_layers]

    def layer_types(self, period: int) -> list[str]:
        """Return layers' types: the last in a period has full attention, unless the file says otherwise."""
        if _PATTERN in self.arrays:
            has_window = [bool(flag) for flag in self.per_layer(_PATTERN)]
        else:
            period = self.integer(_PATTERN, period)
            has_window = [(layer + 1) % period != 0 for layer in range(self.num_layers)]
        return ["sliding_attention" if windowed else "full_attention" for windowed in has_window]

    def default_rope(self, base: str = "rope.freq_base") -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.number(base, 10_000.0)}

    def rope(self, *scalings: str) -> dict[str, Any]:
        """Return RoPE's parameters as config.json has them; `scalings`: the supported ones."""
        rope = self.default_rope()
        key = "rope.scaling.factor" if "rope.scaling.factor" in self else "rope.scale_linear"
        scaling = self.text("rope.scaling.type", "linear")  # as in llama.cpp
        if scaling == "none" or (scaling == "linear" and self.raw(key) in (None, 0, 1)):
            self._read.update(_OF_YARN)
            return rope
        if scaling not in scalings:
            raise UnsupportedModelError(
                f"{self.path} asks for the rope type {scaling[:40]!r}, which is not supported."
            )
        if scaling == "linear":
            return rope | {"rope_type": "linear", "factor": self.number(key)}
        trained = self.integer("context_length")
        original = self.integer("rope.scaling.original_context_length", trained)
        return rope | {
            "rope_type": "yarn",
            "factor": self.number("rope.scaling.factor", trained / original),
            "original_max_position_embeddings": original,
            "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
        }
