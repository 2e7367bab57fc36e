"""Gated SiLU."""

from torch import Tensor

from neo_desktop.models.layers import gated_silu


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See `dispatch.silu_mul`."""
    out.copy_(gated_silu(gate_up))
