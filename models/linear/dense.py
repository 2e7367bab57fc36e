"""Matrices in the model's dtype."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neo_desktop.models.linear.packed import HOST, Room, huge_pages
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.linear.quantised import PartShape
from neo_desktop.models.linear.quantised_gpu import Kernels
from neo_desktop.models.linear.tiles import Tiles, fits_tiles, tiles_bytes


class Plain:
    """A `protocol.Embedding` with a dense weight; `device` has the memory, None: the weight's device."""

    form = "plain"

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, device: torch.device | None = None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._device = weight.device if device is None else device

    def memory(self) -> dict[torch.device, int]:
        return {self._device: self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)}

    def load(self, row: int, weight: Tensor) -> None:
        self.weight[row : row + len(weight)].copy_(weight)

    def dense(self) -> Tensor:
        return self.weight

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def look_up(self, rows: Tensor, out: Tensor) -> None:
        torch.index_select(self.weight, 0, rows, out=out)


@dataclass(frozen=True, slots=True)
class Dense:
    """A `protocol.WeightFormat`."""

    uses_tiles: bool = True
    room: Room = huge_pages
    tables: Room | None = None

    def on_gpu(self, kernels: Kernels, tables: Room | None = None) -> "Dense":
        return replace(self, tables=tables)

    def named(self, name: str) -> "Dense":
        return self

    def of_rows(self, rows: slice) -> "Dense":
        return self

    @property
    def parts(self) -> tuple[PartShape, ...]:
        return ()

    def empty(
        self, rows: int, columns: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        bias = torch.empty(rows, dtype=dtype, device=device) if has_bias else None
        if self.uses_tiles and device.type == "cpu" and fits_tiles(columns):
            return Tiles(rows, columns, bias, dtype, self.room)
        return Plain(torch.empty(rows, columns, dtype=dtype, device=device), bias)

    def table(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Linear:
        if self.tables is None:
            return self.empty(rows, columns, has_bias=False, dtype=dtype, device=device)
        numbers = self.tables(rows * columns * dtype.itemsize).view(dtype).view(rows, columns)
        return Plain(numbers, device=HOST)

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Count whole tiles, which a GPU does not need: real models have multiples of 16 rows."""
        if self.uses_tiles and fits_tiles(columns):
            return tiles_bytes(rows, columns, dtype)
        return rows * columns * dtype.itemsize

    def loading_bytes(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
        return 0


DENSE = Dense()
