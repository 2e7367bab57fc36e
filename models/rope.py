"""Rotary position embedding: the frequencies of a checkpoint."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.models.json_file import JsonFile, ModelError, NotWrittenError


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths slowed by `factor`, short ones kept, interpolated in between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_tokens: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Interpolation by parts with an attention temperature (YaRN, arXiv 2309.00071, sections 3.2 to 3.4)."""

    factor: float
    original_max_tokens: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Each frequency divided by its own factor; GGUF files express Llama 3.1's scaling like this."""

    factors: tuple[float, ...]  # [head_dim / 2]


Scaling = LinearScaling | FactorScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base of the RoPE frequencies, and their scaling for longer contexts."""

    theta: float = 10_000.0
    scaling: Scaling | None = None

    @classmethod
    def from_config(cls, config: JsonFile, max_position_embeddings: int) -> "RopeConfig":
        """Read config.json in either spelling: `rope_theta` + `rope_scaling`, or `rope_parameters`.

        Raises ModelError for an unsupported kind.
        """
        rope = _rotation(config)
        if any(isinstance(value, dict) for value in rope.values.values()):
            raise NotWrittenError(f"{config.path} sets rope_parameters per layer type.")
        theta = rope.number("rope_theta", config.number("rope_theta", cls().theta))
        if theta <= 1:
            raise ModelError(
                f"{config.path} has a rope_theta of {theta:g}, which is not above 1: correct it."
            )
        for source in (config, rope):
            if source.raw("partial_rotary_factor") not in (None, 1):
                raise NotWrittenError(
                    f"{config.path} sets partial_rotary_factor; the decoder here rotates whole heads."
                )
        # transformers prefers the number beside the section to the one inside.
        original = rope.integer("original_max_position_embeddings", max_position_embeddings)
        original = config.integer("original_max_position_embeddings", original)
        return cls(theta, _scaling(rope, max_position_embeddings, original))

    @property
    def attention_factor(self) -> float:
        """Factor on cos and sin: 1 except with YaRN."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Return radians per position for each pair of channels, `[head_dim / 2]` float32 on the CPU."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / self.theta**exponents
        match self.scaling:
            case None:
                return frequencies
            case LinearScaling(factor):
                return frequencies / factor
            case FactorScaling(factors):
                return frequencies / torch.tensor(factors)
            case Llama3Scaling(factor, low, high, original):
                turns = original * frequencies / (2 * math.pi)  # in the original context
                keep = ((turns - low) / (high - low)).clamp(0, 1)
                return (1 - keep) * frequencies / factor + keep * frequencies
            case YarnScaling() as yarn:
                keep = 1 - _yarn_ramp(yarn, self.theta, head_dim)
                return (1 - keep) * frequencies / yarn.factor + keep * frequencies


def _rotation(config: JsonFile) -> JsonFile:
    """Return the RoPE section: `rope_scaling`, unless it is empty."""
    sections = (config.section(key) for key in ("rope_scaling", "rope_parameters"))
    filled = [section for section in sections if section is not None and section.values]
    return filled[0] if filled else JsonFile(config.path, {})


def _scaling(rope: JsonFile, max_position_embeddings: int, original: int) -> Scaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    match kind:
        case "default":
            return None
        case "dynamic":  # differs only beyond max_position_embeddings, the end of the context
            rope.number("factor")
            return None
        case "linear":
            return LinearScaling(rope.number("factor"))
        case "llama3":
            scaling = Llama3Scaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_tokens=original,
            )
            if scaling.low_freq_factor >= scaling.high_freq_factor:
                raise ModelError(
                    f"{rope.path} has low_freq_factor not below high_freq_factor: correct the file."
                )
            return scaling
        case "yarn":
            factor = rope.number("factor", max_position_embeddings / original)
            return YarnScaling(
                factor=factor,
                original_max_tokens=original,
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                truncate="truncate" not in rope or rope.boolean("truncate", False),
                attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
            )
    raise NotWrittenError(
        f"{rope.path} asks for the rope type {kind[:40]!r}; the decoder here computes default, linear, "
        "dynamic, llama3 and yarn."
    )


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's attention temperature for a context stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(rope: JsonFile, factor: float) -> float:
    """Return the temperature of section 3.4, or the ratio of two if both `mscale`s are given."""

    mscale, mscale_all_dim = rope.raw("mscale"), rope.raw("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_temperature(factor, rope.number("mscale")) / yarn_temperature(
            factor, rope.number("mscale_all_dim")
        )
    return yarn_temperature(factor)


def _yarn_ramp(yarn: YarnScaling, theta: float, head_dim: int) -> Tensor:
    """Return 0 for channels with more than `beta_fast` turns in the original context, 1 below `beta_slow`."""

    def channel(turns: float) -> float:
        return head_dim * math.log(yarn.original_max_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(yarn.beta_fast), channel(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
