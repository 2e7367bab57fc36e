"""The buffers of a sub-batch's state that native row programs read and write, and their widths.

`stages.State.seen_by_native` passes them in this order.
"""

import torch

from neo_desktop.models.config import ModelConfig
from neo_desktop.native import Buffer

GIVEN = RESIDUAL, X, QKV, ATTENTION, COS, SIN = range(6)


def given_buffers(config: ModelConfig, dtype: torch.dtype) -> list[Buffer]:
    """Return the buffers in the order of `GIVEN`; `dtype`: of the model."""
    widths = config.carried_width, config.hidden_size, config.qkv_rows, config.num_heads * config.head_dim
    angles = Buffer(config.rotation_width, torch.float32, is_given=True)
    return [*(Buffer(width, dtype, is_given=True) for width in widths), angles, angles]
