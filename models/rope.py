"""Rotary position embedding: the frequencies of a checkpoint."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.models.json_file import JsonFile, ModelError, NotWrittenError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base of the RoPE frequencies, and their scaling for longer contexts.

    Args:
        factors: [head_dim / 2]: each frequency is divided by its own; empty: by 1.
        attention_factor: on cos and sin: 1 except with YaRN.
        stretched_tokens: the context to which YaRN stretches; 0: another scaling.
    """

    theta: float = 10_000.0
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    stretched_tokens: int = 0

    @classmethod
    def from_config(cls, config: JsonFile, max_position_embeddings: int, head_dim: int) -> "RopeConfig":
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
        plain = cls(theta)
        kind = rope.text("rope_type", rope.text("type", "default"))
        match kind:
            case "default":
                return plain
            case "dynamic":  # differs only beyond max_position_embeddings, the end of the context
                rope.number("factor")
                return plain
            case "linear":  # position interpolation, arXiv 2306.15595
                return cls(theta, (rope.number("factor"),) * (head_dim // 2))
            case "llama3":
                return cls(theta, _llama3(rope, plain.inverse_frequencies(head_dim), original))
            case "yarn":
                factor = rope.number("factor", max_position_embeddings / original)
                attention = rope.number("attention_factor", _yarn_attention_factor(rope, factor))
                factors = _yarn(rope, factor, original, theta, head_dim)
                return cls(theta, factors, attention, int(factor * original))
        raise NotWrittenError(
            f"{rope.path} asks for the rope type {kind[:40]!r}; the decoder here computes default, linear, "
            "dynamic, llama3 and yarn."
        )

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Return radians per position for each pair of channels, `[head_dim / 2]` float32 on the CPU."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / self.theta**exponents
        return frequencies / torch.tensor(self.factors) if self.factors else frequencies


def _rotation(config: JsonFile) -> JsonFile:
    """Return the RoPE section: `rope_scaling`, unless it is empty."""
    sections = (config.section(key) for key in ("rope_scaling", "rope_parameters"))
    filled = [section for section in sections if section is not None and section.values]
    return filled[0] if filled else JsonFile(config.path, {})


def _llama3(rope: JsonFile, frequencies: Tensor, original: int) -> tuple[float, ...]:
    """Return Llama 3.1's factors: short wavelengths are kept, long ones slowed, interpolated in between."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ModelError(f"{rope.path} has low_freq_factor not below high_freq_factor: correct the file.")
    turns = original * frequencies / (2 * math.pi)  # in the original context
    return _interpolated(rope.number("factor"), (turns - low) / (high - low))


def _yarn(rope: JsonFile, factor: float, original: int, theta: float, head_dim: int) -> tuple[float, ...]:
    """Return the factors of YaRN (arXiv 2309.00071, sections 3.2 to 3.4).

    Channels of over `beta_fast` turns in the original context are kept, those of under `beta_slow` slowed.
    """

    def channel(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(rope.number("beta_fast", 32.0)), channel(rope.number("beta_slow", 1.0))
    if "truncate" not in rope or rope.boolean("truncate", False):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    return _interpolated(factor, 1 - (torch.arange(head_dim // 2, dtype=torch.float32) - low) / width)


def _interpolated(factor: float, kept: Tensor) -> tuple[float, ...]:
    """Return a factor per frequency: 1 where it is kept wholly (1), `factor` where not at all (0)."""
    kept = kept.clamp(0, 1).double()
    return tuple((1 / ((1 - kept) / factor + kept)).tolist())


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
