"""The constants of attention, as one value per layer."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class AttentionSpec(NamedTuple):
    """The constants of a layer's attention; kernels take them in this order."""

    scale: float  # factor on q·k
    window: int | None = None  # sliding window in tokens, the query included; None: the whole context
    sinks: Tensor | None = None  # [heads]: per head, the score of one more token with a value of zero
    softcap: float | None = None  # the score s of every other token becomes softcap * tanh(s / softcap)


class AttentionConfig(Protocol):
    """The part of a model's configuration that attention depends on."""

    @property
    def attention_scale(self) -> float: ...
    @property
    def attention_softcap(self) -> float | None: ...
    @property
    def layer_windows(self) -> tuple[int | None, ...]: ...


def heads_of(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as views of qkv [..., heads + kv_parts * kv_heads, head_dim].

    With one part, the keys are also the values.
    """
    return qkv[..., :heads, :], qkv[..., heads : heads + kv_heads, :], qkv[..., -kv_heads:, :]


def specs_of(config: AttentionConfig, sinks: Sequence[Tensor | None] | None) -> list[AttentionSpec]:
    """Return the specs of a model's layers; sinks: per layer, [heads]."""
    sinks = sinks or [None] * len(config.layer_windows)
    return [
        AttentionSpec(config.attention_scale, window, each, config.attention_softcap)
        for window, each in zip(config.layer_windows, sinks, strict=True)
    ]
