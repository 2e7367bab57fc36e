"""Fused operators that replace several nodes of a graph, with the tensor shapes of transformers."""

import torch
from torch import Tensor, nn

from neo_desktop import native
from neo_desktop.models.linear.protocol import Embedding, Linear
from neo_desktop.models.operators import Operators
from neo_desktop.models.traced.decoder import TracedDecoder


class Product(nn.Module):
    """A linear layer for inputs with any leading dimensions."""

    def __init__(self, linear: Linear, rows: int) -> None:
        super().__init__()
        self.linear, self.rows = linear, rows

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return self.linear.multiply(flat, x.new_empty(len(flat), self.rows)).view(*x.shape[:-1], self.rows)


class RMSNorm(nn.Module):
    """An RMSNorm over the last dimension.

    Args:
        is_rounded_before: round to the dtype before multiplying with the weight.
    """

    def __init__(self, weight: Tensor, eps: float, operators: Operators, is_rounded_before: bool) -> None:
        super().__init__()
        self.weight = weight if is_rounded_before else weight.float()
        self.eps, self._operators, self.is_rounded_before = eps, operators, is_rounded_before
        self._nothing = torch.zeros(1, len(weight), dtype=self.weight.dtype, device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        wide = flat if self.is_rounded_before else flat.float()
        if wide.device.type != "cpu":
            normed = torch.rms_norm(wide, wide.shape[-1:], eps=self.eps) * self.weight
        else:
            normed = torch.empty(wide.shape, dtype=wide.dtype)
            nothing = self._nothing.expand(len(wide), -1)
            self._operators.add_rms_norm(nothing, wide, self.weight, self.eps, normed)
        return normed.to(x.dtype).view(x.shape)


class AddRMSNorm(nn.Module):
    """A sum, and its RMSNorm."""

    def __init__(self, weight: Tensor, eps: float, operators: Operators) -> None:
        super().__init__()
        self.weight, self.eps, self._operators = weight, eps, operators

    def forward(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return residual + x [1, rows, hidden], and the norm."""
        total = residual.clone(memory_format=torch.contiguous_format)
        x = x.contiguous()
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._operators.add_rms_norm(x[0], total[0], self.weight, self.eps, normed[0])
        return total, normed


class Gate(nn.Module):
    """silu(gate) * up."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self._operators = operators

    def forward(self, gate_up: Tensor) -> Tensor:
        """Return [.., rows, intermediate] of [.., rows, 2 * intermediate]."""
        flat = gate_up.reshape(-1, gate_up.shape[-1])
        out = flat.new_empty(len(flat), flat.shape[1] // 2)
        self._operators.silu_mul(flat, out)
        return out.view(*gate_up.shape[:-1], -1)


class Rope(nn.Module):
    """RoPE, after an optional RMSNorm per head.

    Args:
        weight: [heads, head_dim] of the RMSNorm; None: no norm.
        rows_at: the dimensions of rows in the input and in the result, 1 or 2; heads have the other one.
    """

    def __init__(self, weight: Tensor | None, eps: float, rows_at: tuple[int, int]) -> None:
        super().__init__()
        self.weight, self.eps, self.rows_at = weight, eps, rows_at

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the rotated heads, [1, heads, rows, head_dim] or [1, rows, heads, head_dim].

        Args:
            x: of one of these shapes.
            cos: [rows, head_dim] float32; sin has the same shape, and its first half is negated.
        """
        heads = x[0].transpose(0, self.rows_at[0] - 1)
        if heads.device.type != "cpu":
            if self.weight is not None:
                heads = torch.rms_norm(heads, heads.shape[-1:], eps=self.eps) * self.weight
            swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
            heads = (heads * cos[:, None] + swapped * sin[:, None]).to(x.dtype)
        else:
            heads = heads.clone(memory_format=torch.contiguous_format)
            native.rope(heads, cos, sin, self.weight, self.eps)
        return heads.transpose(0, self.rows_at[1] - 1)[None]


class Given(nn.Module):
    """The embeddings [1, rows, hidden] with those rows replaced that `TracedDecoder.given` has."""

    def __init__(self, decoder: TracedDecoder) -> None:
        super().__init__()
        self._decoder = decoder

    def forward(self, x: Tensor) -> Tensor:
        given = self._decoder.given
        return x if given is None else x.index_copy(1, given[0], given[1][None, :, : x.shape[2]])


class LookUp(nn.Module):
    """An embedding."""

    def __init__(self, table: Embedding, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._table, self._columns, self._dtype = table, columns, dtype

    def forward(self, rows: Tensor) -> Tensor:
        out = torch.empty(rows.numel(), self._columns, dtype=self._dtype, device=rows.device)
        self._table.look_up(rows.flatten(), out)
        return out.view(*rows.shape, self._columns)
