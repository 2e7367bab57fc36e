"""Matrices of a layer's experts, stacked on a device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.models.experts_config import Gating
from neo_desktop.models.linear.dense import Plain
from neo_desktop.models.linear.grouped import Grouped, dequantise
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.linear.quantised_gpu import QuantisedOnGPU


@dataclass(frozen=True, slots=True)
class Stacked:
    """One matrix per expert, `[rows, columns]`, stacked."""

    weight: Tensor | Grouped  # [experts * rows, columns]
    bias: Tensor | None  # [experts * rows]
    rows: int  # a multiple of 64

    def of(self, expert: int | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return an expert's matrix, in `dtype` if it is quantised, and its bias.

        `expert` is its number, or a tensor [1] with the number on the device.
        """
        if isinstance(expert, int):
            first = expert * self.rows
            expert_rows = slice(first, first + self.rows)
            bias = None if self.bias is None else self.bias[expert_rows]
            if isinstance(self.weight, Tensor):
                return self.weight[expert_rows], bias
            return self._numbers(self.weight, first, dtype), bias
        rows = expert.long() * self.rows + torch.arange(self.rows, device=expert.device)
        bias = None if self.bias is None else self.bias.index_select(0, rows)
        if isinstance(self.weight, Tensor):
            return self.weight.index_select(0, rows), bias
        return self._numbers(self.weight, rows, dtype), bias

    def _numbers(self, weight: Grouped, rows: Tensor | int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.rows, weight.columns, dtype=dtype, device=weight.words.device)
        dequantise(weight, rows, out)
        return out


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """A layer's experts."""

    count: int
    gate: Stacked
    up: Stacked
    down: Stacked
    gating: Gating = "silu"


def stacked(linear: Linear, experts: int) -> Stacked:
    """Return a stacked matrix; formats other than plain and quantised are copied as dense numbers."""
    if isinstance(linear, QuantisedOnGPU) and len(linear.parts) == 1:
        (part,) = linear.parts
        return Stacked(part, linear.bias, part.rows // experts)
    weight = linear.weight if isinstance(linear, Plain) else linear.dense()
    return Stacked(weight, linear.bias, len(weight) // experts)
