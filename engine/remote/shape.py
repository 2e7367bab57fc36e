"""Model shape for a worker's attention."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from neo_desktop.engine.remote.wire import ProtocolError
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8)}
MAX_BLOCK_SIZE = 1024


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and constants of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_parts: int  # see `ModelConfig`
    attention_scale: float  # see `AttentionSpec`
    layer_windows: tuple[int | None, ...]  # per layer
    attention_sinks: bool
    attention_softcap: float | None
    block_size: int  # tokens
    dtype: torch.dtype  # of q, k, v and the output
    kv_dtype: torch.dtype  # of K and V in memory

    @classmethod
    def of(
        cls, config: ModelConfig, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> Self:
        """Return a model's shape; KV has the model's dtype unless `kv_dtype` is given."""
        return cls(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.kv_parts,
            config.attention_scale,
            config.layer_windows,
            config.attention_sinks,
            config.attention_softcap,
            block_size,
            dtype,
            kv_dtype or dtype,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layer_windows)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": str(self.dtype), "kv_dtype": str(self.kv_dtype)}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Parse the JSON of another computer.

        Raises:
            ProtocolError: a value is missing or invalid.
        """
        try:
            dtypes = {name: _DTYPES[data[name]] for name in ("dtype", "kv_dtype")}
            shape = cls(**(data | dtypes | {"layer_windows": tuple(data["layer_windows"])}))
            limits = (
                (shape.num_layers, MAX_LAYERS),
                (shape.num_heads, MAX_HEADS),
                (shape.num_kv_heads, MAX_HEADS),
                (shape.head_dim, MAX_HEAD_DIM),
                (shape.kv_parts, 2),
                (shape.block_size, MAX_BLOCK_SIZE),
                *((window, 1 << 40) for window in shape.layer_windows if window is not None),
            )
            if not all(isinstance(size, int) and 1 <= size <= most for size, most in limits):
                raise ValueError("a size is out of range")
            if not isinstance(shape.attention_scale, float) or not isinstance(shape.attention_sinks, bool):
                raise ValueError("the scale is not a number, or the sinks flag is missing")
            if shape.attention_softcap is not None and not 0 < shape.attention_softcap < math.inf:
                raise ValueError("the softcap is not a positive number")
            if shape.num_heads % shape.num_kv_heads or shape.dtype is torch.int8:
                raise ValueError("the sizes do not match")
            return shape
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the model's shape cannot be used: {error!r}") from None
