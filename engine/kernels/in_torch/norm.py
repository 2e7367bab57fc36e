"""Residual addition and RMSNorm."""

from torch import Tensor

from neo_desktop.models.layers import rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `dispatch.add_rms_norm`."""
    residual.add_(x)
    out.copy_(rms_norm(residual, weight, eps))
