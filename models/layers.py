"""The arithmetic of a decoder layer: normalisation, rotation, gated activation; and a layer's weights."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from neo_desktop.models.linear import Linear


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer, all in the model's dtype; matrices are `[out, in]`."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: a row per head, so that one norm serves both
    output: Linear  # [hidden, heads * head_dim]
    post_attention_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]: gates, then ups
    down: Linear  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class Rotary:
    """How to rotate each token's heads, the same in all layers: `cos` and `sin` `[n, 1, head_dim]` float32.

    The first half of `sin` is negated, so that rotating is `x * cos + (x with its halves swapped) * sin`.
    """

    cos: Tensor
    sin: Tensor


def rotary(positions: Tensor, inverse_frequencies: Tensor, attention_factor: float) -> Rotary:
    """The rotation at `positions` `[n]`, from `inverse_frequencies` `[head_dim / 2]` (arXiv 2104.09864)."""
    angles = (positions.float()[:, None] * inverse_frequencies)[:, None, :]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return Rotary(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def rotate(heads: Tensor, rotation: Rotary) -> Tensor:
    """Rotate `heads` `[n, any, head_dim]`, in float32 inside; channel i is paired with i + head_dim / 2."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * rotation.cos + swapped * rotation.sin).to(heads.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of the last dimension, in float32 inside, and scale by `weight`."""
    # Scaled after the rounding, as the models were trained: 16-bit logits then agree with the reference.
    return torch.rms_norm(x, x.shape[-1:], eps=eps) * weight


def gated_silu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for `gate_up` `[n, 2 * intermediate]`; returns `[n, intermediate]` (SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
